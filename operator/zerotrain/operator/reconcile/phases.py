"""The phases of a job, with one function each.

A function reads the draft, changes status, requests actions, and may hand over to the next phase within the
same pass, so that a restart costs one status write and not three.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import islice

from zerotrain.operator.api import AttemptShape, Phase, YieldReason
from zerotrain.operator.api.lifecycle import CleanPodPolicy
from zerotrain.operator.api.status import ConditionStatus
from zerotrain.operator.constants import ConditionType, Reason
from zerotrain.operator.reconcile import (
    admission,
    attempt_end,
    attempt_objects,
    avoided_nodes,
    completion,
    giving_back,
    hangs,
    next_size,
    queueing,
    records,
    resizing,
    start_up,
    stragglers,
    verification,
    yielding,
)
from zerotrain.operator.reconcile.admission import refusal_of
from zerotrain.operator.reconcile.attempts import (
    OVER,
    AttemptView,
    Failure,
    WorkerState,
    first_failure,
    is_echo,
)
from zerotrain.operator.reconcile.draft import ACTIVE, FINISHED, Draft
from zerotrain.operator.reconcile.nodes import lost_at
from zerotrain.operator.reconcile.plan import CreateWorkers, DeleteJob
from zerotrain.operator.reconcile.progress import unsaved_steps
from zerotrain.operator.reconcile.teardown import KILL_GRACE_S, end_live_workers, end_workers

PLAIN_SETTLE = timedelta(milliseconds=500)
"""Time that a plain failure waits for surer evidence: peers of a killed rank often report first."""

ECHO_SETTLE = timedelta(milliseconds=2500)
"""Time that a failure which looks like a consequence waits for the end that caused it.

A kubelet checks its containers once a second, and another kubelet may just have done so.
"""

SIGN_EVERY = timedelta(seconds=5)
"""Interval of the passes while a failure waits for signs of life of silent nodes."""

FIRST_ATTEMPT = 1

SYNC_SETTLE = timedelta(seconds=2)
"""Time after this replica became active in which a missing pod may be one whose peers are just yielding."""


def advance(draft: Draft) -> None:
    """Run the function of the job's phase."""
    if draft.status.phase not in FINISHED and _was_begun(draft):
        _adopt(draft)
        return
    _HANDLERS[draft.status.phase or Phase.PENDING](draft)


def _pending(draft: Draft) -> None:
    if draft.status.attempt == 0:
        _gate(draft)
    else:
        _active(draft)


def _was_begun(draft: Draft) -> bool:
    """Return whether pods of the first attempt exist that status does not mention.

    They may also appear after a pass that saw none and declared the job suspended: creation requests outlive
    the operator that sent them.
    """
    return draft.status.attempt == 0 and any(pod.attempt == FIRST_ATTEMPT for pod in draft.observed.pods)


def _adopt(draft: Draft) -> None:
    """Adopt the first attempt of an operator that ended before it recorded the attempt in status.

    What the spec says now, e.g. that the job is suspended or too large, then applies to a running attempt.
    """
    next_size.prepare(draft)
    _count_up(draft, next_size.next_shape(draft))
    yielding.mark_basis_unknown(draft)
    _active(draft)


def _gate(draft: Draft) -> None:
    """Decide, between two attempts, whether the job is suspended, rejected, or starts the next attempt."""
    if not attempt_objects.group_is_gone(draft):
        return
    if draft.job.spec.suspend:
        if draft.status.phase is not Phase.SUSPENDED:
            message, lost = "no attempt starts until spec.suspend is false", unsaved_steps(draft.status) > 0
            message += f"; {yielding.what_is_kept(draft)}" if lost else ""
            draft.emit(Reason.SUSPENDED, message, warning=lost)
        draft.set(phase=Phase.SUSPENDED, start_time=None, next_attempt_time=None)
        return
    next_size.prepare(draft)
    if _stalls(draft) or admission.awaits_class(draft):
        return
    shape = next_size.next_shape(draft)
    draft.held = queueing.hold(draft, shape)
    if draft.held is not None:
        if draft.status.phase is not Phase.QUEUED:
            draft.emit(draft.held[0], draft.held[1])
        draft.set(phase=Phase.QUEUED, next_attempt_time=None)
        _stop_clock(draft)
        return
    if admission.awaits_class(draft, max_age=admission.LOOK_AGAIN):
        return
    if draft.observed.in_start_queue:
        if draft.status.phase is not Phase.QUEUED:  # QUEUED keeps the admission
            draft.set(phase=Phase.PENDING if draft.status.attempt == 0 else Phase.RESTARTING)
        return
    if draft.status.phase is Phase.QUEUED:
        draft.emit(Reason.ADMITTED, queueing.admission(draft, shape))
    _start_attempt(draft, queueing.shaped(draft, shape))


