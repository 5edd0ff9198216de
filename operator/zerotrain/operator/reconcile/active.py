"""The phases Pending, Starting and Running: the current attempt is followed, and ended or asked to stop."""

from __future__ import annotations

from datetime import timedelta

from zerotrain.operator.api import Phase, YieldReason
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import (
    attempt_end,
    avoided_nodes,
    giving_back,
    hangs,
    job_end,
    resizing,
    start_up,
    stragglers,
    yield_request,
    yielding,
)
from zerotrain.operator.reconcile.attempts import AttemptView, Failure, first_failure
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.nodes import lost_at
from zerotrain.operator.reconcile.plan import CreateWorkers
from zerotrain.operator.reconcile.pods import WorkerState


def advance(draft: Draft) -> None:
    """Run one pass over the current attempt. The first of these that applies decides."""
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


def _termination_timeout(draft: Draft) -> timedelta:
    return timedelta(seconds=draft.job.spec.run_policy.termination_timeout_seconds)
