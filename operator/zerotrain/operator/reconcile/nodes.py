"""What decisions need to know of the nodes that hold workers: drains move jobs off them, losses end attempts.

Filled by `cluster.nodes`, which keeps only nodes that have something to say: a healthy one is not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum

from zerotrain.contract.progress import Phase, Progress

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Taint by which an administrator says that a machine is shut down: what ran there has ended."""


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
    told_at: datetime | None = None
    """When this operator heard of it, which may be much later: after the API server was away."""
    unschedulable: bool = False
    """Cordoned, as before a drain."""
    taints: tuple[NodeTaint, ...] = ()
    gone: bool = False
    """The node's object was deleted while this operator watched."""

    @property
    def out_of_service(self) -> bool:
        """Its pods will not come back, and nothing of them runs on."""
        return any(taint.key == OUT_OF_SERVICE for taint in self.taints)


class Loss(Enum):
    """How surely the workers of a node are gone."""

    SILENT = "silent"
    """NotReady for too long. The machine may still run and write: its pods are given their time to go."""
    FINAL = "final"
    """Out of service, or deleted: its pods are removed without waiting for anybody."""


NO_LOSSES: Mapping[str, Loss] = {}

SIGN_SLACK = timedelta(seconds=10)
"""A step so much later than the node's last sign shows that its workers live; clocks differ a little."""

LONGEST_FACTOR = 2.0
"""A step, or a checkpoint, of so many times the longest one is still no silence."""

UNASKED_FACTOR = 5
"""A node of whom nobody could ask is given so much longer: for as long as dead nodes of others take slots."""

MAX_PATIENCE = timedelta(hours=1)
"""However long the ranks say that their steps are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signs:
    """What speaks for the workers of nodes that the control plane does not hear of."""

    patience: timedelta
    """Silence of so long is a loss."""
    step_at: datetime | None = None
    """Of the attempt's newest step. Every rank takes part in every step: while steps come, all live."""
    heard: Mapping[str, datetime] = field(default_factory=dict)
    """By node: when a worker there last answered this operator."""
    watched_since: datetime | None = None
    """Nobody listened to the workers before."""
    unasked: Set[str] = frozenset()
    """Nodes whose workers were to be asked last and were not: others took all slots."""


def losses(nodes: Mapping[str, NodeView], signs: Signs, *, now: datetime) -> Mapping[str, Loss]:
    """Nodes whose workers count as lost."""
    if not nodes:
        return NO_LOSSES
    found = {}
    for view in nodes.values():
        if view.gone or view.out_of_service:
            found[view.name] = Loss.FINAL
        elif (due := lost_at(view, signs)) is not None and now >= due:
            found[view.name] = Loss.SILENT
    return found


def lost_at(view: NodeView, signs: Signs) -> datetime | None:
    """When a node that does not answer counts as lost; None while there is no reason to fear for it."""
    if view.ready or view.not_ready_since is None:
        return None
    last, step_at = view.not_ready_since, signs.step_at
    if step_at is not None and step_at > last + SIGN_SLACK:
        last = step_at
    # Whoever does not know that a node fell silent does not listen to its workers.
    for sign in (signs.heard.get(view.name), signs.watched_since, view.told_at):
        last = max(last, sign) if sign is not None else last
    return last + signs.patience * (UNASKED_FACTOR if view.name in signs.unasked else 1)


def patience(least_s: float, progress: Progress | None) -> timedelta:
    """At least `least_s`; longer where the ranks' steps, or the checkpoint they write, take longer."""
    motion = progress.motion if progress is not None else None
    longest = None
    if motion is not None and progress is not None:
        writes = progress.phase is Phase.CHECKPOINT
        longest = motion.longest_checkpoint_seconds if writes else motion.longest_step_seconds
    least = timedelta(seconds=least_s)
    if longest is None or not 0 < longest < math.inf:
        return least
    return max(least, timedelta(seconds=min(LONGEST_FACTOR * longest, MAX_PATIENCE.total_seconds())))
