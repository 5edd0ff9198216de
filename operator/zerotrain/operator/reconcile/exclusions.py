"""Nodes that the job avoids for a limited time after a failure there."""

from __future__ import annotations

from datetime import timedelta

from zerotrain.operator.api.status import MAX_EXCLUDED_NODES, ExcludedNode
from zerotrain.operator.reconcile.attempts import AttemptView, WorkerState
from zerotrain.operator.reconcile.draft import Draft


def current(draft: Draft) -> tuple[str, ...]:
    """Return the names of the nodes that an attempt which starts now must not use."""
    return tuple(sorted(item.name for item in draft.status.excluded_nodes if item.until > draft.now))


def wake_at_next_end(draft: Draft) -> None:
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


def forget_expired(draft: Draft) -> None:
    """Remove expired exclusions when an attempt starts, so that this costs no status write of its own."""
    kept = tuple(item for item in draft.status.excluded_nodes if item.until > draft.now)
    if len(kept) != len(draft.status.excluded_nodes):
        draft.set(excluded_nodes=kept)


def outlived(draft: Draft, view: AttemptView) -> tuple[str, ...]:
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
    return tuple(name for name in shape.excluded_nodes if name not in current(draft))
