"""Checkpoint and yield: one protocol for every reason to stop ranks that are healthy.

The request is in status before any rank is asked. A worker is asked through the channel; SIGTERM to all pods
is the fallback. The pods are deleted only when every rank has stopped, or when the grace period is over;
their last checkpoint is in status by then. Ranks that never met have nothing to save and are ended at once.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.operator.api import Phase, YieldReason, YieldRequest, ZeroTrainingJobSpec
from zerotrain.operator.api.spec_hash import spec_hash
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import attempt_end, avoided_nodes, queueing, resizing
from zerotrain.operator.reconcile.attempts import (
    LIVE,
    OVER,
    AttemptView,
    Failure,
    WorkerState,
    cause_order,
    failures_of,
    first_failure,
)
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.plan import DeleteWorkers, RequestYield
from zerotrain.operator.reconcile.pods import PodView
from zerotrain.operator.reconcile.progress import unsaved_steps
from zerotrain.operator.reconcile.teardown import KILL_GRACE_S
from zerotrain.operator.resources.container import DEFAULT_GRACE_S

FALLBACK = timedelta(seconds=10)
"""Time without an answer of worker 0 after which the pods get SIGTERM, which requests the same checkpoint."""

SLACK = timedelta(seconds=5)
"""Time added to the grace period for the request and its answer."""

FROZEN = {
    "image",
    "command",
    "args",
    "config",
    "config_from",
    "data",
    "steps",
    "log_every_steps",
    "checkpoint",
    "scheduling",
    "pod_template",
}
"""Fields of the spec that change only while the job is suspended, except for the parts in `THAWED`."""

THAWED = {
    "checkpoint": {"volume", "verify", "verify_timeout_seconds"},
    "scheduling": {"priority_class_name"},
}

UNKNOWN = "unknown"
"""Placeholder for an unknown hash: equal to none."""

_PHASE = {
    YieldReason.SUSPEND: Phase.SUSPENDING,
    YieldReason.QUEUE_EVICTION: Phase.SUSPENDING,
    YieldReason.DRAIN: Phase.YIELDING,
    YieldReason.RESIZE: Phase.YIELDING,
}
_EVENT = {
    YieldReason.SUSPEND: Reason.CHECKPOINT_REQUESTED,
    YieldReason.QUEUE_EVICTION: Reason.QUEUE_EVICTED,
    YieldReason.DRAIN: Reason.DRAINING,
    YieldReason.RESIZE: Reason.RESIZING,
}


def wanted(draft: Draft, view: AttemptView) -> tuple[YieldReason, str] | None:
    """Return why healthy ranks should stop, as reason and message; None if they continue."""
    if _is_outdated(draft):
        # The suspension in between, which no pass saw, would have had the same effect.
        return YieldReason.SUSPEND, "the spec was changed while the job was briefly suspended"
    if (why := queueing.evicted(draft, view)) is not None:
        return YieldReason.QUEUE_EVICTION, why
    if (why := avoided_nodes.move_wanted(draft, view)) is not None:
        return YieldReason.DRAIN, why
    if (why := resizing.resize_wanted(draft, view)) is not None:
        return YieldReason.RESIZE, why
    return None


def ask(draft: Draft, reason: YieldReason, why: str) -> None:
    """Write the request to status; a request under way keeps its time and may only become a suspension."""
    under_way = _under_way(draft)
    if under_way is not None and under_way.reason is reason:
        return
    asked = under_way.requested_at if under_way is not None else draft.stamp
    checkpoint = draft.status.checkpoint.model_copy(update={"requested_at": asked})
    joined = under_way.joined if under_way is not None else _joined(draft)
    request = YieldRequest(reason=reason, requested_at=asked, message=why, joined=joined)
    draft.set(phase=_PHASE[reason], checkpoint=checkpoint, yield_request=request)
    attempt = draft.status.attempt
    suspends = reason is YieldReason.SUSPEND and draft.job.spec.suspend
    message = f"suspending attempt {attempt}" if suspends else f"attempt {attempt}: {why}"
    draft.emit(_EVENT[reason], message)


def renew(draft: Draft, view: AttemptView) -> None:
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


def failed(draft: Draft, view: AttemptView) -> Failure | None:
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
    ended = (worker.pod for worker in view.workers if worker.state is WorkerState.FAILED)
    return [pod for pod in ended if pod is not None and pod.worker_code == ExitCode.TERMINATED]


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


def is_move(draft: Draft) -> bool:
    """Return whether another attempt follows at once, so that a failure counts as it does during training."""
    request = draft.status.yield_request
    return request is not None and request.reason in (YieldReason.DRAIN, YieldReason.RESIZE)


def over(draft: Draft, view: AttemptView) -> bool:
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
    elif draft.now >= limit:
        _warn(draft, f"{_missed(draft)} within {grace(draft).seconds} s: the pods are deleted")
        return True
    else:
        draft.wake(limit)
    return False


def _is_spoilt(draft: Draft, view: AttemptView) -> bool:
    """Return whether the remaining ranks cannot save any more, however much time they get.

    The engine's ranks save together or not at all. In a user program, one rank may save for all, while the
    others do not handle SIGTERM and are ended by it: such an end must not shorten the grace period of that
    rank.
    """
    if draft.job.spec.command:
        return failed(draft, view) is not None
    return first_failure(view) is not None


def _limit(draft: Draft, view: AttemptView) -> datetime | None:
    """Return when the grace period of the remaining ranks ends; None while one of them was not told to stop.

    It counts from when they were told. The request may be older, if no operator ran or the API server did not
    respond.
    """
    acked_at = _acked_at(draft, view)
    if acked_at is not None:
        asked = draft.status.checkpoint.requested_at or acked_at
        return max(asked + FALLBACK, acked_at) + grace(draft) + SLACK
    left = [worker.pod for worker in view.workers if worker.state in LIVE and worker.pod is not None]
    ends = [_grace_ends_at(draft, pod) for pod in left]
    known = [end for end in ends if end is not None]
    return max(known) + SLACK if known and len(known) == len(ends) else None


def _acked_at(draft: Draft, view: AttemptView) -> datetime | None:
    state = draft.observed.yielding
    return state.acked_at if state is not None and state.attempt == view.number else None


def _grace_ends_at(draft: Draft, pod: PodView) -> datetime | None:
    """Return the end of the grace period that a deletion gives the pod, at most the job's own."""
    if pod.deletion_at is None or pod.deletion_grace_s is None:
        return pod.deletion_at
    return min(pod.deletion_at, pod.deletion_at - timedelta(seconds=pod.deletion_grace_s) + grace(draft))