def _stalls(draft: Draft) -> bool:
    """Return whether the user must change the spec before an attempt of the present size can start."""
    refusal = refusal_of(next_size.admissible(draft)) or next_size.check(draft)
    if refusal is None:
        refusal = admission.does_not_fit(draft)
        if refusal is not None and next_size.give_up_choice(draft):
            # The other size was chosen by the operator, not by the user.
            refusal = next_size.check(draft) or admission.does_not_fit(draft)
    refusal = (
        refusal
        or admission.egress_refusal(draft)
        or admission.volume_refusal(draft)
        or queueing.queue_name_refusal(draft)
    )
    if refusal is None:
        return False
    if draft.status.phase is not Phase.STALLED:
        draft.emit(refusal[0], refusal[1], warning=True)
    draft.set(phase=Phase.STALLED, start_time=None)
    draft.stalled = refusal
    return True


def _stop_clock(draft: Draft) -> None:
    """Stop the clock of activeDeadlineSeconds while the job waits in a queue; it restarts afterwards.

    Time in a queue is not active time, however the job got there.
    """
    if draft.status.start_time is not None and queueing.waits_in_queue(draft):
        draft.set(start_time=None)


def _start_attempt(draft: Draft, shape: AttemptShape) -> None:
    """Start the next attempt.

    The status write with the attempt's number precedes the creation of every pod that carries it. For the
    first attempt it may come later, because its pods carry the same information.
    """
    _count_up(draft, shape)
    admission.report_privileges(draft)
    draft.act(CreateWorkers(attempt=draft.status.attempt, indices=tuple(range(shape.workers))))


