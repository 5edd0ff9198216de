"""The resizing of an attempt: when it stops to continue in another size, which `next_size` then decides.

The size is written in the same pass as the request to yield, so that a resize survives any crash. Only one
resize is under way at a time: a starting attempt is left alone, unless its pods find no node.

The scheduler decides whether there is capacity, by placing the pods or not. Before a running job stops for a
larger attempt, one reading of the cluster may show that the larger attempt would not fit.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from zerotrain.operator.api import AttemptShape, Phase
from zerotrain.operator.api.elastic import Elastic, ElasticStatus, SizeReason
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import avoided_nodes, next_size, start_up
from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.observe import Capacity
from zerotrain.operator.reconcile.plan import ReadCapacity
from zerotrain.operator.reconcile.pods import WorkerState
from zerotrain.operator.reconcile.queueing import in_queue

DECIDED = start_up.UNSCHEDULED_SETTLE + timedelta(seconds=5)
"""Time after shrinkAfterSeconds by which a smaller size, if there is one, is decided on."""

UNDER_WAY = timedelta(seconds=60)
"""Time after which an attempt that reports no steps counts as training."""

MAX_DOUBLINGS = 5


def joined(draft: Draft) -> None:
    """Record the size as one that there was capacity for, because all ranks of the attempt have met."""
    state = draft.status.elastic
    if state is not None and state.ran != draft.workers:
        next_size.update(draft, ran=draft.workers)


def resize_wanted(draft: Draft, view: AttemptView) -> str | None:
    """Return why the attempt should continue in another size; None if its size is right."""
    if draft.job.spec.elastic is None and draft.status.elastic is None:
        return None
    next_size.take(draft, runs=True)
    elastic = draft.job.spec.elastic
    if elastic is None:
        return None
    if draft.status.phase is not Phase.RUNNING:
        return _while_starting(draft, view, elastic)
    if not _under_way(draft):
        return None
    if next_size.next_workers(draft) != draft.workers:
        return _resize_as_requested(draft)
    if draft.workers < next_size.accepted_workers(draft):
        return _growth(draft, elastic)
    _forget_losses(draft, elastic)
    return None


def decided_by(draft: Draft, began: datetime) -> datetime | None:
    """Return when an attempt that began at `began` shrinks at the latest if its pods find no node.

    None if it cannot shrink.
    """
    elastic = draft.job.spec.elastic
    if elastic is None or next_size.largest_workers(draft, draft.workers - 1) is None:
        return None
    return began + timedelta(seconds=elastic.shrink_after_s) + DECIDED


def _forget_losses(draft: Draft, elastic: Elastic) -> None:
    """Reset the count of losses once the accepted number of workers has lasted for the next growth's delay.

    Capacity that comes and goes does not count as capacity.
    """
    state = draft.status.elastic
    if state is None or not state.losses:
        return
    began = draft.status.attempt_start_time or draft.stamp
    if draft.is_due(began + timedelta(seconds=elastic.grow_after_s * 2 ** min(state.losses, MAX_DOUBLINGS))):
        next_size.update(draft, losses=0)


def _while_starting(draft: Draft, view: AttemptView, elastic: Elastic) -> str | None:
    """Return why a starting attempt should change its size; None if it should not.

    An attempt whose pods find no node has nothing to lose, so another size is taken at once.
    """
    workers, next_workers = draft.workers, next_size.next_workers(draft)
    refused = _refused(draft, view)
    unplaced = refused + sum(1 for pod in view.pods(WorkerState.PENDING) if not pod.scheduled)
    if not unplaced:
        return None
    if next_workers != workers:
        return f"continuing with {next_workers} workers: {unplaced} of {workers} pods have no node"
    if draft.observed.creating:
        return None  # existing pods wait for the missing pods, not for nodes
    due = _shrinks_at(draft, view, elastic, refused)
    if due is None or not draft.is_due(due):
        return None
    fewer = _shrink_to_capacity(draft, _placeable_workers(draft, view, refused))
    if fewer is None:
        return None
    return f"no capacity for {workers} workers within {elastic.shrink_after_s} s: continuing with {fewer}"


def _shrinks_at(draft: Draft, view: AttemptView, elastic: Elastic, refused: int) -> datetime | None:
    """Return when the attempt counts as one without capacity; None while no pod is rejected.

    Pods that the scheduler has not considered, or that wait behind a gate or for a preemption, are not
    rejected yet.
    """
    stands_at = start_up.refused_at(view)
    if stands_at is None and not refused:
        return None
    began = draft.status.attempt_start_time or draft.now
    due = began + timedelta(seconds=elastic.shrink_after_s)
    return due if stands_at is None else max(due, stands_at)


def _placeable_workers(draft: Draft, view: AttemptView, refused: int) -> int:
    """Return how many workers the capacity seems to suffice for.

    That is the number of workers that ran before, if it is smaller than the size; otherwise what the
    scheduler and the quota leave.
    """
    state = draft.status.elastic
    if state is not None and state.ran is not None and state.ran < draft.workers:
        return state.ran
    return start_up.placeable(view) - refused


def _refused(draft: Draft, view: AttemptView) -> int:
    """Return the number of pods that a quota rejects.

    If the quota rejects all of them, a smaller size would not start either, and the job waits.
    """
    problem = draft.observed.problem
    if problem is None or problem.reason != Reason.QUOTA_EXCEEDED:
        return 0
    return view.count(WorkerState.ABSENT)


def _resize_as_requested(draft: Draft) -> str | None:
    """Return why the attempt should take the requested size: a smaller one at once, a larger one if it may
    fit."""
    workers, next_workers = draft.workers, next_size.next_workers(draft)
    # Free nodes are not quota: in a queue the user's request suffices, and the queue decides.
    if next_workers > workers and not in_queue(draft):
        capacity = _capacity_hint(draft, next_workers)
        if capacity is None:
            return None
        if capacity.fits is not None and capacity.fits < next_workers:
            message = next_size.capacity_message(draft, capacity.fits)
            next_workers = max(next_size.largest_workers(draft, capacity.fits) or workers, workers)
            next_size.decide(draft, next_workers, SizeReason.CAPACITY, message)
            if next_workers == workers:
                return None
    return f"resizing from {workers} to {next_workers} workers, spec.workers is {draft.job.spec.workers}"


def _growth(draft: Draft, elastic: Elastic) -> str | None:
    """Return why the attempt should grow towards the accepted number of workers, once it has lasted for long
    enough."""
    workers, state = draft.workers, draft.status.elastic
    # A queue's admission is not given up because nodes are free: free nodes are not quota.
    if state is None or in_queue(draft):
        return None
    if not draft.is_due(_grows_at(draft, elastic, state)):
        return None
    accepted_workers = next_size.accepted_workers(draft)
    capacity = _capacity_hint(draft, accepted_workers)
    if capacity is None:
        return None
    at_most = accepted_workers if capacity.fits is None else capacity.fits
    more = next_size.largest_workers(draft, at_most) or workers
    if more <= workers:
        return None
    if more == accepted_workers:
        next_size.forget_choice(draft)
    else:
        next_size.decide(draft, more, SizeReason.CAPACITY, next_size.capacity_message(draft, more))
    found = "may be" if capacity.fits is None else "is"
    return f"there {found} capacity for {more} workers again: growing from {workers}"


def _capacity_hint(draft: Draft, workers: int) -> Capacity | None:
    """Return a hint on whether there is capacity for this number of workers; None while it is read."""
    capacity, elastic = draft.observed.capacity, draft.job.spec.elastic
    again = timedelta(seconds=elastic.grow_after_s if elastic is not None else 0)
    if capacity is None or capacity.workers != workers or draft.now >= capacity.at + again:
        shape = AttemptShape(workers=workers, excluded_nodes=avoided_nodes.current_exclusions(draft))
        draft.act(ReadCapacity(shape=shape))
        return None
    draft.wake(capacity.at + again)
    return capacity


def _grows_at(draft: Draft, elastic: Elastic, state: ElasticStatus) -> datetime:
    """Return when the attempt may stop for a larger one, if there may be capacity."""
    wait = elastic.grow_after_s * 2 ** min(max(state.losses - 1, 0), MAX_DOUBLINGS)
    due = (draft.status.attempt_start_time or draft.now) + timedelta(seconds=wait)
    if state.rule_at is None:
        return due
    # A size that fails again must not use up the restarts that a job has in one window, even if capacity was
    # lost since then as well.
    return max(due, state.rule_at + timedelta(seconds=draft.job.spec.failure_policy.window_seconds))


def _shrink_to_capacity(draft: Draft, capacity: int) -> int | None:
    """Decide on the largest smaller size that works and fits the capacity; None if there is none."""
    state = draft.status.elastic
    fewer = next_size.largest_workers(draft, min(capacity, draft.workers - 1))
    if fewer is None or state is None:
        return None
    next_size.decide(draft, fewer, SizeReason.CAPACITY, next_size.capacity_message(draft, capacity))
    next_size.update(draft, losses=state.losses + 1)
    return fewer


def _under_way(draft: Draft) -> bool:
    """Return whether the attempt trains: a resize before its first step would only repeat the start."""
    status = draft.status
    if status.progress.attempt == status.attempt and status.progress.last_step_time is not None:
        return True
    if status.attempt_start_time is None:
        return True
    return draft.is_due(status.attempt_start_time + UNDER_WAY)
