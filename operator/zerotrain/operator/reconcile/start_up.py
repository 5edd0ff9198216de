"""The start of an attempt: what each worker waits for, until when, and the blame for a rendezvous timeout.

- Requests that the API server rejects are reported: one event when the rejections begin, and the condition
  Stalled only if the user must act.
- The scheduler finds no node for a pod, or may still find one.
- A pod that has a node does not start. The operator may not read events, in which the kubelet reports what
  fails. It reports how far the pod is and what it needs for the next step. `zerotrain describe` shows the
  kubelet's messages next to that.
- Workers that did start end with code 82 after their rendezvous timeout. They only waited. The workers that
  they waited for are to blame, and status names them with node and reason. If all have started, the rank to
  blame is the one that the last inspection found stopped, or still before the rendezvous, while its program
  runs on. Its stacks are collected before the attempt ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.operator.api import Phase
from zerotrain.operator.constants import ConditionType, Reason
from zerotrain.operator.failure_policy import NOT_STARTED, FailureClass
from zerotrain.operator.reconcile import attempt_checks
from zerotrain.operator.reconcile.attempts import AttemptView, Failure, Worker
from zerotrain.operator.reconcile.draft import FINISHED, Draft, stored
from zerotrain.operator.reconcile.hangs import is_met, stack_sources
from zerotrain.operator.reconcile.observe import Problem, StacksView
from zerotrain.operator.reconcile.plan import CollectStacks
from zerotrain.operator.reconcile.pods import PodView, Stage, WorkerState

LOOK_AGE = timedelta(minutes=1)
"""Maximum age of the inspection that says which ranks were missing. Inspections end with worker 0."""

STACKS_WAIT = timedelta(seconds=10)
"""Time from the end of the worker that timed out for which the stacks of the missing ranks are waited for."""

MAX_NAMED = 4
"""Maximum number of workers that the message names besides the first; `ranks` of the failure has more."""

UNSCHEDULED_SETTLE = timedelta(seconds=10)
"""Time that a scheduler's rejection must have lasted: it considers pods one by one, and again when some are
deleted."""

STAGE_PATIENCE = {
    Stage.MOUNTING: timedelta(seconds=30),
    Stage.PULLING: timedelta(minutes=5),
    Stage.INITIALIZING: timedelta(minutes=5),
}
"""Time that each stage may take.

