"""The workers of one attempt, each with its state, and the worker that ended the attempt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.progress import RankEnd
from zerotrain.operator.api import RestartCause
from zerotrain.operator.constants import Reason
from zerotrain.operator.failure_policy import (
    ABORTED,
    ABOUT_FILES,
    BY_KUBELET,
    Evidence,
    FailureClass,
    blames_a_peer,
    classify,
)
from zerotrain.operator.reconcile.nodes import Loss
from zerotrain.operator.reconcile.observe import Observed
from zerotrain.operator.reconcile.pods import PodView, WorkerState

LIVE = frozenset({WorkerState.PENDING, WorkerState.RUNNING, WorkerState.TERMINATING})
OVER = frozenset(
    {WorkerState.SUCCEEDED, WorkerState.YIELDED, WorkerState.STOPPED, WorkerState.FAILED, WorkerState.LOST}
)

MAX_CLOCK_LAG = timedelta(minutes=1)
"""Largest lag of a node's clock behind the API server's clock, which dates deletions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One worker of the attempt."""

    index: int
    state: WorkerState
    pod: PodView | None = None
    loss: Loss | None = None
    """The loss of its node, if the worker was lost with it."""


NO_WORKER = Worker(index=0, state=WorkerState.RUNNING)
"""Placeholder for the failed worker if no worker is to blame."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The worker whose end explains the end of the attempt, and the meaning of that end."""

    worker: Worker
    failure_class: FailureClass
    rank: int | None = None
    """Rank to blame; None leaves it to the pod's termination message."""
    message: str = ""
    """Description of the failure, if the pod cannot give one because its program still runs."""
    stacks: str = ""
    """Name of the ConfigMap with the stacks of the ranks."""
    blames_worker: bool = True
    """Whether the worker is to blame; False if the attempt hangs and no rank stands out."""
    others: tuple[Failure, ...] = ()
    """Further workers that are to blame for the same failure."""
    code: int | None = None
    """Exit code of the ranks that waited for the worker, if its own program has none."""
    due: datetime | None = None
    """Time until which more may be learned, such as the stacks of a program that still runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptView:
    """All workers of one attempt, by index."""

    number: int
    workers: tuple[Worker, ...]
    present: tuple[PodView, ...]
    """Pods of this attempt that exist as objects, including ended ones."""

    def indices(self, *states: WorkerState) -> tuple[int, ...]:
        return tuple(worker.index for worker in self.workers if worker.state in states)

    def count(self, *states: WorkerState) -> int:
        return sum(1 for worker in self.workers if worker.state in states)

    def pods(self, *states: WorkerState) -> list[PodView]:
        """Return the pods of the workers in these states, including those that are gone."""
        return [worker.pod for worker in self.workers if worker.state in states and worker.pod is not None]

    def all_in(self, states: frozenset[WorkerState]) -> bool:
        return all(worker.state in states for worker in self.workers)


def view_attempt(
    number: int,
    workers: int,
    observed: Observed,
    *,
    created: bool,
    stuck_before: datetime,
    losses: Mapping[str, Loss],
    own_program: bool,
) -> AttemptView:
    """Return the workers of attempt `number`; pods of other attempts are ignored.

    `created` says that every worker of the attempt existed once, so that a missing one is lost. A pod whose
    deletion should have ended before `stuck_before` is also lost, because its node does not answer. So is a
    pod on a node in `losses`. `own_program` says that the ranks run a user program, whose exit code 0 may be
    an answer to SIGTERM.
    """
    present = {pod.index: pod for pod in observed.pods if pod.attempt == number and pod.index < workers}
    gone = {pod.index: pod for pod in observed.gone if pod.attempt == number and pod.index < workers}
    found = (
        _on_its_node(_worker(index, present.get(index), gone.get(index), created, stuck_before), losses)
        for index in range(workers)
    )
    return AttemptView(
        number=number,
        workers=tuple(_as_stopped(worker) for worker in found) if own_program else tuple(found),
        present=tuple(present.values()),
    )


def _worker(
    index: int, present: PodView | None, gone: PodView | None, created: bool, stuck_before: datetime
) -> Worker:
    if present is not None:
        state = present.state
        if (
            state is WorkerState.TERMINATING
            and present.deletion_at is not None
            and present.deletion_at < stuck_before
        ):
            state = WorkerState.LOST
        return Worker(index=index, state=state, pod=present)
    if gone is not None:
        return Worker(index=index, state=gone.state if gone.ended else WorkerState.LOST, pod=gone)
    return Worker(index=index, state=WorkerState.LOST if created else WorkerState.ABSENT)


def _on_its_node(worker: Worker, losses: Mapping[str, Loss]) -> Worker:
    """Return the worker as lost if its node is lost and its end is not known otherwise."""
    loss = losses.get(worker.pod.node or "") if losses and worker.pod is not None else None
    if loss is not None and worker.state is WorkerState.FAILED and worker.pod is not None:
        # Its files may have disappeared before the node did.
        return replace(worker, loss=loss) if worker.pod.worker_code in ABOUT_FILES else worker
    if loss is None or (worker.state not in LIVE and worker.state is not WorkerState.LOST):
        return worker
    return replace(worker, state=WorkerState.LOST, loss=loss)


def _as_stopped(worker: Worker) -> Worker:
    """Return the worker of a user program as stopped if its exit code 0 may be an answer to SIGTERM."""
    if worker.state is WorkerState.SUCCEEDED and worker.pod is not None and _was_asked_to_stop(worker.pod):
        return replace(worker, state=WorkerState.STOPPED)
    return worker


def _was_asked_to_stop(pod: PodView) -> bool:
    """Return whether the pod was told to stop, by any client, before its program ended.

    In doubt the answer is True: a program that had finished ends with 0 once more, but a job that was
    declared complete does not continue.
    """
    if pod.disruption == BY_KUBELET or (pod.pod_reason and pod.phase == "Failed"):
        return True  # the kubelet deletes no pod: a deletion came later, and from another client
    if pod.deletion_at is None or pod.finished_at is None:
        return bool(pod.deletion_at or pod.disruption)
    asked = pod.deletion_at - timedelta(seconds=pod.deletion_grace_s or 0)
    # Users delete pods that have just ended, which says nothing about their end. A disruption affects only
    # pods that are left, as a drain evicts all pods of a node.
    return pod.finished_at >= (asked - MAX_CLOCK_LAG if pod.disruption else asked)


def strays(attempt: int, workers: int, observed: Observed) -> Mapping[int, tuple[PodView, ...]]:
    """Return the leftover pods by attempt: pods of earlier attempts, and indices that this attempt does not
    have.

    Pods of a *later* attempt are no leftovers: they mean that our view of the job is outdated.
    """
    found: dict[int, tuple[PodView, ...]] = {}
    for pod in observed.pods:
        if pod.attempt < attempt or (pod.attempt == attempt and pod.index >= workers):
            found[pod.attempt] = (*found.get(pod.attempt, ()), pod)
    return found


def first_failure(view: AttemptView) -> Failure | None:
    """Return the surest first cause among the failed and lost workers; None if none failed."""
    return min(failures_of(view), key=cause_order, default=None)


def failures_of(view: AttemptView) -> list[Failure]:
    """Return the failures of all failed and lost workers, by index.

    If some worker yielded, its checkpoint is durable for all ranks. A peer that was lost or terminated
    meanwhile is then part of that end and no failure.
    """
    yielded = view.count(WorkerState.YIELDED) > 0
    failures = []
    for worker in view.workers:
        if worker.state in (WorkerState.FAILED, WorkerState.LOST):
            failure_class = failure_class_of(worker)
            echo = failure_class.evidence is Evidence.ECHO or worker.state is WorkerState.LOST
            if not (yielded and echo):
                failures.append(Failure(worker=worker, failure_class=failure_class))
    return failures


YIELDED = FailureClass(
    cause=RestartCause.PREEMPTION,
    reason=Reason.YIELDED,
    evidence=Evidence.SELF_INFLICTED,
)
MOVED = replace(YIELDED, reason=Reason.DRAINING)


def failure_class_of(worker: Worker, other: RankEnd | None = None) -> FailureClass:
    """Return the class of the worker's end, or of the end of another of its ranks than the one that ended
    its pod."""
    pod = worker.pod
    if pod is None:
        return classify(None, deleted=True)
    lost = worker.state is WorkerState.LOST
    exit_code, exit_reason = None if lost else pod.exit_code, pod.exit_reason
    exception = pod.termination.exception if pod.termination is not None else None
    if other is not None:
        exit_code, exception = other.code, other.reason or None
        exit_reason = exit_reason if other.code == ExitCode.KILLED else None
    return classify(
        exit_code,
        exit_reason=exit_reason,
        pod_reason=pod.pod_reason,
        disruption=pod.disruption,
        exception=exception,
        node_lost=worker.loss is not None,
        by_init_container=not lost and pod.failed_container is not None,
        deleted=lost or pod.deletion_at is not None,
    )


def cause_order(failure: Failure) -> tuple[int, bool, float, int]:
    """Return the sort key of a failure; the one that explains the others comes first."""
    pod = failure.worker.pod
    # Container runtimes report whole seconds, each by its own clock, and a consequence follows within
    # milliseconds. So a worker that reports the loss of a peer comes after one that does not. The index makes
    # the choice repeatable.
    ended = pod.finished_at.timestamp() if pod is not None and pod.finished_at else math.inf
    return failure.failure_class.evidence, _blames_a_peer(failure), ended, failure.worker.index


def is_echo(failure: Failure) -> bool:
    """Return whether the worker ended like one that lost a peer, whose own end is then still to come."""
    pod = failure.worker.pod
    aborted = pod is not None and pod.worker_code == ABORTED
    echo = aborted or failure.failure_class.evidence is Evidence.ECHO or _blames_a_peer(failure)
    return echo and failure.failure_class.evidence >= Evidence.UNCLEAR


def _blames_a_peer(failure: Failure) -> bool:
    pod = failure.worker.pod
    return pod is not None and pod.termination is not None and blames_a_peer(pod.termination.exception)
