"""Node drains: when workers have to leave their nodes, the whole job moves once.

A drain cordons the node and then requests the eviction of its pods, which the attempt's disruption budget
blocks. So the cordon is the signal to act on. A pod that is disrupted all the same (preempted, evicted by a
taint, or evicted before its budget took effect) has been told to stop, and all others follow it in the same
move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from zerotrain.operator.api.core.meta import TaintEffect, Toleration
from zerotrain.operator.api.status import MAX_MOVED_OFF
from zerotrain.operator.reconcile.attempts import LIVE, AttemptView, Worker, WorkerState
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
"""Taints by which autoscalers and termination handlers announce that a node will go, whatever their
effect."""

_LOSSES = "node.kubernetes.io/"
"""Prefix of the node controller's taints. They report trouble with the node, and lost workers cannot
checkpoint."""

_CORDON = NodeTaint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")


def move_wanted(draft: Draft, view: AttemptView) -> str | None:
    """Return why the attempt should move; None if no worker has to. One cordon causes one move."""
    left = _leaving_nodes(draft, view)
    known = draft.status.moved_off
    # A node that holds workers and is healthy again may be drained another time.
    well = {worker.pod.node for worker in view.workers if worker.pod is not None} - left.keys()
    remembered = tuple(name for name in known if name not in well)
    wanted = [(worker, why) for worker in view.workers if (why := _why(worker, left, remembered)) is not None]
    if wanted:
        remembered = tuple(dict.fromkeys((*remembered, *left)))[-MAX_MOVED_OFF:]
    if remembered != known:
        draft.set(moved_off=remembered)
    if not wanted:
        return None
    worker, why = wanted[0]
    more = f" (and {len(wanted) - 1} more)" if len(wanted) > 1 else ""
    return f"worker {worker.index} {why}{more}: all workers move"


def _why(worker: Worker, left: Mapping[str, str], moved_off: Collection[str]) -> str | None:
    pod = worker.pod
    if pod is None or worker.state not in LIVE:
        return None
    if worker.state is WorkerState.TERMINATING and pod.disruption is not None:
        return f"(pod {pod.name}) has to stop ({pod.disruption})"
    why = left.get(pod.node or "")
    if why is None or pod.node in moved_off:
        return None
    return f"(pod {pod.name}) has to leave node {pod.node}, which {why}"


def _leaving_nodes(draft: Draft, view: AttemptView) -> dict[str, str]:
    """Return the nodes that the workers' pods must leave, with the reason."""
    found, tolerations = {}, _tolerations(draft)
    for worker in view.workers:
        node = draft.observed.nodes.get((worker.pod.node or "") if worker.pod is not None else "")
        if node is not None and (why := leaving(node, tolerations)) is not None:
            found[node.name] = why
    return found


def leaving(node: NodeView, tolerations: Iterable[Toleration]) -> str | None:
    """Return why pods with these tolerations must leave the node; None if they may stay, or are lost."""
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


def handles_cordons(draft: Draft) -> bool:
    """Return whether a cordon moves the job.

    The operator must see nodes, the pods must not tolerate a cordon, and no pod may have returned to a node
    that the job has moved off.
    """
    came_back = draft.observed.nodes.keys() & set(draft.status.moved_off)
    return draft.observed.sees_nodes and not came_back and not _tolerated(_CORDON, _tolerations(draft))


def _tolerations(draft: Draft) -> tuple[Toleration, ...]:
    scheduling, shape = draft.job.spec.scheduling, draft.status.shape
    own = scheduling.tolerations if scheduling is not None else ()
    return (*own, *(shape.tolerations if shape is not None else ()))


def _tolerated(taint: NodeTaint, tolerations: Iterable[Toleration]) -> bool:
    """Return whether the taint is tolerated without a time limit.

    A toleration that ends after some seconds leaves no more time than a drain.
    """
    return any(
        (item.key is None or item.key == taint.key)
        and (item.effect is None or item.effect == taint.effect)
        and (item.operator == "Exists" or (item.value or "") == taint.value)
        and item.toleration_seconds is None
        for item in tolerations
    )
