"""The end of the job: completion, failure, the deadline, and the clean-up afterwards.

An attempt may be complete even if the ends of some workers were not observed. A pod that is deleted while no
operator runs takes its exit code with it. What remains is what was recorded before
(`status.checkpoint`, updated as soon as a rank reports it) and what the remaining pods say. Only reports of
the built-in trainer count: what a user program still has to do after a checkpoint, or on another rank, is not
known.

For a user program that was asked to stop, an exit code 0 may mean "done" or "stopped": many programs end so
on SIGTERM. It counts as stopped, as in a Kubernetes Job: a program that is done ends with 0 once more. This
module covers the operator's own stop request; a deletion or a disruption leads to `WorkerState.STOPPED`.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import islice

from zerotrain.operator.api import Phase
from zerotrain.operator.api.lifecycle import CleanPodPolicy
from zerotrain.operator.api.status import ConditionStatus
from zerotrain.operator.constants import ConditionType, Reason
from zerotrain.operator.reconcile import (
    attempt_objects,
    records,
    verification,
)
from zerotrain.operator.reconcile.attempts import MAX_CLOCK_LAG, AttemptView, first_failure
from zerotrain.operator.reconcile.draft import ACTIVE, Draft
from zerotrain.operator.reconcile.plan import DeleteJob
from zerotrain.operator.reconcile.pods import WorkerState
from zerotrain.operator.reconcile.progress import trained_nothing
from zerotrain.operator.reconcile.teardown import KILL_GRACE_S, end_live_workers, end_workers

_SURE = frozenset({WorkerState.SUCCEEDED})

_UNLESS_PROVEN = frozenset({WorkerState.SUCCEEDED, WorkerState.LOST})


def advance(draft: Draft) -> None:
    """Delete what the policy says, save the log of the failed rank, and delete the job after its time."""
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
    if draft.is_due(due):
        draft.act(DeleteJob())


def is_done(draft: Draft, view: AttemptView) -> bool:
    """Return whether the job is complete. It is not if one worker failed, yielded or still runs."""
    if view.all_in(_SURE):
        return not _may_be_an_answer(draft, view)
    return view.all_in(_UNLESS_PROVEN) and _all_steps_are_done(draft, view)


def _may_be_an_answer(draft: Draft, view: AttemptView) -> bool:
    """Return whether some worker ended with 0 because it was asked to stop.

    One such worker is enough, because it would have continued with the others.
    """
    asked, state = draft.status.checkpoint.requested_at, draft.observed.yielding
    if asked is None or not draft.job.spec.program:
        return False
    if state is not None and state.attempt == view.number and state.acked_at is not None:
        return True
    # The answer may be lost, or only in the memory of a previous operator. Then the times decide, one of
    # which comes from the node's clock.
    since = asked - MAX_CLOCK_LAG
    pods = [worker.pod for worker in view.workers if worker.pod is not None]
    return any(pod.deletion_at or pod.finished_at is None or pod.finished_at >= since for pod in pods)


def _all_steps_are_done(draft: Draft, view: AttemptView) -> bool:
    spec, status = draft.job.spec, draft.status
    if spec.program or spec.steps is None:
        return False
    if spec.checkpoint is not None:
        # All ranks write the checkpoint together, and none is written for a training whose result is
        # rejected. A checkpoint of another attempt may be the one that this attempt found damaged.
        last = status.checkpoint.last
        return last is not None and last.durable and last.attempt == view.number and last.step >= spec.steps
    # Nothing is kept of such a job. It is done when all ranks made the last step, which ends in an exchange
    # between all of them. The exit code of any rank says that the loss was accepted as well.
    ends = [pod.termination for pod in view.pods(WorkerState.SUCCEEDED)]
    return any(end is not None and end.step >= spec.steps for end in ends)


def _unseen_ends_message(view: AttemptView) -> str:
    """Return the part of the event's message that names the workers whose end was not observed; empty without
    one."""
    unseen = view.indices(WorkerState.LOST)
    if not unseen:
        return ""
    names = f"{', '.join(str(index) for index in unseen[:5])}{', ...' if len(unseen) > 5 else ''}"
    return f"; the pods of workers {names} ended unobserved, but the last step was made and all work was done"


def complete(draft: Draft, view: AttemptView) -> None:
    """Complete the job."""
    draft.set(phase=Phase.COMPLETED, completion_time=draft.stamp)
    progress = draft.status.progress
    steps = f" after {progress.step} steps" if progress.step else ""
    if idle := trained_nothing(draft.status):
        steps = f" without training a step: {idle}"
    draft.emit(
        Reason.COMPLETED,
        f"attempt {draft.status.attempt} completed the job{steps}{_unseen_ends_message(view)}",
    )


def fail(draft: Draft, reason: Reason, message: str) -> None:
    draft.set(phase=Phase.FAILED, completion_time=draft.stamp, next_attempt_time=None)
    draft.failed = (reason, message)
    draft.emit(reason, message, warning=True)


def deadline_passed(draft: Draft) -> bool:
    seconds, start = draft.job.spec.run_policy.active_deadline_seconds, draft.status.start_time
    # For a job that was suspended in time, it is not known how long no operator ran.
    if seconds is None or start is None or draft.job.spec.suspend:
        return False
    return draft.is_due(start + timedelta(seconds=seconds))


def fail_by_deadline(draft: Draft) -> None:
    limit = draft.job.spec.run_policy.active_deadline_seconds
    fail(draft, Reason.DEADLINE_EXCEEDED, f"active for more than {limit} s{_behind(draft)}")


def _behind(draft: Draft) -> str:
    """Return what kept the job from its work, as an addition to the message of a deadline.

    The pass that fails the job is the last one that knows it.
    """
    failure = first_failure(draft.view()) if draft.status.phase in ACTIVE else None
    if failure is not None:
        records.record(draft, failure)
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
