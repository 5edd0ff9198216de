"""Checkpoint and yield: one protocol for every reason to stop ranks that are healthy (`yield_request`).

A worker is asked through the channel; SIGTERM to all pods is the fallback. The pods are deleted only when
every rank has stopped, or when the grace period is over; their last checkpoint is in status by then. Ranks
that never met have nothing to save and are ended at once.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.operator.api import Phase, YieldReason
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import (
    attempt_end,
    job_end,
    records,
    yield_request,
)
from zerotrain.operator.reconcile.attempts import (
    LIVE,
    OVER,
    AttemptView,
    Failure,
    cause_order,
    failures_of,
    first_failure,
)
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.plan import DeleteWorkers, RequestYield
from zerotrain.operator.reconcile.pods import PodView, WorkerState
from zerotrain.operator.reconcile.progress import unsaved_steps, what_is_kept
from zerotrain.operator.reconcile.teardown import KILL_GRACE_S, end_workers
from zerotrain.operator.reconcile.yield_request import grace_s

FALLBACK = timedelta(seconds=10)
"""Time without an answer of worker 0 after which the pods get SIGTERM, which requests the same checkpoint."""

SLACK = timedelta(seconds=5)
"""Time added to the grace period for the request and its answer."""


def advance(draft: Draft) -> None:
    """Wait until the ranks have stopped and the pods are gone; then continue with what they stopped for."""
    if draft.job.spec.suspend:
        yield_request.ask(draft, YieldReason.SUSPEND, "spec.suspend is true")
    view = draft.view()
    _renew(draft, view)
    # The effects of our own request on a pod are no failure: rules and budgets apply to failures of the
    # ranks.
    own = _failed(draft, view)
    if job_end.is_done(draft, view):
        _drop(draft)
        job_end.complete(draft, view)
    elif _is_move(draft) and job_end.deadline_passed(draft):
        _drop(draft)
        job_end.fail_by_deadline(draft)
    elif own is not None and attempt_end.is_permanent(draft, own):
        _drop(draft)
        attempt_end.after_failure(draft, own)
    elif own is not None and _is_move(draft):
        attempt_end.take_failure(draft, view, own)
        if draft.status.phase is not Phase.YIELDING:
            _drop(draft)
    else:
        if own is not None:
            records.record(draft, own)
        if _over(draft, view) and end_workers(draft, grace_s=KILL_GRACE_S):
            _conclude(draft)


def await_others(draft: Draft, view: AttemptView) -> None:
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
    limit = since + _grace(draft) + SLACK
    if view.all_in(OVER) or draft.is_due(limit):
        attempt_end.after_yield(draft, view)


def _renew(draft: Draft, view: AttemptView) -> None:
    """Restart the request for ranks that had not met when it was made and have met since.

    The operator that made it ended before it deleted their pods, and they may have trained while no operator
    ran.
    """
    request = draft.status.yield_request
    if request is None or request.joined or not any(_has_met(pod) for pod in view.present):
        return
    checkpoint = draft.status.checkpoint.model_copy(update={"requested_at": draft.stamp})
    request = request.model_copy(update={"requested_at": draft.stamp, "joined": True})
    draft.set(checkpoint=checkpoint, yield_request=request)


def _has_met(pod: PodView) -> bool:
    """Return whether the pod's ranks met their peers and were not asked to end at once.

    An operator that took them for starting asks that. A step would prove that they met, but steps are known
    only after an operator's first pass.
    """
    hurried = pod.deletion_at is not None and (pod.deletion_grace_s or 0) <= KILL_GRACE_S
    return pod.ready and not pod.ended and not hurried


def _failed(draft: Draft, view: AttemptView) -> Failure | None:
    """Return a failure caused by the ranks themselves; None for effects of this request or a drain on their
    pods."""
    request = draft.status.yield_request
    if request is not None and not request.joined:
        return None
    left_at = min((pod.finished_at for pod in _without_saving(view) if pod.finished_at), default=None)
    own = (item for item in failures_of(view) if _is_own(item, view) and not _follows(item, left_at))
    return min(own, key=cause_order, default=None)


def _without_saving(view: AttemptView) -> list[PodView]:
    """Return the pods that answered the request by stopping without a checkpoint.

    The channel deletes no pod, so only their exit code shows that they were told to stop.
    """
    return [pod for pod in view.pods(WorkerState.FAILED) if pod.worker_code == ExitCode.TERMINATED]


def _follows(failure: Failure, left_at: datetime | None) -> bool:
    """Return whether the rank ended because a peer had stopped before, as any rank does whose peer is
    gone."""
    pod = failure.worker.pod
    if left_at is None or pod is None or pod.finished_at is None or pod.finished_at < left_at:
        return False
    return failure.failure_class.reason in (Reason.RANK_FAILED, Reason.KILLED)


def _is_own(failure: Failure, view: AttemptView) -> bool:
    pod = failure.worker.pod
    if pod is None or pod.deletion_at is not None or pod.disruption:
        return False
    if pod.worker_code == ExitCode.TERMINATED:
        return False
    # If a pod is merely gone, it is not known which client deleted it.
    return pod.ended or any(pod is item for item in view.present)


def _is_move(draft: Draft) -> bool:
    """Return whether another attempt follows at once, so that a failure counts as it does during training."""
    request = draft.status.yield_request
    return request is not None and request.reason in (YieldReason.DRAIN, YieldReason.RESIZE)


def _over(draft: Draft, view: AttemptView) -> bool:
    """Return whether the ranks have stopped, cannot stop any more, or ran out of time; ask them otherwise."""
    if view.all_in(OVER | {WorkerState.ABSENT, WorkerState.PENDING}) or _is_spoilt(draft, view):
        _report_unsaved(draft, view)
        return True
    request = draft.status.yield_request
    if request is not None and not request.joined:
        return True
    limit = _limit(draft, view)
    if limit is None:
        _request_stop(draft, view)
    elif draft.is_due(limit):
        _warn(draft, f"{_missed(draft)} within {_grace(draft).seconds} s: the pods are deleted")
        return True
    return False


def _is_spoilt(draft: Draft, view: AttemptView) -> bool:
    """Return whether the remaining ranks cannot save any more, however much time they get.

    The engine's ranks save together or not at all. In a user program, one rank may save for all, while the
    others do not handle SIGTERM and are ended by it: such an end must not shorten the grace period of that
    rank.
    """
    if draft.job.spec.program:
        return _failed(draft, view) is not None
    return first_failure(view) is not None


def _limit(draft: Draft, view: AttemptView) -> datetime | None:
    """Return when the grace period of the remaining ranks ends; None while one of them was not told to stop.

    It counts from when they were told. The request may be older, if no operator ran or the API server did not
    respond.
    """
    acked_at = _acked_at(draft, view)
    if acked_at is not None:
        asked = draft.status.checkpoint.requested_at or acked_at
        return max(asked + FALLBACK, acked_at) + _grace(draft) + SLACK
    ends = [_grace_ends_at(draft, pod) for pod in view.pods(*LIVE)]
    known = [end for end in ends if end is not None]
    return max(known) + SLACK if known and len(known) == len(ends) else None


def _acked_at(draft: Draft, view: AttemptView) -> datetime | None:
    state = draft.observed.yielding
    return state.acked_at if state is not None and state.attempt == view.number else None


def _grace_ends_at(draft: Draft, pod: PodView) -> datetime | None:
    """Return the end of the grace period that a deletion gives the pod, at most the job's own."""
    if pod.deletion_at is None or pod.deletion_grace_s is None:
        return pod.deletion_at
    return min(pod.deletion_at, pod.deletion_at - timedelta(seconds=pod.deletion_grace_s) + _grace(draft))


