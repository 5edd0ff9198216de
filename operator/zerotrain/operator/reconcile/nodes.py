"""What decisions need to know of the nodes that hold workers: drains move jobs off them, losses end attempts.

Filled by `cluster.nodes`, which keeps only nodes that have something to say: a healthy one is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

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

STEP_SLACK = timedelta(seconds=10)
"""A step so much later than the node's last sign shows that its workers live; clocks differ a little."""


def losses(
    nodes: Mapping[str, NodeView], *, patience: timedelta, step_at: datetime | None, now: datetime
) -> Mapping[str, Loss]:
    """Nodes whose workers count as lost. `step_at` is the time of the attempt's newest step.

    Every rank takes part in every step: while steps come, a node that the control plane cannot reach still
    does its work.
    """
    if not nodes:
        return NO_LOSSES
    found = {}
    for view in nodes.values():
        if view.gone or view.out_of_service:
            found[view.name] = Loss.FINAL
        elif (due := lost_at(view, patience=patience, step_at=step_at)) is not None and now >= due:
            found[view.name] = Loss.SILENT
    return found


def lost_at(view: NodeView, *, patience: timedelta, step_at: datetime | None) -> datetime | None:
    """When a node that does not answer counts as lost; None while there is no reason to fear for it."""
    if view.ready or view.not_ready_since is None:
        return None
    if step_at is not None and step_at > view.not_ready_since + STEP_SLACK:
        return step_at + patience
    return view.not_ready_since + patience
