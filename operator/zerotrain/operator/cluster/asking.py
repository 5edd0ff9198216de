"""Asking many workers of one job without taking all slots from the other jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster.channel import (
    ChannelError,
    Lane,
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


async def in_turn(
    ask: Callable[[K], Awaitable[V]],
    asked: Iterable[K],
    *,
    most: int,
    enough: Callable[[V], bool] = lambda answer: False,
) -> dict[K, V]:
    """What each answered, at most so many asked at once; after an answer that is `enough` nobody else is
    asked. `ask` must not raise: the others would be left behind.
    """
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
class Asker:
    """Asks the workers of one attempt for their reports."""

    channel: WorkerChannel
    key: JobKey
    uid: str
    attempt: int

    async def report(self, pod: PodView, lane: Lane) -> Answer:
        """Never raises: why there is no report is the answer then."""
        worker = Worker(
            namespace=self.key.namespace,
            pod=pod.name,
            ip=pod.pod_ip,
            lane=lane,
            job_uid=self.uid,
            attempt=self.attempt,
        )
        try:
            report = await self.channel.report(worker)
        except ChannelError as error:
            log.debug("progress: %s", error)
            return error
        # An address may be another pod's by now.
        if report.job_uid == self.uid and report.attempt == self.attempt:
            return report
        return ChannelError(f"{pod.name}: the answer is another attempt's")

    async def reports(self, pods: Mapping[K, PodView], lane: Lane) -> dict[K, Answer]:
        """Of all, until one gets no slot."""

        async def ask(index: K) -> Answer:
            return await self.report(pods[index], lane)

        return await in_turn(
            ask, pods, most=share_of(lane), enough=lambda answer: isinstance(answer, NotAsked)
        )

    async def look(self, pods: Mapping[int, PodView], lane: Lane, *, turn: int) -> dict[int, Answer]:
        """Of all as well, but of a few alone, in `lane`, where these cannot be reached: a thousand workers
        that let calls time out would hold slots for minutes, look after look. Each turn has other ones.
        """
        step = -(-len(pods) // share_of(lane))
        first = dict(list(pods.items())[turn % step :: step])
        answers = await self.reports(first, lane)
        if is_vain(answers.values()) or lacks_one(answers.values()):
            return answers
        others = {index: pod for index, pod in pods.items() if index not in answers}
        return answers | await self.reports(others, Lane.LOOK)


def timed_out(answer: Answer | None) -> bool:
    """Whether it cost a slot for all the time that there is."""
    return isinstance(answer, ChannelError) and answer.timed_out


def lacks_one(answers: Collection[Answer]) -> bool:
    """Whether somebody was not asked. That may be the one that moves: the others must not be judged."""
    return any(isinstance(answer, NotAsked) for answer in answers)


def is_vain(answers: Collection[Answer]) -> bool:
    """Whether nobody answered and it took long to find out. A refused connection costs nothing."""
    return not any(isinstance(answer, WorkerReport) for answer in answers) and any(map(timed_out, answers))
