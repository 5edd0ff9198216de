"""The time between two attempts, and before the first: phases Restarting, Queued, Suspended and Stalled.

The pods of the last attempt go first. Then the next attempt passes a gate: suspension, the checks of
`attempt_checks`, the queue and the gang.
"""

from __future__ import annotations

from zerotrain.operator.api import AttemptShape, Phase
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import (
    attempt_checks,
    attempt_objects,
    avoided_nodes,
    giving_back,
    job_end,
    next_size,
    progress,
    queueing,
    tracker_advice,
    yield_request,
)
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.plan import CreateWorkers
from zerotrain.operator.reconcile.teardown import KILL_GRACE_S, end_workers


def advance(draft: Draft) -> None:
    """Wait for what the phase waits for, then take the gate of the next attempt."""
    match draft.phase:
        case Phase.RESTARTING:
            _restarting(draft)
        case Phase.QUEUED:
            _queued(draft)
        case Phase.SUSPENDED:
            _suspended(draft)
        case Phase.STALLED:
            _stalled(draft)
        case _:
            _gate(draft)  # before the first attempt there is nothing to end


def _restarting(draft: Draft) -> None:
    """Delete all pods of the ended attempt; after the hold-off, take the gate."""
    if job_end.deadline_passed(draft):
        job_end.fail_by_deadline(draft)
        return
    if not end_workers(draft, grace_s=KILL_GRACE_S):
        return
    due = draft.status.next_attempt_time
    if due is not None and not draft.job.spec.suspend and not draft.is_due(due):
        return
    if not draft.job.spec.suspend and giving_back.waits_for_older(draft):
        return
    _gate(draft)


def _stalled(draft: Draft) -> None:
    """Wait until the user corrects what was rejected.

    This time is not active time, like suspended time. The start time may be left from a status that an
    earlier version wrote.
    """
    draft.set(start_time=None)
    _restarting(draft)


def _queued(draft: Draft) -> None:
    _stop_clock(draft)
    if job_end.deadline_passed(draft):
        job_end.fail_by_deadline(draft)
    elif end_workers(draft, grace_s=KILL_GRACE_S):
        _gate(draft)


def _suspended(draft: Draft) -> None:
    """Delete all pods, and wait until spec.suspend is false."""
    if not end_workers(draft, grace_s=KILL_GRACE_S):
        return
    if not attempt_objects.group_is_gone(draft) or draft.job.spec.suspend:
        return
    draft.emit(Reason.RESUMED, f"attempt {draft.status.attempt + 1} starts")
    _gate(draft)


def _gate(draft: Draft) -> None:
    """Decide, between two attempts, whether the job is suspended, rejected, or starts the next attempt."""
    if not attempt_objects.group_is_gone(draft):
        return  # the next shape may name another API
    if draft.job.spec.suspend:
        _suspend(draft)
        return
    next_size.prepare(draft)  # before the checks: they are made for this size
    if attempt_checks.stalls(draft) or attempt_checks.awaits_class(draft):
        return  # before the queue: a job that cannot start must not get quota
    shape = AttemptShape(workers=next_size.next_workers(draft))
    draft.held = queueing.hold(draft, shape)
    if draft.held is not None:
        if draft.status.phase is not Phase.QUEUED:
            draft.emit(draft.held[0], draft.held[1])
        draft.set(phase=Phase.QUEUED, next_attempt_time=None)
        _stop_clock(draft)
        return
    if attempt_checks.awaits_class(draft, max_age=attempt_checks.LOOK_AGAIN):
        return  # again after the queue, in which the job may have waited for long
    if draft.observed.in_start_queue:  # last: it is for jobs that could start now
        if draft.status.phase is not Phase.QUEUED:  # QUEUED keeps the admission
            draft.set(phase=Phase.PENDING if draft.status.attempt == 0 else Phase.RESTARTING)
        return
    if draft.status.phase is Phase.QUEUED:
        draft.emit(Reason.ADMITTED, queueing.admission(draft, shape))
    _start_attempt(draft, queueing.shaped(draft, shape))


def _suspend(draft: Draft) -> None:
    if draft.status.phase is not Phase.SUSPENDED:
        lost = progress.unsaved_steps(draft.status) > 0
        message = "no attempt starts until spec.suspend is false"
        message += f"; {progress.what_is_kept(draft)}" if lost else ""
        draft.emit(Reason.SUSPENDED, message, warning=lost)
    draft.set(phase=Phase.SUSPENDED, start_time=None, next_attempt_time=None)


def _stop_clock(draft: Draft) -> None:
    """Stop the clock of activeDeadlineSeconds while the job waits in a queue; it restarts afterwards.

    Time in a queue is not active time, however the job got there.
    """
    if draft.status.start_time is not None and queueing.waits_in_queue(draft):
        draft.set(start_time=None)


def _start_attempt(draft: Draft, shape: AttemptShape) -> None:
    """Start the next attempt.

    The status write with the attempt's number precedes the creation of every pod that carries it.
    """
    avoided_nodes.forget_expired_exclusions(draft)
    draft.set(
        phase=Phase.PENDING,
        attempt=draft.status.attempt + 1,
        shape=shape.model_copy(
            update={"excluded_nodes": avoided_nodes.current_exclusions(draft), **yield_request.basis(draft)}
        ),
        yield_request=None,
        shortage=None,
        hang=None,
        straggler=None,
        attempt_start_time=draft.stamp,
        next_attempt_time=None,
        pods_created=False,
        checkpoint=draft.status.checkpoint.model_copy(
            update={"resumed_from_step": None, "resumed_from_job": None}
        ),
    )
    attempt_checks.report_privileges(draft)
    tracker_advice.report_trackers(draft)
    draft.act(CreateWorkers(attempt=draft.status.attempt, indices=tuple(range(shape.workers))))