def _request_stop(draft: Draft, view: AttemptView) -> None:
    """Ask the ranks to stop, through the channel first, then by SIGTERM."""
    state, asked = draft.observed.yielding, draft.status.checkpoint.requested_at or draft.now
    refused = state is not None and state.attempt == view.number and state.refused
    pods = view.pods(WorkerState.RUNNING)
    if pods and not refused and draft.now < asked + FALLBACK:
        # The engine's ranks inform each other; whether those of a user program do is not known.
        others = tuple((pod.name, pod.pod_ip) for pod in pods[1:]) if draft.job.spec.program else ()
        draft.act(RequestYield(attempt=view.number, pod=pods[0].name, pod_ip=pods[0].pod_ip, others=others))
        draft.wake(min(draft.now + timedelta(seconds=2), asked + FALLBACK))
    else:
        # The termination message of an ended pod, which names its checkpoint, would be deleted with it.
        draft.act(DeleteWorkers(attempt=view.number, grace_s=None, ended=False))
        draft.wake(draft.now + FALLBACK)  # the deletions cause events, but one may never come


def _report_unsaved(draft: Draft, view: AttemptView) -> None:
    """Report ranks that stopped without the checkpoint that was due, once, before their pods are deleted."""
    policy = draft.job.spec.checkpoint
    pods = [pod for pod in _without_saving(view) if any(pod is item for item in view.present)]
    if policy is None or not policy.on_termination or not pods or pods[0].deletion_at is not None:
        return
    if draft.job.spec.program and view.count(WorkerState.YIELDED):
        return  # a rank that saved did so for all
    end = pods[0].termination
    why = f" ({end.exception})" if end is not None and end.exception else ""
    _warn(draft, f"worker {pods[0].index} (pod {pods[0].name}) stopped without a checkpoint{why}")