def _count_up(draft: Draft, shape: AttemptShape) -> None:
    avoided_nodes.forget_expired_exclusions(draft)
    draft.set(
        phase=Phase.PENDING,
        attempt=draft.status.attempt + 1,
        shape=shape.model_copy(
            update={"excluded_nodes": avoided_nodes.current_exclusions(draft), **yielding.basis(draft)}
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


def _active(draft: Draft) -> None:
    """Run the current attempt: create missing pods, follow it, or end it."""
    view = draft.view()
    if not view.count(WorkerState.ABSENT):
        draft.set(pods_created=True)
    if draft.status.start_time is None and (view.present or draft.status.pods_created):
        draft.set(start_time=draft.stamp)
    if completion.is_done(draft, view):
        attempt_end.complete(draft, completion.unseen_ends_message(view))
        _finished(draft)
    elif _deadline_passed(draft):
        _fail_by_deadline(draft)
    elif draft.job.spec.suspend:
        yielding.ask(draft, YieldReason.SUSPEND, "spec.suspend is true")
        _yielding(draft)
    elif (why := giving_back.reason(draft, view)) is not None:
        giving_back.conclude(draft, why)
        _go_on(draft)
    elif _ended_badly(draft, view):
        _go_on(draft)
    elif view.count(WorkerState.YIELDED, WorkerState.STOPPED):
        _await_yielded(draft, view)
    elif free := avoided_nodes.outlived_exclusions(draft, view):
        attempt_end.after_expiry(draft, free)
        _go_on(draft)
    elif (asked := yielding.wanted(draft, view)) is not None:
        yielding.ask(draft, *asked)
        _yielding(draft)
    else:
        _follow(draft, view)


def _follow(draft: Draft, view: AttemptView) -> None:
    absent = view.indices(WorkerState.ABSENT)
    if absent:
        draft.act(CreateWorkers(attempt=view.number, indices=absent))
    start_up.report_slow_start(draft, view)
    for worker in view.workers:
        if (
            worker.state is WorkerState.TERMINATING
            and worker.pod is not None
            and worker.pod.deletion_at is not None
        ):
            # A node that died with the pod sends no event: check again when the pod counts as lost.
            draft.wake(worker.pod.deletion_at + _termination_timeout(draft) + timedelta(seconds=1))
    _wake_at_node_losses(draft)
    running = view.all_in(frozenset({WorkerState.RUNNING, WorkerState.TERMINATING, WorkerState.SUCCEEDED}))
    joined = running and all(pod.ready or pod.ended for pod in view.present)
    if draft.status.phase is Phase.RUNNING or joined:
        if draft.status.phase is not Phase.RUNNING:
            draft.emit(Reason.ALL_RANKS_JOINED, f"attempt {view.number}: all ranks joined")
            if draft.job.spec.elastic is not None:
                draft.wake(draft.now)  # only running jobs are checked for growth
        draft.set(phase=Phase.RUNNING)
        resizing.joined(draft)
        stragglers.report(draft, view)
    else:
        draft.set(phase=Phase.STARTING if running else Phase.PENDING)


def _wake_at_node_losses(draft: Draft) -> None:
    """Wake when a node that is not ready counts as lost: silence causes no event."""
    for node in draft.observed.nodes.values():
        due = lost_at(node, draft.signs())
        if due is not None and due > draft.now:
            draft.wake(due)


def _ended_badly(draft: Draft, view: AttemptView) -> bool:
    """Return whether the attempt failed. A recent failure may have to settle before it is recorded."""
    failure = start_up.blamed(draft, view, first_failure(view))
    failure = failure or start_up.late(draft, view) or hangs.hang_of(draft, view)
    if failure is not None:
        _take_failure(draft, view, failure)
    return failure is not None


def _take_failure(draft: Draft, view: AttemptView, failure: Failure) -> None:
    """Record the failure in status, once no surer evidence can arrive."""
    if failure.due is not None and draft.now < failure.due:
        draft.wake(min(failure.due, draft.now + hangs.STACKS_RETRY))
        return
    settle = ECHO_SETTLE if is_echo(failure) else PLAIN_SETTLE
    settled_at = attempt_end.settled_at(draft, view, failure, settle=settle, sync=SYNC_SETTLE)
    if settled_at is not None and draft.now < settled_at:
        draft.wake(min(settled_at, draft.now + SIGN_EVERY))  # no pass is triggered when a worker answers
    else:
        attempt_end.after_failure(draft, failure)


def _go_on(draft: Draft) -> None:
    """Run the phase that the attempt's end led to."""
    if draft.status.phase is Phase.RESTARTING:
        _restarting(draft)
    elif draft.status.phase is Phase.QUEUED:
        _queued(draft)
    elif draft.status.phase is Phase.SUSPENDED:
        _suspended(draft)  # resumed meanwhile: our own write causes no event
    elif draft.status.phase in FINISHED:
        _finished(draft)


def _await_yielded(draft: Draft, view: AttemptView) -> None:
    """Wait for the other ranks after some stopped on a SIGTERM by another client (a drain, `kubectl delete
    pod`)."""
    since = min(
        (
            worker.pod.ended_seen_at
            for worker in view.workers
            # A worker that had finished before was not told to stop: its end must not shorten the grace of
            # the others.
            if worker.pod and worker.pod.ended_seen_at and worker.state is not WorkerState.SUCCEEDED
        ),
        default=draft.now,
    )
    limit = since + yielding.grace(draft) + yielding.SLACK
    if not view.all_in(OVER) and draft.now < limit:
        draft.wake(limit)
        return
    attempt_end.after_yield(draft, view)
    _go_on(draft)


def _restarting(draft: Draft) -> None:
    """Delete all pods of the ended attempt; after the hold-off, start the next one."""
    if _deadline_passed(draft):
        _fail_by_deadline(draft)
        return
    if not end_workers(draft, grace_s=KILL_GRACE_S):
        return
    due = draft.status.next_attempt_time
    if due is not None and draft.now < due and not draft.job.spec.suspend:
        draft.wake(due)
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


def _yielding(draft: Draft) -> None:
    """Wait until the ranks have stopped and the pods are gone; then continue with what they stopped for."""
    if draft.job.spec.suspend:
        yielding.ask(draft, YieldReason.SUSPEND, "spec.suspend is true")
    view = draft.view()
    yielding.renew(draft, view)
    # The effects of our own request on a pod are no failure: rules and budgets apply to failures of the
    # ranks.
    own = yielding.failed(draft, view)
    if completion.is_done(draft, view):
        yielding.drop(draft)
        attempt_end.complete(draft, completion.unseen_ends_message(view))
        _finished(draft)
    elif yielding.is_move(draft) and _deadline_passed(draft):
        yielding.drop(draft)
        _fail_by_deadline(draft)
    elif own is not None and attempt_end.is_permanent(draft, own):
        yielding.drop(draft)
        attempt_end.after_failure(draft, own)
        _go_on(draft)
    elif own is not None and yielding.is_move(draft):
        _take_failure(draft, view, own)
        if draft.status.phase is not Phase.YIELDING:
            yielding.drop(draft)
        _go_on(draft)
    else:
        if own is not None:
            records.record(draft, own, cause=None)
        if yielding.over(draft, view) and end_workers(draft, grace_s=KILL_GRACE_S):
            yielding.conclude(draft)
            _go_on(draft)


def _queued(draft: Draft) -> None:
    _stop_clock(draft)
    if _deadline_passed(draft):
        _fail_by_deadline(draft)
    elif end_workers(draft, grace_s=KILL_GRACE_S):
        _gate(draft)


def _suspended(draft: Draft) -> None:
    if not end_workers(draft, grace_s=KILL_GRACE_S):
        return
    if not attempt_objects.group_is_gone(draft) or draft.job.spec.suspend:
        return
    draft.emit(Reason.RESUMED, f"attempt {draft.status.attempt + 1} starts")
    _gate(draft)


def _finished(draft: Draft) -> None:
    policy = draft.job.spec.run_policy
    view = draft.view()
    if policy.clean_pod_policy is CleanPodPolicy.ALL:
        end_workers(draft, grace_s=KILL_GRACE_S)
    elif draft.status.phase is Phase.FAILED or policy.clean_pod_policy is CleanPodPolicy.RUNNING:
        # Ranks of a failed job wait for peers that never come: they are ended whatever the policy says.
        end_live_workers(draft, view, grace_s=KILL_GRACE_S)
    records.save_kept_log(draft)
    if all(pod.is_over for pod in draft.observed.pods):
        attempt_objects.group_is_gone(draft)
    ttl, ended = policy.ttl_seconds_after_finished, draft.status.completion_time
    if ttl is None or ended is None or verification.pending(draft):
        return
    due = ended + timedelta(seconds=ttl)
    if draft.now >= due:
        draft.act(DeleteJob())
    else:
        draft.wake(due)


def _deadline_passed(draft: Draft) -> bool:
    seconds, start = draft.job.spec.run_policy.active_deadline_seconds, draft.status.start_time
    # For a job that was suspended in time, it is not known how long no operator ran.
    if seconds is None or start is None or draft.job.spec.suspend:
        return False
    due = start + timedelta(seconds=seconds)
    if draft.now < due:
        draft.wake(due)
    return draft.now >= due


def _fail_by_deadline(draft: Draft) -> None:
    limit = draft.job.spec.run_policy.active_deadline_seconds
    attempt_end.fail(draft, Reason.DEADLINE_EXCEEDED, f"active for more than {limit} s{_behind(draft)}")
    _finished(draft)


def _behind(draft: Draft) -> str:
    """Return what kept the job from its work, as an addition to the message of a deadline.

    The pass that fails the job is the last one that knows it.
    """
    failure = first_failure(draft.view()) if draft.status.phase in ACTIVE else None
    if failure is not None:
        records.record(draft, failure, cause=None)
        return f"; {records.describe(draft, failure)}"
    problem, given = draft.observed.problem, draft.status.given_back
    if problem is not None:
        return f"; {problem.reason}: {problem.message}"
    if given is not None:
        return f"; {Reason.GAVE_BACK}: {given.message}"
    if draft.status.phase is Phase.RESTARTING and draft.status.failures:
        last = draft.status.failures[0]
        return f"; attempt {last.attempt} ended with {last.reason}: {last.message}"
    conditions = (
        item
        for kind in (ConditionType.PODS_SCHEDULED, ConditionType.READY)
        for item in draft.job.status.conditions
        if item.type == kind and item.status is ConditionStatus.FALSE and item.message
    )
    return "".join(f"; {item.reason}: {item.message}" for item in islice(conditions, 1))


def _termination_timeout(draft: Draft) -> timedelta:
    return timedelta(seconds=draft.job.spec.run_policy.termination_timeout_seconds)


_HANDLERS: dict[Phase, Callable[[Draft], None]] = {
    Phase.QUEUED: _queued,
    Phase.PENDING: _pending,
    Phase.STARTING: _active,
    Phase.RUNNING: _active,
    Phase.RESTARTING: _restarting,
    Phase.YIELDING: _yielding,
    Phase.SUSPENDING: _yielding,
    Phase.SUSPENDED: _suspended,
    Phase.STALLED: _stalled,
    Phase.COMPLETED: _finished,
    Phase.FAILED: _finished,
}