def _request_stop(draft: Draft, view: AttemptView) -> None:
    """Ask the ranks to stop, through the channel first, then by SIGTERM."""
    state, asked = draft.observed.yielding, draft.status.checkpoint.requested_at or draft.now
    refused = state is not None and state.attempt == view.number and state.refused
    pods = [
        worker.pod
        for worker in view.workers
        if worker.state is WorkerState.RUNNING and worker.pod is not None
    ]
    if pods and not refused and draft.now < asked + FALLBACK:
        # The engine's ranks inform each other; whether those of a user program do is not known.
        others = tuple((pod.name, pod.pod_ip) for pod in pods[1:]) if draft.job.spec.command else ()
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
    if draft.job.spec.command and view.count(WorkerState.YIELDED):
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


def conclude(draft: Draft) -> None:
    """Enter the next phase after all pods are gone: suspended, queued, or the next attempt."""
    request = draft.status.yield_request
    reason = request.reason if request is not None else YieldReason.SUSPEND
    saved = draft.status.checkpoint.last is not None and not unsaved_steps(draft.status)
    drop(draft)
    if request is not None and reason in (YieldReason.DRAIN, YieldReason.RESIZE):
        attempt_end.after_move(draft, request)
        return
    phase = Phase.SUSPENDED if reason is YieldReason.SUSPEND else Phase.QUEUED
    draft.set(phase=phase, start_time=None)
    draft.emit(
        Reason.SUSPENDED, f"attempt {draft.status.attempt} ended; {what_is_kept(draft)}", warning=not saved
    )


def what_is_kept(draft: Draft) -> str:
    """Return what a job that stops can continue from, as a text."""
    last = draft.status.checkpoint.last
    if last is None:
        return "there is no checkpoint"
    message = f"the newest checkpoint is step {last.step}"
    if unsaved_steps(draft.status):
        message += f", the job was at step {draft.status.progress.step}"
    return message


def drop(draft: Draft) -> None:
    """Clear the request, because it was answered or the attempt ended in another way."""
    checkpoint = draft.status.checkpoint.model_copy(update={"requested_at": None})
    draft.set(checkpoint=checkpoint, yield_request=None)


def _under_way(draft: Draft) -> YieldRequest | None:
    """Return the request under way; None without one.

    A status from before there were several reasons contains only the time.
    """
    request, asked = draft.status.yield_request, draft.status.checkpoint.requested_at
    if request is None and asked is not None and draft.status.phase is Phase.SUSPENDING:
        return YieldRequest(reason=YieldReason.SUSPEND, requested_at=asked)
    return request


def _joined(draft: Draft) -> bool:
    """Return whether the ranks have met, also if no pass saw it because no operator ran."""
    view = draft.view()
    met = (
        any(pod.ready or pod.ended for pod in view.present)
        or view.count(WorkerState.YIELDED, WorkerState.STOPPED, WorkerState.TERMINATING) > 0
    )
    return draft.status.phase is Phase.RUNNING or met


def grace(draft: Draft) -> timedelta:
    """Return the time from the request to SIGKILL that the pods were created with, whatever the spec says
    now."""
    shape = draft.status.shape
    kept = shape.grace_period_seconds if shape is not None else None
    return timedelta(seconds=kept if kept is not None else _grace_s(draft.job.spec))


def _grace_s(spec: ZeroTrainingJobSpec) -> int:
    return spec.checkpoint.grace_period_seconds if spec.checkpoint is not None else DEFAULT_GRACE_S


def basis(draft: Draft) -> dict[str, object]:
    """Return the parts of the spec that an attempt which begins now keeps, as fields of its shape."""
    return {
        "grace_period_seconds": _grace_s(draft.job.spec),
        "generation": draft.job.identity.generation,
        "frozen_hash": frozen_hash(draft.job.spec),
    }


def mark_basis_unknown(draft: Draft) -> None:
    """Mark the spec of the attempt's pods as unknown if another operator created them and did not record it.

    If the spec was edited since the job was created, it is not known whether the pods have the edit. Such an
    attempt is young, and stops once.
    """
    if draft.job.identity.generation > 1 and draft.status.shape is not None:
        unknown = {"generation": 0, "frozen_hash": UNKNOWN}
        draft.set(shape=draft.status.shape.model_copy(update=unknown))


def frozen_hash(spec: ZeroTrainingJobSpec) -> str:
    """Return a hash of the fields that change only while the job is suspended."""
    return spec_hash(spec, parts=FROZEN, but=THAWED)


def _is_outdated(draft: Draft) -> bool:
    """Return whether the attempt's pods were made from another spec than the present one."""
    shape = draft.status.shape
    if shape is None or not shape.frozen_hash or shape.generation == draft.job.identity.generation:
        return False
    return shape.frozen_hash != frozen_hash(draft.job.spec)
