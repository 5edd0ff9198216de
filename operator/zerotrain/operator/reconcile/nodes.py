"""The state of the nodes that hold workers: drains move jobs off them, losses end attempts.

`cluster.nodes` fills the views, and keeps only nodes that matter: a healthy node is not contained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum

from zerotrain.contract.progress import Phase, Progress

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Taint by which an administrator declares that a machine is shut down, so that its programs have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTaint:
    key: str
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """One node."""

    name: str
    ready: bool = True
    not_ready_since: datetime | None = None
    learned_at: datetime | None = None
    """Time at which this operator learned of it, e.g. much later if the API server was unavailable."""
    unschedulable: bool = False
    """Whether the node is cordoned, as before a drain."""
    taints: tuple[NodeTaint, ...] = ()
    gone: bool = False
    """Whether the node's object was deleted while this operator watched."""

    @property
    def out_of_service(self) -> bool:
        """Whether the node's pods will not come back and none of their programs still runs."""
        return any(taint.key == OUT_OF_SERVICE for taint in self.taints)


class Loss(Enum):
    """Certainty that the workers of a node are gone."""

    SILENT = "silent"
    """A node NotReady for too long. The machine may still run and write, so its pods get their grace
    period."""
    FINAL = "final"
    """A node out of service, or deleted: its pods are removed without waiting."""


SIGN_SLACK = timedelta(seconds=10)
"""Minimum time of a step after the node's last sign that proves its workers alive; clocks differ slightly."""

LONGEST_FACTOR = 2.0
"""Multiple of the longest step or checkpoint that still counts as no silence."""

UNASKED_FACTOR = 5
"""Factor on the patience for a node that could not be asked, as long as dead nodes of other jobs take the
slots."""

MAX_PATIENCE = timedelta(hours=1)
"""Upper bound of the patience, however long the ranks say that their steps are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSigns:
    """The signs of life of workers on nodes that do not report to the control plane."""

    patience: timedelta
    """Duration of silence that counts as a loss."""
    step_at: datetime | None = None
    """Time of the attempt's newest step. Every rank takes part in every step: while steps come, all ranks
    live."""
    last_responses: Mapping[str, datetime] = field(default_factory=dict)
    """Time at which a worker on the node last answered this operator, by node."""
    watched_since: datetime | None = None
    """Time at which this operator began to ask the workers; none had answered before."""
    unasked: Set[str] = frozenset()
    """Nodes whose workers were not asked in the last round, because other workers took all slots."""


def losses(nodes: Mapping[str, NodeView], signs: NodeSigns, *, now: datetime) -> Mapping[str, Loss]:
    """Return the nodes whose workers count as lost."""
    found = {}
    for view in nodes.values():
        if view.gone or view.out_of_service:
            found[view.name] = Loss.FINAL
        elif (due := lost_at(view, signs)) is not None and now >= due:
            found[view.name] = Loss.SILENT
    return found


def lost_at(view: NodeView, signs: NodeSigns) -> datetime | None:
    """Return the time at which a node that does not answer counts as lost; None if nothing is wrong with
    it."""
    if view.ready or view.not_ready_since is None:
        return None
    last, step_at = view.not_ready_since, signs.step_at
    if step_at is not None and step_at > last + SIGN_SLACK:
        last = step_at
    # An operator that does not know of a silent node does not ask its workers.
    for sign in (signs.last_responses.get(view.name), signs.watched_since, view.learned_at):
        last = max(last, sign) if sign is not None else last
    return last + signs.patience * (UNASKED_FACTOR if view.name in signs.unasked else 1)


def patience(least_s: float, progress: Progress | None) -> timedelta:
    """Return how long a node may be silent: at least `least_s` seconds, longer if steps or the checkpoint
    take longer."""
    least = timedelta(seconds=least_s)
    if progress is None or progress.motion is None:
        return least
    writes, motion = progress.phase is Phase.CHECKPOINT, progress.motion
    longest = motion.longest_checkpoint_seconds if writes else motion.longest_step_seconds
    if longest is None or not 0 < longest < math.inf:
        return least
    return max(least, timedelta(seconds=min(LONGEST_FACTOR * longest, MAX_PATIENCE.total_seconds())))
