"""The pure function `reconcile`: it maps everything known about one job to everything to do about it.

It is level-triggered. Each pass compares the whole job with the whole observation and never asks what
changed, so that a lost event, a restart of the operator or an extra pass cannot change the outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from zerotrain.operator.api import AttemptShape, Phase, YieldReason, ZeroTrainingJobSpec
from zerotrain.operator.api.job_text import UNREAD
from zerotrain.operator.api.planning import Planner, plan_job
from zerotrain.operator.api.status import Count
from zerotrain.operator.constants import MANAGER, Reason
from zerotrain.operator.reconcile import (
    attempt_checks,
    attempt_end,
    attempt_objects,
    avoided_nodes,
    giving_back,
    hangs,
    job_end,
    next_attempt,
    progress,
    queueing,
    resizing,
    schedulers,
    start_up,
    stragglers,
    teardown,
    verification,
    yield_request,
    yielding,
)
from zerotrain.operator.reconcile.attempts import AttemptView, Failure, first_failure
from zerotrain.operator.reconcile.conditions import update_conditions
from zerotrain.operator.reconcile.draft import (
    ACTIVE,
    BETWEEN_ATTEMPTS,
    FINISHED,
    STOPPING,
    Draft,
    JobView,
    Known,
    identity_of,
    worker_selector,
)
from zerotrain.operator.reconcile.nodes import lost_at
from zerotrain.operator.reconcile.observe import Observed
from zerotrain.operator.reconcile.plan import NOTHING, CreateWorkers, Plan
from zerotrain.operator.reconcile.pods import WorkerState

MAX_LOST_ATTEMPT = 999_999
"""Latest attempt that pods can tell of a job whose status was reset: pods can be forged, and the number is
part of the names of all that follow."""


def reconcile(
    job: Mapping[str, Any],
    observed: Observed,
    now: datetime,
    known: Known | None = None,
    planner: Planner = plan_job,
) -> Plan:
    """Decide one pass over `job` (the API server's JSON). The steps and their order are those below.

    `now` must be timezone-aware. `known` caches what has not changed since the last pass over the same job
    UID. An exception of `planner` is passed on: nothing was decided then, and the same call may be repeated.
    """
    draft = _read(job, observed, now, known or Known(), planner)
    if draft is None:
        return NOTHING
    if draft.stalled is not None:
        return _unreadable(draft)

    _find_lost_attempt(draft)  # before all else: whatever is decided is about the attempt that has pods

    # What was observed is stored while the attempt is still the one that it was observed of.
    queueing.take_label(draft)  # before the phases: a job that begins now begins in the queue of its label
    progress.merge_progress(draft)  # before an attempt ends: its last step and checkpoint decide what follows
    progress.observe_peaks(draft)  # before an attempt begins: its memory plan replaces the present one
    teardown.end_strays(draft)  # before the phases, which look at the pods of the present attempt alone

    # The phases, each at most once, in the only order in which a pass may go through them. One that ends
    # hands over to a later one, so that a restart costs one status write and not three.
    if draft.phase in ACTIVE and not draft.awaits_first_attempt:
        _advance_attempt(draft)
    if draft.phase in STOPPING:
        yielding.advance(draft)  # after the attempt, which may have asked the ranks to stop just now
    if draft.phase in BETWEEN_ATTEMPTS or draft.awaits_first_attempt:
        next_attempt.advance(draft)  # after the end of an attempt; one that starts here is followed later
    if draft.phase in FINISHED:
        job_end.advance(draft)  # last: each of the above may have ended the job

    # What follows from the phase, whichever it is.
    giving_back.settle(draft)  # before the conditions, which show what is left of it
    attempt_checks.report_egress(draft)
    queueing.settle(draft)  # before actions that may be rejected and end the pass: quota must be released
    view = draft.view()
    attempt_objects.keep_shared(draft, view)  # before the next two, so that a NetworkPolicy never waits
    attempt_objects.settle_protection(draft)  # a rejected disruption budget ends the actions of the pass,
    verification.advance(draft)  # and so does a rejected pod
    start_up.report_rejection(
        draft
    )  # after all actions: what was refused matters only while it is tried again
    _count_ranks(draft, view)
    update_conditions(draft, view)  # last: they describe all of the above
    return draft.plan()


def _advance_attempt(draft: Draft) -> None:
    """Follow the current attempt in the phases Pending, Starting and Running. The first of these that applies
    decides."""
    view = draft.view()
    if not view.count(WorkerState.ABSENT):
        draft.set(pods_created=True)
    if draft.status.start_time is None and (view.present or draft.status.pods_created):
        draft.set(start_time=draft.stamp)
    if job_end.is_done(draft, view):  # first: nothing that happens to a job that is done matters
        job_end.complete(draft, view)
    elif job_end.deadline_passed(draft):
        job_end.fail_by_deadline(draft)
    elif draft.job.spec.suspend:  # before failures: those that the request to stop causes are none
        yield_request.ask(draft, YieldReason.SUSPEND, "spec.suspend is true")
    elif (why := giving_back.reason(draft, view)) is not None:
        giving_back.conclude(draft, why)  # before failures: ranks that waited for the rest have failed, too
    elif (failure := _failure_of(draft, view)) is not None:
        attempt_end.take_failure(draft, view, failure)  # before a yield: it is the cause of one that followed
    elif view.count(WorkerState.YIELDED, WorkerState.STOPPED):
        yielding.await_others(draft, view)
    elif free := avoided_nodes.outlived_exclusions(draft, view):
        attempt_end.after_expiry(draft, free)
    elif (asked := yield_request.wanted(draft, view)) is not None:  # late: only healthy ranks can save
        yield_request.ask(draft, *asked)
    else:
        _follow(draft, view)


def _follow(draft: Draft, view: AttemptView) -> None:
    """Create missing pods, report what they wait for, and set the phase to what they have reached."""
    absent = view.indices(WorkerState.ABSENT)
    if absent:
        draft.act(CreateWorkers(attempt=view.number, indices=absent))
    start_up.report_slow_start(draft, view)
    schedulers.report_ignored(draft, view)
    for pod in view.pods(WorkerState.TERMINATING):
        if pod.deletion_at is not None:
            # A node that died with the pod sends no event: check again when the pod counts as lost.
            draft.wake(pod.deletion_at + draft.termination_timeout + timedelta(seconds=1))
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


def _failure_of(draft: Draft, view: AttemptView) -> Failure | None:
    """Return the failure that ends the attempt: of a rank, of a start that takes too long, or a hang."""
    failure = start_up.blamed(draft, view, first_failure(view))
    return failure or start_up.late(draft, view) or hangs.hang_of(draft, view)


def _wake_at_node_losses(draft: Draft) -> None:
    """Wake when a node that is not ready counts as lost: silence causes no event."""
    for node in draft.observed.nodes.values():
        due = lost_at(node, draft.signs())
        if due is not None and due > draft.now:
            draft.wake(due)


def _read(
    job: Mapping[str, Any], observed: Observed, now: datetime, known: Known, planner: Planner
) -> Draft | None:
    """Return the draft of a pass over the job, with `stalled` set if its spec cannot be read.

    None for a job that is being deleted, which is left to garbage collection by ownerReferences, and for a
    job of another manager, which is left to that manager.
    """
    identity, stored = identity_of(job), job.get("spec", {})
    if identity.deleting or stored.get("managedBy", MANAGER) != MANAGER:
        return None
    status, spec, stalled = known.read_status(job), _EMPTY, None
    if UNREAD in job:
        stalled = str(Reason.INVALID_SPEC), job[UNREAD]  # larger than the operator reads
    else:
        try:
            spec = known.read_spec(job)
        except ValidationError as error:
            stalled = attempt_checks.unreadable(error)
    view = JobView(identity=identity, spec=spec, status=status)
    draft = Draft(job=view, observed=observed, now=now, status=status, plan_job=planner, stalled=stalled)
    if known.unfit:
        _leave_out(draft, known.unfit)
    return draft


def _find_lost_attempt(draft: Draft) -> None:
    """Go on with the attempt that has pods if the status was reset: another one would begin beside it."""
    lost, spec = draft.observed.lost_attempt, draft.job.spec
    if not 0 < lost <= MAX_LOST_ATTEMPT or draft.status.attempt:
        return
    workers = 1 + max((pod.index for pod in draft.observed.pods if pod.attempt == lost), default=0)
    shape = AttemptShape(
        workers=spec.workers if spec.elastic is None else min(workers, spec.elastic.max_workers)
    )
    if draft.phase in ACTIVE:
        draft.set(phase=Phase.PENDING)
    draft.set(attempt=lost, shape=shape, pods_created=True, attempt_start_time=draft.stamp)
    draft.emit(
        Reason.STATUS_UNFIT,
        f"the status names no attempt, and there are pods of attempt {lost}: somebody reset the status. "
        f"Attempt {lost} goes on, and earlier restarts and failures are forgotten",
        warning=True,
    )


def _leave_out(draft: Draft, unfit: Sequence[str]) -> None:
    """Report the parts of the stored status that do not fit, and have the status written without them."""
    draft.rewrites_status = True
    draft.emit(
        Reason.STATUS_UNFIT,
        "parts of the status cannot be read and are decided anew. Another version of the operator or of the "
        f"custom resource wrote them, or somebody edited them: status.{'; status.'.join(unfit)}",
        warning=True,
    )


_EMPTY = ZeroTrainingJobSpec.model_construct(image="unreadable")
"""Placeholder for a spec that cannot be read. It is not validated, since it is no valid job."""


def _unreadable(draft: Draft) -> Plan:
    """Report the problem and leave the pods alone: running pods were started from a spec that was
    readable."""
    if draft.status.attempt == 0:
        draft.set(phase=Phase.STALLED)
    if draft.status.phase in BETWEEN_ATTEMPTS:
        draft.set(start_time=None)  # time spent waiting for a user is not active time
    attempt_checks.report_unreadable(draft)
    update_conditions(draft, draft.view())
    return draft.plan()


def _count_ranks(draft: Draft, view: AttemptView) -> None:
    identity, spec = draft.job.identity, draft.job.spec
    draft.set(
        selector=worker_selector(identity.name, identity.uid),
        zero_stage=_zero_stage(spec),
        workers=_count(view, draft.workers, 1),
        ranks=_count(view, draft.workers, spec.num_ranks_per_worker),
    )


def _count(view: AttemptView, workers: int, each: int) -> Count:
    live = [pod for pod in view.present if not pod.ended]
    ready = sum(1 for pod in live if pod.ready)
    return Count(
        desired=workers * each,
        running=sum(1 for pod in live if pod.started) * each,
        ready=ready * each,
        summary=f"{ready * each}/{workers * each}",
    )


def _zero_stage(spec: ZeroTrainingJobSpec) -> int | None:
    """Return the ZeRO stage for the column of `kubectl get`; None if the configuration is given by
    reference."""
    zero = (spec.config or {}).get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return stage if isinstance(stage, int) and not isinstance(stage, bool) else None