def _warn(draft: Draft, what: str) -> None:
    draft.emit(Reason.YIELD_TIMEOUT, f"{what}; {_way_out(draft)}", warning=True)


def _missed(draft: Draft) -> str:
    policy = draft.job.spec.checkpoint
    saves = policy is not None and policy.on_termination
    return "no checkpoint" if saves else "the ranks did not stop"


def _way_out(draft: Draft) -> str:
    policy = draft.job.spec.checkpoint
    if policy is None:  # the API server rejects adding one
        return "nothing would have been saved: recreate the job with spec.checkpoint"
    way_out = "raise checkpoint.gracePeriodSeconds above one step"
    return f"{way_out} plus one checkpoint" if policy.on_termination else way_out


def _conclude(draft: Draft) -> None:
    """Enter the next phase after all pods are gone: suspended, queued, or the next attempt."""
    request = draft.status.yield_request
    reason = request.reason if request is not None else YieldReason.SUSPEND
    saved = draft.status.checkpoint.last is not None and not unsaved_steps(draft.status)
    _drop(draft)
    if request is not None and reason in (YieldReason.DRAIN, YieldReason.RESIZE):
        attempt_end.after_move(draft, request)
        return
    phase = Phase.SUSPENDED if reason is YieldReason.SUSPEND else Phase.QUEUED
    draft.set(phase=phase, start_time=None)
    draft.emit(
        Reason.SUSPENDED, f"attempt {draft.status.attempt} ended; {what_is_kept(draft)}", warning=not saved
    )


def _drop(draft: Draft) -> None:
    """Clear the request, because it was answered or the attempt ended in another way."""
    checkpoint = draft.status.checkpoint.model_copy(update={"requested_at": None})
    draft.set(checkpoint=checkpoint, yield_request=None)


def _grace(draft: Draft) -> timedelta:
    """Return the time from the request to SIGKILL that the pods were created with, whatever the spec says
    now."""
    shape = draft.status.shape
    kept = shape.grace_period_seconds if shape is not None else None
    return timedelta(seconds=kept if kept is not None else grace_s(draft.job.spec))
