"""The nodes that a job leaves, because they are drained, and those that it avoids for a limited time after a
failure there.

A drain cordons the node and then requests the eviction of its pods, which the attempt's disruption budget
blocks. So the cordon is the signal to act on, and the whole job moves once. A pod that is disrupted all the
same (preempted, evicted by a taint, or evicted before its budget took effect) has been told to stop, and all
others follow it in the same move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta

from zerotrain.operator.api.core.meta import TaintEffect, Toleration
from zerotrain.operator.api.status import MAX_EXCLUDED_NODES, MAX_MOVED_OFF, ExcludedNode
from zerotrain.operator.reconcile.attempts import LIVE, AttemptView, Worker
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.nodes import NodeTaint, NodeView
from zerotrain.operator.reconcile.pods import WorkerState

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
    wanted = [
        (worker, why)
        for worker in view.workers
        if (why := _why_it_moves(worker, left, remembered)) is not None
    ]
    if wanted:
        remembered = tuple(dict.fromkeys((*remembered, *left)))[-MAX_MOVED_OFF:]
    if remembered != known:
        draft.set(moved_off=remembered)
    if not wanted:
        return None
    worker, why = wanted[0]
    more = f" (and {len(wanted) - 1} more)" if len(wanted) > 1 else ""
    return f"worker {worker.index} {why}{more}: all workers move"


def _why_it_moves(worker: Worker, left: Mapping[str, str], moved_off: Collection[str]) -> str | None:
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


def current_exclusions(draft: Draft) -> tuple[str, ...]:
    """Return the names of the nodes that an attempt which starts now must not use."""
    return tuple(sorted(item.name for item in draft.status.excluded_nodes if item.until > draft.now))


def wake_at_next_exclusion_end(draft: Draft) -> None:
    """Wake a waiting job when an exclusion ends: it may be waiting for that node."""
    for item in draft.status.excluded_nodes:
        if item.until > draft.now:
            draft.wake(item.until)


def exclude(draft: Draft, node: str, reason: str) -> ExcludedNode:
    """Exclude the node from now on; a second failure there restarts the time."""
    seconds = draft.job.spec.failure_policy.node_exclusion_seconds
    entry = ExcludedNode(name=node, until=draft.stamp + timedelta(seconds=seconds), reason=reason)
    others = [item for item in draft.status.excluded_nodes if item.name != node and item.until > draft.now]
    # Beyond the limit, the exclusions that end first are dropped: they are the oldest.
    kept = sorted([*others, entry], key=lambda item: item.until)[-MAX_EXCLUDED_NODES:]
    draft.set(excluded_nodes=tuple(kept))
    return entry


def forget_expired_exclusions(draft: Draft) -> None:
    """Remove expired exclusions when an attempt starts, so that this costs no status write of its own."""
    kept = tuple(item for item in draft.status.excluded_nodes if item.until > draft.now)
    if len(kept) != len(draft.status.excluded_nodes):
        draft.set(excluded_nodes=kept)


def outlived_exclusions(draft: Draft, view: AttemptView) -> tuple[str, ...]:
    """Return the nodes that waiting pods of this attempt may not use although their exclusion is over.

    A pod's affinity cannot be changed: such an attempt could wait forever although it may use the node.
    """
    shape = draft.status.shape
    if shape is None or not shape.excluded_nodes or not view.count(WorkerState.PENDING):
        return ()
    if all(pod.scheduled for pod in view.present):
        return ()
    for item in draft.status.excluded_nodes:
        if item.until > draft.now and item.name in shape.excluded_nodes:
            draft.wake(item.until)
    return tuple(name for name in shape.excluded_nodes if name not in current_exclusions(draft))
