"""How many workers the next attempt has, and when a running one should be resized.

`spec.workers` is the wish. `status.elastic` holds where and why the operator decided otherwise, until the
wish changes (`wish`); it is written in the same pass as the request to yield, so that a resize survives any
crash. One resize is under way at a time: while an attempt is on its way up it is left alone, unless its pods
find no node.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from zerotrain.operator.api import AttemptShape, Phase, ZeroTrainingJobSpec
from zerotrain.operator.api.elastic import Elastic, ElasticStatus, SizeReason
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import half_bound, wish
from zerotrain.operator.reconcile.attempts import AttemptView, Fate
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.queueing import ask_room, in_queue

VERDICT_WAIT = timedelta(seconds=30)
"""For an answer on whether there is room; without one, pods that have no node are counted."""

DECIDED = VERDICT_WAIT + half_bound.PATIENCE
"""After shrinkAfterSeconds, until a smaller size is decided on at the latest, where there is one."""

UNDER_WAY = timedelta(seconds=60)
"""An attempt that reports no steps counts as training after so long."""

MAX_DOUBLINGS = 5


def prepare(draft: Draft) -> None:
    """Before the gate looks at the next attempt: take in a wish that changed meanwhile."""
    wish.take(draft)
    state = draft.status.elastic
    if state is None:
        return
    if state.short_since is not None and draft.status.phase is not Phase.QUEUED:
        wish.update(draft, short_since=None)
    if draft.status.phase is Phase.SUSPENDED and state.reason in wish.CHOSEN:
        # How much room there was is long ago, and what failed may have been changed.
        wish.forget_choice(draft)


def give_up_choice(draft: Draft) -> bool:
    """The size of the next attempt is refused: back to the full size where the operator had chosen it."""
    state = draft.status.elastic
    if state is None or state.reason not in wish.CHOSEN:
        return False
    wish.forget_choice(draft)
    return True


def admissible(draft: Draft) -> ZeroTrainingJobSpec:
    """The spec as the gate judges it: an elastic job by the size whose batch it keeps."""
    spec, state = draft.job.spec, draft.status.elastic
    if spec.elastic is None or state is None or state.base_workers == spec.workers:
        return spec
    return spec.model_copy(update={"workers": state.base_workers})


def next_shape(draft: Draft) -> AttemptShape:
    """For the attempt that would start now."""
    return AttemptShape(workers=wish.target(draft))


def started(draft: Draft) -> None:
    """An attempt was begun: what was waited for before it is over."""
    if draft.status.elastic is not None:
        wish.update(draft, short_since=None, room_since=None)


def short(draft: Draft) -> bool:
    """The gate holds the next attempt. True when the job goes on smaller: then the gate may look again.

    Only nodes that were counted are a reason. A turn in a queue, an API that is missing, or a count that is
    not there yet say nothing about room.
    """
    elastic, state = draft.job.spec.elastic, draft.status.elastic
    if elastic is None or state is None:
        return False
    waits_for_room = draft.held is not None and draft.held[0] == Reason.WAITING_FOR_ROOM
    size = wish.target(draft)
    verdict = draft.room if waits_for_room else None
    if waits_for_room and verdict is None:
        return False  # a count is on its way; until then the clock runs on
    # With room for all of it, or while nobody looks, it waits for its turn and not for nodes.
    if verdict is None or verdict.fits is None or verdict.fits >= size:
        if state.short_since is not None:
            wish.update(draft, short_since=None)
        return False
    since = state.short_since
    if since is None:
        wish.update(draft, short_since=draft.stamp)
    due = (since or draft.now) + timedelta(seconds=elastic.shrink_after_s)
    if draft.now < due:
        draft.wake(due)
        return False
    if (smaller := _lose(draft, size, verdict.fits)) is None:
        return False
    draft.emit(Reason.SHRUNK, f"no room for {size} workers: attempt {draft.status.attempt + 1} has {smaller}")
    return True


def shrink(draft: Draft, why: str) -> str | None:
    """Let the next attempt have fewer workers, for the failure policy. Returns why that cannot be."""
    if draft.job.spec.elastic is None:
        return "spec.elastic is not given"
    wish.take(draft)
    smaller = wish.largest(draft, draft.size - 1)
    if smaller is None:
        least = draft.job.spec.elastic.min_workers
        sizes = f"from elastic.minWorkers {least} to {draft.size - 1}"
        return f"no size {sizes} keeps the global batch and fits the memory"
    wish.decide(draft, smaller, SizeReason.FAILURE, why)
    state = draft.status.elastic
    if state is not None:
        # A size that fails is grown back to ever more seldom, like one whose room comes and goes.
        wish.update(draft, losses=state.losses + 1)
    return None


def lose_half(draft: Draft, placed: int, *, since: datetime) -> int | None:
    """A part of a gang found no node, `since` when. Returns the size that the job goes on with, at most
    `placed`, once that has lasted for shrinkAfterSeconds; None where the next attempt tries its size anew."""
    wish.take(draft)
    elastic, state = draft.job.spec.elastic, draft.status.elastic
    if elastic is None or state is None:
        return None
    # What was decided meanwhile, or another wish, is given its own time.
    due = max(since, state.since or since) + timedelta(seconds=elastic.shrink_after_s)
    return _lose(draft, draft.size, placed) if draft.now >= due else None


def resize_wanted(draft: Draft, view: AttemptView) -> str | None:
    """Why the attempt should go on in another size; None when it is as it should be."""
    if draft.job.spec.elastic is None and draft.status.elastic is None:
        return None
    wish.take(draft, runs=True)
    elastic = draft.job.spec.elastic
    if elastic is None:
        return None
    if draft.status.phase is not Phase.RUNNING:
        return _while_starting(draft, view, elastic)
    if not _under_way(draft):
        return None
    if wish.target(draft) != draft.size:
        return _as_wished(draft)
    if draft.size < wish.full(draft):
        return _growth(draft, elastic)
    _forget_losses(draft, elastic)
    return None


def decided_by(draft: Draft, began: datetime) -> datetime | None:
    """By when an attempt that began then becomes smaller if its pods find no node; None where it cannot."""
    elastic = draft.job.spec.elastic
    if elastic is None or wish.largest(draft, draft.size - 1) is None:
        return None
    return began + timedelta(seconds=elastic.shrink_after_s) + DECIDED


def _forget_losses(draft: Draft, elastic: Elastic) -> None:
    """Once the full size has lasted as long as the next growth would have to wait: room that comes and goes
    is no room."""
    state = draft.status.elastic
    if state is None or not state.losses:
        return
    began = draft.status.attempt_start_time or draft.stamp
    due = began + timedelta(seconds=elastic.grow_after_s * 2 ** min(state.losses, MAX_DOUBLINGS))
    if draft.now < due:
        draft.wake(due)
    else:
        wish.update(draft, losses=0)


def _while_starting(draft: Draft, view: AttemptView, elastic: Elastic) -> str | None:
    """An attempt whose pods find no node has nothing to lose: another size is taken at once."""
    size, target = draft.size, wish.target(draft)
    refused = _refused(draft, view)
    homeless = refused + sum(
        1
        for worker in view.workers
        if worker.fate is Fate.PENDING and worker.pod is not None and not worker.pod.scheduled
    )
    if not homeless:
        return None
    if target != size:
        return f"going on with {target} workers: {homeless} of {size} pods have no node"
    if draft.observed.making:
        return None  # pods that are there wait for those that are not, and not for nodes
    began = draft.status.attempt_start_time or draft.now
    due = began + timedelta(seconds=elastic.shrink_after_s)
    if draft.now < due:
        draft.wake(due)
        return None
    room = _startable(draft, view, refused, since=due)
    smaller = _lose(draft, size, room) if room is not None and room < size else None
    if smaller is None:
        return None
    return f"no room for {size} workers within {elastic.shrink_after_s} s: going on with {smaller}"


def _startable(draft: Draft, view: AttemptView, refused: int, *, since: datetime) -> int | None:
    """How many workers of the attempt would find a node; None while the answer is on its way, asked `since`
    when. `refused`: those that a quota does not let in."""
    size = draft.size
    if (split_at := half_bound.split_at(view)) is not None:
        if draft.now >= split_at:
            # The scheduler knows of volumes, affinities and claimed devices, the count does not.
            return half_bound.placeable(view) - refused
        draft.wake(split_at)
    verdict, last = ask_room(draft, size), draft.observed.capacity
    # Who has only begun to look has not been answered yet, however long the pods wait.
    since = max(since, draft.observed.synced_at or since)
    if verdict is None and draft.now < since + VERDICT_WAIT:
        draft.wake(since + VERDICT_WAIT)
        return None
    if verdict is None and last is not None:
        # What was said is old, and asked anew in this pass. The same answer again brings no pass by itself.
        draft.wake(draft.now + VERDICT_WAIT / 2)
        return None
    if verdict is not None and not verdict.counted:
        return _not_refused(draft, view, refused)
    placed = sum(1 for worker in view.workers if worker.pod is not None and worker.pod.scheduled)
    if verdict is not None:
        if verdict.fits is None:
            return None  # it is told as soon as somebody looks
        known = verdict.fits
    elif refused:
        known = size
    else:
        # Where no pod at all has a node and nobody can tell how many would fit, sizes are tried one by one.
        known = size - 1 if placed == 0 else 0
    return min(max(placed, known), size - refused)


def _not_refused(draft: Draft, view: AttemptView, refused: int) -> int | None:
    """The same where nobody may count: only the scheduler can tell. What it has not looked at, or what waits
    for its turn, behind a gate or for a preemption, says nothing of room; None until its word stands."""
    size = draft.size
    if (stands_at := half_bound.refused_at(view)) is None:
        return size - refused
    if draft.now < stands_at:
        draft.wake(stands_at)
        return None
    # It placed none of them and does not say how many it would: sizes are tried one by one.
    return size - max(refused, 1)


def _refused(draft: Draft, view: AttemptView) -> int:
    """Pods that a quota does not let in. Where it refuses every one, a smaller size would not start either,
    and the job waits."""
    problem = draft.observed.problem
    if problem is None or problem.reason != Reason.QUOTA_EXCEEDED:
        return 0
    return view.count(Fate.ABSENT)


def _as_wished(draft: Draft) -> str | None:
    """The wish changed: smaller at once, larger where there is room."""
    size, target = draft.size, wish.target(draft)
    # Free nodes are not quota: with a queue the user's word is enough, and the queue decides.
    if target > size and not in_queue(draft):
        verdict = ask_room(draft, target, growing=True)
        if verdict is None:
            return None  # a training that runs is not stopped on a guess
        if not verdict.counted:
            _stay(draft, target)
            return None
        if verdict.fits is None:
            return None
        if verdict.fits < target:
            target = max(wish.largest(draft, verdict.fits) or size, size)
            wish.decide(draft, target, SizeReason.CAPACITY, wish.room(draft, verdict.fits))
            if target == size:
                return None
    return f"resizing from {size} to {target} workers, spec.workers is {draft.job.spec.workers}"


def _stay(draft: Draft, target: int) -> None:
    """Nobody will ever say that there is room for the wish: that is the user's to know, once."""
    told = (
        f"room for {target} workers cannot be counted: the operator may not list all nodes and pods of the "
        f"cluster. Until it may, the job keeps {draft.size} workers; suspend and resume it for {target}"
    )
    wish.decide(draft, draft.size, SizeReason.CAPACITY, told)
    draft.emit(Reason.RESIZE_REFUSED, told, warning=True)


