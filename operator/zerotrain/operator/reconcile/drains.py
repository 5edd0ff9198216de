"""Workers that have to leave their nodes: the whole job moves, once.

A drain cordons the node and then asks for the eviction of its pods, which the attempt's disruption budget
refuses; so the cordon is the sign to go by. A pod that is disrupted all the same (preempted, tainted off, its
budget too young) has been told to stop, and all others follow it in the same move.
"""

from __future__ import annotations

from collections.abc import Iterable

from zerotrain.operator.api.core.meta import TaintEffect, Toleration
from zerotrain.operator.reconcile.attempts import LIVE, AttemptView, Fate, Worker
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.nodes import NodeTaint, NodeView

LEAVING_TAINTS = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/spot-itn",
    }
)
"""By which autoscalers and terminators announce that a node will go, whatever the effect."""

_LOSSES = "node.kubernetes.io/"
"""Taints of the node controller speak of trouble with the node; who is lost is not asked to checkpoint."""

_CORDON = NodeTaint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")


def move_wanted(draft: Draft, view: AttemptView) -> str | None:
    """Why the attempt should move; None when no worker has to."""
    leaving = [(worker, why) for worker in view.workers if (why := _why(draft, worker)) is not None]
    if not leaving:
        return None
    worker, why = leaving[0]
    more = f" (and {len(leaving) - 1} more)" if len(leaving) > 1 else ""
    return f"worker {worker.index} {why}{more}: all workers move"


def _why(draft: Draft, worker: Worker) -> str | None:
    pod = worker.pod
    if pod is None or worker.fate not in LIVE:
        return None
    if worker.fate is Fate.GOING and pod.disruption is not None:
        return f"(pod {pod.name}) has to go ({pod.disruption})"
    node = draft.observed.nodes.get(pod.node or "")
    why = leaving(node, _tolerations(draft)) if node is not None else None
    return f"(pod {pod.name}) has to leave node {pod.node}, which {why}" if why is not None else None


def leaving(node: NodeView, tolerations: Iterable[Toleration]) -> str | None:
    """What says that pods with these tolerations must leave; None when they may stay, or are lost."""
    if not node.ready or node.gone or node.out_of_service:
        return None
    accepted = tuple(tolerations)
    if node.unschedulable and not _tolerated(_CORDON, accepted):
        return "is cordoned"
    for taint in node.taints:
        announced = taint.key in LEAVING_TAINTS or taint.effect == TaintEffect.NO_EXECUTE
        if announced and not taint.key.startswith(_LOSSES) and not _tolerated(taint, accepted):
            return f"has the taint {taint.key}"
    return None


def _tolerations(draft: Draft) -> tuple[Toleration, ...]:
    scheduling, shape = draft.job.spec.scheduling, draft.status.shape
    own = scheduling.tolerations if scheduling is not None else ()
    return (*own, *(shape.tolerations if shape is not None else ()))


def _tolerated(taint: NodeTaint, tolerations: Iterable[Toleration]) -> bool:
    """For good: one that ends after some seconds leaves no more time than a drain."""
    return any(
        (item.key is None or item.key == taint.key)
        and (item.effect is None or item.effect == taint.effect)
        and (item.operator == "Exists" or (item.value or "") == taint.value)
        and item.toleration_seconds is None
        for item in tolerations
    )
