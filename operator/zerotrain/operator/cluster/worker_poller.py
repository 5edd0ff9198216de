"""Calls to many workers of one job that leave slots for the other jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster.channel import (
    CallKind,
    ChannelError,
    NotAsked,
    Worker,
    WorkerChannel,
    share_of,
)
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.reconcile import PodView

log = logging.getLogger(__name__)

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
class WorkerPoller:
    """Client that requests the reports of the workers of one attempt."""

    channel: WorkerChannel
    key: JobKey
    uid: str
    attempt: int

    async def report(self, pod: PodView, kind: CallKind) -> Answer:
        """Return the worker's report, or the ChannelError that says why there is none. Never raises it."""
        worker = Worker(
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
        """Return the reports of all workers, until one call gets no slot."""

        async def ask(index: K) -> Answer:
            return await self.report(pods[index], kind)

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


def timed_out(answer: Answer | None) -> bool:
    """Return whether the call held its slot for the whole timeout."""
    return isinstance(answer, ChannelError) and answer.timed_out


def any_not_asked(answers: Collection[Answer]) -> bool:
    """Return whether a worker was not called. It may be the one that moves: the others must not be judged."""
    return any(isinstance(answer, NotAsked) for answer in answers)


def none_reachable(answers: Collection[Answer]) -> bool:
    """Return whether no worker answered and a call timed out. A refused connection costs nothing."""
    return not any(isinstance(answer, WorkerReport) for answer in answers) and any(map(timed_out, answers))
