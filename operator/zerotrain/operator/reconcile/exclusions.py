"""Nodes that the job keeps off for a while: put there by a failure, taken out by the clock."""

from __future__ import annotations

from datetime import timedelta

from zerotrain.operator.api.status import MAX_EXCLUDED_NODES, ExcludedNode
from zerotrain.operator.reconcile.attempts import AttemptView, Fate
from zerotrain.operator.reconcile.draft import Draft


def current(draft: Draft) -> tuple[str, ...]:
    """Names of the nodes that an attempt which starts now must not use."""
    return tuple(sorted(item.name for item in draft.status.excluded_nodes if item.until > draft.now))


def wake_at_next_end(draft: Draft) -> None:
    """For jobs that wait: a node that comes back may be the one they wait for."""
    for item in draft.status.excluded_nodes:
        if item.until > draft.now:
            draft.wake(item.until)


def exclude(draft: Draft, node: str, reason: str) -> ExcludedNode:
    """Keep off the node from now on; a second failure there makes the time start anew."""
    seconds = draft.job.spec.failure_policy.node_exclusion_seconds
    entry = ExcludedNode(name=node, until=draft.stamp + timedelta(seconds=seconds), reason=reason)
    others = [item for item in draft.status.excluded_nodes if item.name != node and item.until > draft.now]
    # Beyond the limit those that end first make room: they were the first to be doubted.
    kept = sorted([*others, entry], key=lambda item: item.until)[-MAX_EXCLUDED_NODES:]
    draft.set(excluded_nodes=tuple(kept))
    return entry


def forget_expired(draft: Draft) -> None:
    """When an attempt starts, so that it costs no status write of its own."""
    kept = tuple(item for item in draft.status.excluded_nodes if item.until > draft.now)
    if len(kept) != len(draft.status.excluded_nodes):
        draft.set(excluded_nodes=kept)


def outlived(draft: Draft, view: AttemptView) -> tuple[str, ...]:
    """Nodes that waiting pods of this attempt may not use although their exclusion is over.

    A pod's affinity cannot be changed: such an attempt could wait for ever beside a node that it may have.
    """
    shape = draft.status.shape
    if shape is None or not shape.excluded_nodes or not view.count(Fate.PENDING):
        return ()
    if all(pod.scheduled for pod in view.present):
        return ()
    for item in draft.status.excluded_nodes:
        if item.until > draft.now and item.name in shape.excluded_nodes:
            draft.wake(item.until)
    return tuple(name for name in shape.excluded_nodes if name not in current(draft))