def _growth(draft: Draft, elastic: Elastic) -> str | None:
    """Back towards the full size, when there has been room for long enough."""
    size, state = draft.size, draft.status.elastic
    # An admission of a queue is not given up because nodes are free: those are not quota.
    if state is None or in_queue(draft):
        return None
    full = wish.full(draft)
    verdict = ask_room(draft, full, growing=True)
    if verdict is None or not verdict.counted or verdict.fits is None:
        return None  # a training that runs is not stopped on a guess
    larger = wish.largest(draft, verdict.fits) or size
    if larger <= size:
        if state.room_since is not None:
            wish.update(draft, room_since=None)
        return None
    since = state.room_since or draft.stamp
    if state.room_since is None:
        wish.update(draft, room_since=since)
    due = _grows_at(draft, elastic, state, since)
    if draft.now < due:
        draft.wake(due)
        return None
    if larger == full:
        wish.forget_choice(draft)
    else:
        wish.decide(draft, larger, SizeReason.CAPACITY, wish.room(draft, verdict.fits))
    return f"there is room for {larger} workers again: growing from {size}"


def _grows_at(draft: Draft, elastic: Elastic, state: ElasticStatus, room_since: datetime) -> datetime:
    """When the attempt makes place for a larger one, where the room lasts."""
    wait = elastic.grow_after_s * 2 ** min(max(state.losses - 1, 0), MAX_DOUBLINGS)
    due = max(room_since, draft.status.attempt_start_time or room_since) + timedelta(seconds=wait)
    if state.rule_at is None:
        return due
    # A size that fails again must not use up the budget that a job has in one window, whether or not room
    # was lost as well since then.
    return max(due, state.rule_at + timedelta(seconds=draft.job.spec.failure_policy.window_seconds))


def _lose(draft: Draft, size: int, room: int) -> int | None:
    """Decide on the largest workable size that there is room for; None when there is none below `size`."""
    state = draft.status.elastic
    smaller = wish.largest(draft, min(room, size - 1))
    if smaller is None or state is None:
        return None
    wish.decide(draft, smaller, SizeReason.CAPACITY, wish.room(draft, room))
    wish.update(draft, losses=state.losses + 1)
    return smaller


def _under_way(draft: Draft) -> bool:
    """Whether the attempt trains: a resize before its first step would only repeat the start."""
    status = draft.status
    if status.progress.attempt == status.attempt and status.progress.last_step_time is not None:
        return True
    if status.attempt_start_time is None:
        return True
    due = status.attempt_start_time + UNDER_WAY
    if draft.now < due:
        draft.wake(due)
    return draft.now >= due