A kubelet mounts a volume in seconds and pulls an image in minutes. How long an init container may run is not
known, but one that waits for packets which a policy drops reports nothing itself.
"""

_WAITING: Final = frozenset({None, Phase.QUEUED, Phase.PENDING, Phase.STARTING, Phase.RUNNING})
"""Phases in which a rejected request keeps the job from its work."""

_STOPPED: Final = _WAITING - {Phase.RUNNING} | {Phase.RESTARTING}
"""Phases of these in which the job does not train: a rejection does not stall a job that trains."""


def lasting_rejection(draft: Draft) -> Problem | None:
    """Return a rejection that only the user can resolve; None if it may resolve by itself, as an exhausted
    quota may."""
    problem = draft.observed.problem
    if problem is None or not problem.lasting or draft.status.phase not in _STOPPED:
        return None
    return problem


def refused_cleanup(draft: Draft) -> Problem | None:
    """Return a rejection of what a finished job still has to do: delete pods, verify, delete itself; None
    otherwise."""
    acts = draft.job.status.phase in FINISHED and draft.actions
    return draft.observed.problem if acts else None


def report_rejection(draft: Draft) -> None:
    """Emit one event when rejections by the API server begin."""
    problem = draft.observed.problem
    waits = draft.status.phase in _WAITING
    ends = draft.job.status.phase not in _WAITING and bool(draft.actions)
    if problem is None or not (waits or ends):
        return
    before = {item.type: item for item in draft.job.status.conditions}.get(str(ConditionType.RECONCILING))
    current = (problem.reason, _without_numbers(stored(problem.message)))
    if before is None or (before.reason, _without_numbers(before.message)) != current:
        draft.emit(problem.reason, problem.message, warning=True)


def _without_numbers(text: str) -> str:
    """Return the text without its numbers.

    Which pod is rejected first, and how much of a quota others use, differs from pass to pass.
    """
    return re.sub(r"\d+", "", text)


def refused_pods(view: AttemptView) -> list[PodView]:
    """Return the pods that the scheduler found no node for, not even by preemption; pods behind a gate are
    excluded."""
    return [pod for pod in view.present if pod.refused_seen_at is not None and not pod.ended]


def refused_at(view: AttemptView) -> datetime | None:
    """Return the time from which the lack of a node for some worker is settled; None while no pod is
    rejected."""
    since = min((pod.refused_seen_at for pod in refused_pods(view) if pod.refused_seen_at), default=None)
    return None if since is None else since + UNSCHEDULED_SETTLE


def placeable(view: AttemptView) -> int:
    """Return the number of workers that have a node or may still get one.

    Workers that are not created yet are included: it is not the scheduler that prevents them. If the
    scheduler rejects all pods, it does not say how many it would place, so sizes are tried one by one.
    """

    def may_be(worker: Worker) -> bool:
        if worker.pod is None:
            return worker.state is WorkerState.ABSENT
        return worker.pod.refused_seen_at is None

    return sum(1 for worker in view.workers if may_be(worker)) or len(view.workers) - 1


def starts_late(draft: Draft, pod: PodView) -> str | None:
    """Return what the pod is waiting for if it takes too long; None otherwise."""
    due = _stage_due(pod)
    if due is None or draft.now < due or pod.bound_at is None or pod.stage is Stage.INITIALIZING:
        return None
    since = f"since {pod.bound_at:%H:%M:%S} UTC the kubelet of node {pod.node}"
    if pod.stage is Stage.PULLING:
        return f"{since} has not started its containers: it may still pull an image"
    needs = f"; it needs {pod.needs}: does each exist in the namespace?" if pod.needs else ""
    return f"{since} has not set up its volumes or its network{needs}"


def runs_before(pod: PodView) -> str | None:
    """Return which init container runs; None without one."""
    return f"init container {pod.needs} runs" if pod.stage is Stage.INITIALIZING else None


def runs_long(draft: Draft, pod: PodView) -> str | None:
    """Return the init container that has run for minutes, and what it may wait for; None without one."""
    due, before = _stage_due(pod), runs_before(pod)
    if before is None or due is None or draft.now < due:
        return None
    since = f"{before}, and the pod has had its node since {pod.bound_at:%H:%M:%S} UTC"
    return f"{since}. If it waits for the network: {attempt_checks.egress_way_out(draft)}"


def report_slow_start(draft: Draft, view: AttemptView) -> None:
    """Emit one event when a start begins to hang, or if a container cannot be started."""
    pods = view.pods(WorkerState.PENDING)
    for pod in pods:
        due = _stage_due(pod)
        if due is not None and due > draft.now:
            draft.wake(due)
    report_first(draft, pods, Reason.CONTAINER_WAITING, lambda pod: pod.waiting)
    report_first(draft, pods, Reason.POD_NOT_STARTING, lambda pod: starts_late(draft, pod))
    report_first(draft, pods, Reason.INIT_CONTAINER_RUNS, lambda pod: runs_long(draft, pod), warning=False)


def _stage_due(pod: PodView) -> datetime | None:
    patience = STAGE_PATIENCE.get(pod.stage) if pod.stage is not None else None
    return pod.bound_at + patience if patience is not None and pod.bound_at is not None else None


def report_first(
    draft: Draft,
    pods: list[PodView],
    reason: Reason,
    text: Callable[[PodView], str | None],
    *,
    warning: bool = True,
) -> None:
    before = {item.type: item for item in draft.job.status.conditions}.get(str(ConditionType.RECONCILING))
    if before is not None and before.reason == reason:
        return  # an event was emitted when it began
    pod = min((pod for pod in pods if text(pod)), key=lambda pod: pod.index, default=None)
    if pod is not None:
        place = f"worker {pod.index} (pod {pod.name})"
        draft.emit(reason, f"attempt {pod.attempt}: {place}: {text(pod)}", warning=warning)


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
    if not draft.is_due(began + timedelta(seconds=limit_s)):
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
    message = starts_late(draft, pod) or runs_before(pod)
    return message or "its image, volumes or init containers are not ready"
