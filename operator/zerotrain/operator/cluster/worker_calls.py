"""Calls to many workers of one job that leave slots for the other jobs.

Calls to workers on nodes that are not ready have slots and a budget of their own: the silence of their
kubelet says nothing of the ranks, and silence counts against a node only as far as its workers were called.
Where dead nodes of other jobs take all of these, the nodes that were not called are remembered.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster.channel import (
    CallKind,
    ChannelError,
    NotAsked,
    WorkerAddress,
    WorkerChannel,
    share_of,
)
from zerotrain.operator.cluster.job_state import JobState, JobStates
from zerotrain.operator.cluster.limits import InspectionBuckets
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.reconcile import PodView

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Seconds between two calls to the workers of a node that is not ready."""

CALLS_PER_SECOND = 100.0
"""Budget of calls: of thousands of nodes, each must be called well within the time after which a silent one
counts as lost."""

MISSED_S = 30.0
"""Seconds since the last call of a node after which a call that is not made leaves a gap, in which the worker
might have answered."""

K = TypeVar("K")
V = TypeVar("V")
Answer = WorkerReport | ChannelError


async def call_concurrently(
    ask: Callable[[K], Awaitable[V]],
    asked: Iterable[K],
    *,
    most: int,
    enough: Callable[[V], bool] = lambda answer: False,
) -> dict[K, V]:
    """Call `ask` on each of `asked`, at most `most` at once, and return the answers. After an answer that is
    `enough`, no further calls begin. `ask` must not raise: the other calls would be left running."""
    waiting, answers, over = iter(asked), dict[K, V](), asyncio.Event()

    async def go_on() -> None:
        for one in waiting:
            answers[one] = await ask(one)
            if enough(answers[one]):
                over.set()
            if over.is_set():
                return

    await asyncio.gather(*(go_on() for _ in range(most)))
    return answers


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCalls:
    """Calls to the workers of one attempt for their reports."""

    channel: WorkerChannel
    key: JobKey
    uid: str
    attempt: int

    async def report(self, pod: PodView, kind: CallKind) -> Answer:
        """Return the worker's report, or the ChannelError that says why there is none. Never raises it."""
        worker = WorkerAddress(
            namespace=self.key.namespace,
            pod=pod.name,
            ip=pod.pod_ip,
            call_kind=kind,
            job_uid=self.uid,
            attempt=self.attempt,
        )
        try:
            report = await self.channel.report(worker)
        except ChannelError as error:
            log.debug("progress: %s", error)
            return error
        # The address may belong to another pod by now.
        if report.job_uid == self.uid and report.attempt == self.attempt:
            return report
        return ChannelError(f"{pod.name}: the answer comes from another attempt")

    async def reports(self, pods: Mapping[K, PodView], kind: CallKind) -> dict[K, Answer]:
        """Return the reports of all workers, without their texts, until one call gets no slot."""

        async def ask(index: K) -> Answer:
            return _without_texts(await self.report(pods[index], kind))

        return await call_concurrently(
            ask, pods, most=share_of(kind), enough=lambda answer: isinstance(answer, NotAsked)
        )

    async def inspection_reports(
        self, pods: Mapping[int, PodView], kind: CallKind, *, sample_round: int
    ) -> dict[int, Answer]:
        """Return the reports of all workers, or of a sample in `kind` if that cannot be reached: a thousand
        workers whose calls time out would hold slots for minutes, inspection after inspection. Each
        `sample_round` has another sample."""
        step = -(-len(pods) // share_of(kind))
        first = dict(list(pods.items())[sample_round % step :: step])
        answers = await self.reports(first, kind)
        if none_reachable(answers.values()) or any_not_asked(answers.values()):
            return answers
        others = {index: pod for index, pod in pods.items() if index not in answers}
        return answers | await self.reports(others, CallKind.INSPECT)


def _without_texts(answer: Answer) -> Answer:
    """Return the answer without the texts in it, which may have a megabyte: an inspection keeps the answers
    of thousands of workers until the last one has answered."""
    if isinstance(answer, ChannelError):
        return answer
    ranks = tuple(
        replace(rank, checkpoint=None, rejected_checkpoints=(), resumed_job=None) for rank in answer.ranks
    )
    return replace(answer, job="", job_uid="", ranks=ranks)


def timed_out(answer: Answer | None) -> bool:
    """Return whether the call held its slot for the whole timeout."""
    return isinstance(answer, ChannelError) and answer.timed_out


def any_not_asked(answers: Collection[Answer]) -> bool:
    """Return whether a worker was not called. It may be the one that moves: the others must not be judged."""
    return any(isinstance(answer, NotAsked) for answer in answers)


def none_reachable(answers: Collection[Answer]) -> bool:
    """Return whether no worker answered and a call timed out. A refused connection costs nothing."""
    return not any(isinstance(answer, WorkerReport) for answer in answers) and any(map(timed_out, answers))


@dataclass(slots=True)
class _Schedule:
    """Schedule of one job."""

    due: float = 0.0
    asked_at: dict[str, float] = field(default_factory=dict)
    """Time at which the last call ended, by the name of a node that is not ready."""


class NodeProber:
    """Caller that maintains `JobState.responded_at` and `.unasked`. `changed` is called when a node in
    `unasked` was called."""

    def __init__(
        self,
        *,
        job_states: JobStates,
        channel: WorkerChannel,
        changed: Callable[[JobKey], None],
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        self._job_states, self._channel, self._changed = job_states, channel, changed
        self._now, self._clock = now, clock
        self._schedules: dict[str, _Schedule] = {}
        self._budgets = InspectionBuckets(CALLS_PER_SECOND, clock)

    def forget_others(self, uids: Collection[str]) -> None:
        """Forget all jobs but these."""
        self._schedules = {uid: schedule for uid, schedule in self._schedules.items() if uid in uids}

    def begins(self, uid: str) -> bool:
        """Return whether `probe` is due for the job; the caller must then call it. A job has one round at a
        time."""
        schedule = self._schedules.setdefault(uid, _Schedule())
        is_due = schedule.due <= self._clock()
        if is_due:
            schedule.due = math.inf
        return is_due

    async def probe(self, key: JobKey, uid: str, attempt: int, pods: Iterable[PodView]) -> None:
        """Call one of the job's `pods` on each node that is not ready."""
        began, schedule = self._clock(), self._schedules.setdefault(uid, _Schedule())
        running = [pod for pod in pods if pod.started and not pod.ended]
        troubled = self._job_states.nodes.of(running)
        nodes = {name for name, view in troubled.items() if not view.ready and not view.gone}
        silent = {pod.node: pod for pod in running if pod.node is not None and pod.node in nodes}
        try:
            if silent:
                calls = WorkerCalls(channel=self._channel, key=key, uid=uid, attempt=attempt)
                await self._ask(calls, silent, schedule)
        finally:
            schedule.due = began + INTERVAL_S

    async def _ask(self, calls: WorkerCalls, silent: Mapping[str, PodView], schedule: _Schedule) -> None:
        # If the job is deleted meanwhile, `job_state` is no longer part of the states, and nothing is
        # remembered.
        job_state = self._job_states.of(calls.uid)
        job_state.unasked &= silent.keys()
        schedule.asked_at = {node: at for node, at in schedule.asked_at.items() if node in silent}
        if not self._budgets.of(len(silent)).try_take(len(silent)):
            for node in silent:
                self._miss(job_state, schedule, node)
            return

        async def ask(node: str) -> None:
            answer = await calls.report(silent[node], CallKind.PROBE)
            if isinstance(answer, NotAsked):
                self._miss(job_state, schedule, node)
                return
            schedule.asked_at[node] = self._clock()
            # Recorded at once: the calls to the others may take long to time out.
            if isinstance(answer, WorkerReport):
                job_state.responded_at[node] = self._now()
            if node in job_state.unasked:
                job_state.unasked.discard(node)
                self._changed(calls.key)  # the time at which the node counts as lost has changed

        living_first = sorted(silent, key=lambda node: node not in job_state.responded_at)
        await call_concurrently(ask, living_first, most=share_of(CallKind.PROBE))

    def _miss(self, job_state: JobState, schedule: _Schedule, node: str) -> None:
        if self._clock() - schedule.asked_at.get(node, -math.inf) >= MISSED_S:
            job_state.unasked.add(node)
