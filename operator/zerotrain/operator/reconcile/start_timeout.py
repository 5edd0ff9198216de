"""Workers whose program has not started: what each waits for, until when, and the blame for a rendezvous
timeout.

Workers that did start end with code 82 after their rendezvous timeout. They only waited. The workers that
they waited for are to blame, and status names them with node and reason. If all have started, the rank to
blame is the one that the last inspection found stopped, or still before the rendezvous, while its program
runs on. Its stacks are collected before the attempt ends.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.operator.constants import Reason
from zerotrain.operator.failure_policy import NOT_STARTED, FailureClass
from zerotrain.operator.reconcile import stuck
from zerotrain.operator.reconcile.attempts import AttemptView, Failure, Worker, WorkerState
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.hangs import is_met, stack_sources
from zerotrain.operator.reconcile.observe import StacksView
from zerotrain.operator.reconcile.plan import CollectStacks

LOOK_AGE = timedelta(minutes=1)
"""Maximum age of the inspection that says which ranks were missing. Inspections end with worker 0."""
STACKS_WAIT = timedelta(seconds=10)
"""Time from the end of the worker that timed out for which the stacks of the missing ranks are waited for."""
MAX_NAMED = 4
"""Maximum number of workers that the message names besides the first; `ranks` of the failure has more."""


def late(draft: Draft, view: AttemptView) -> Failure | None:
    """Return the workers with a node that did not start within runPolicy.startDeadlineSeconds, as one
    failure.

    Workers without a node are left to the scheduler, or make the attempt release its resources
    (`giving_back`).
    """
    limit_s, began = draft.job.spec.run_policy.start_deadline_seconds, _began(draft)
    workers = [worker for worker in _unstarted(view) if _has_node(worker)]
    if limit_s is None or began is None or not workers:
        return None
    due = began + timedelta(seconds=limit_s)
    if draft.now < due:
        draft.wake(due)
        return None
    return _blaming(draft, workers, NOT_STARTED, f"not started within {limit_s} s")


def blamed(draft: Draft, view: AttemptView, failure: Failure | None) -> Failure | None:
    """Return the failure; for a rendezvous timeout, that of the workers that had not started, or had not
    joined."""
    if failure is None or failure.failure_class.reason is not Reason.RENDEZVOUS_TIMEOUT:
        return failure
    workers = _unstarted(view)
    if not workers:
        return _not_come(draft, view, failure)
    summary = f"not started when worker {failure.worker.index} timed out in the rendezvous (exit code 82)"
    found = _blaming(draft, workers, failure.failure_class, summary)
    return replace(found, code=ExitCode.RENDEZVOUS_TIMEOUT)


def _not_come(draft: Draft, view: AttemptView, failure: Failure) -> Failure:
    look, ended_at = draft.observed.inspection, _ended_at(failure.worker) or draft.now
    if look is None or look.attempt != view.number or ended_at - look.at > LOOK_AGE or is_met(look):
        return failure
    late = look.slow_rank
    if late is None or not late.worker < len(view.workers):
        return failure
    worker = view.workers[late.worker]
    if worker.state is not WorkerState.RUNNING:
        return failure
    stacks, due = draft.observed.stacks, None
    if stacks is None or not _are_of(stacks, view, since=_ended_at(failure.worker)):
        stacks, due = None, ended_at + STACKS_WAIT
        if draft.now < due:
            draft.act(CollectStacks(attempt=view.number, sources=stack_sources(view, first=worker.index)))
    message = f"{late.why}, when worker {failure.worker.index} timed out in the rendezvous (exit code 82)"
    return Failure(
        worker=worker,
        failure_class=failure.failure_class,
        rank=late.rank,
        message=message,
        stacks=stacks.config_map if stacks is not None else "",
        code=ExitCode.RENDEZVOUS_TIMEOUT,
        due=due,
    )


def _are_of(stacks: StacksView, view: AttemptView, *, since: datetime | None) -> bool:
    """Return whether the stacks were collected in this attempt, and not for an earlier alarm."""
    return stacks.attempt == view.number and (since is None or stacks.at >= since)


def _ended_at(worker: Worker) -> datetime | None:
    return worker.pod.ended_seen_at if worker.pod is not None else None


def _began(draft: Draft) -> datetime | None:
    """Return when the attempt began, or this operator if that was later: pods need an operator to start."""
    began, synced = draft.status.attempt_start_time, draft.observed.synced_at
    return max(began, synced) if began is not None and synced is not None else None


def _unstarted(view: AttemptView) -> list[Worker]:
    """Return the workers that have not started, by index, those with a known reason first."""
    found = [worker for worker in view.workers if worker.state in (WorkerState.PENDING, WorkerState.ABSENT)]
    return sorted(found, key=lambda worker: (not _has_reason(worker), worker.index))


def _has_node(worker: Worker) -> bool:
    pod = worker.pod
    return pod is not None and (pod.scheduled or pod.node is not None)


def _has_reason(worker: Worker) -> bool:
    pod = worker.pod
    return pod is not None and bool(pod.waiting or (not pod.scheduled and pod.unscheduled_reason))


def _blaming(draft: Draft, workers: list[Worker], failure_class: FailureClass, summary: str) -> Failure:
    first, *rest = workers
    message = f"{summary}: {_waits_for(draft, first)}"
    if rest:
        named = "; ".join(f"{_place(item)}: {_waits_for(draft, item)}" for item in rest[:MAX_NAMED])
        more = f"; and {len(rest) - MAX_NAMED} more" if len(rest) > MAX_NAMED else ""
        message += f"; also not started: {named}{more}"
    others = tuple(
        Failure(worker=item, failure_class=failure_class, message=_waits_for(draft, item)) for item in rest
    )
    return Failure(worker=first, failure_class=failure_class, message=message, others=others)


def _place(worker: Worker) -> str:
    pod = worker.pod
    if pod is None:
        return f"worker {worker.index}"
    return f"worker {worker.index} (pod {pod.name}, {f'node {pod.node}' if pod.node else 'no node'})"


def _waits_for(draft: Draft, worker: Worker) -> str:
    pod, problem = worker.pod, draft.observed.problem
    if pod is None:
        return f"its pod does not exist{f': {problem.message}' if problem is not None else ''}"
    if pod.waiting:
        return pod.waiting
    if not pod.scheduled and not pod.node:
        return pod.unscheduled_reason or "it has no node yet"
    message = stuck.starts_late(draft, pod) or stuck.runs_before(pod)
    return message or "its image, volumes or init containers are not ready"
