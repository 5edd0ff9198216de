"""Pulls progress from the workers: rank 0's pod of every running job, all pods where the step went stale.

The operator asks and the workers never call it: they need no credentials, and a flood of ranks cannot reach
the operator. The interval grows with the number of jobs, so that the budget stays bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zerotrain.contract.progress import Progress
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.channel import ChannelError, Worker, WorkerChannel
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.memory import Memories
from zerotrain.operator.cluster.store import JobKey, PodStore, owner_key
from zerotrain.operator.reconcile import PodView

log = logging.getLogger(__name__)

ASKED_PHASES = frozenset({"Starting", "Running", "Suspending", "Yielding"})
TICK_S = 0.5
MIN_INTERVAL_S = 2.0
CALLS_PER_SECOND = 25.0
"""Budget over all jobs: beyond 50 running jobs each is asked less often."""

STALE_MIN_S = 60.0
STALE_FACTOR = 20.0
"""Stale after so many step times, but never before STALE_MIN_S."""

STALE_INTERVAL_S = 15.0


@dataclass(slots=True)
class _Poll:
    """What is known of the polling of one job."""

    due: float = 0.0
    all_due: float = 0.0
    moved_at: float = 0.0
    seen: tuple[int, int, str] = (0, 0, "")


class ProgressPuller:
    """`run()` until cancelled; `changed` is called when a record says something new."""

    def __init__(
        self,
        *,
        jobs: JobCache,
        store: PodStore,
        memories: Memories,
        channel: WorkerChannel,
        changed: Callable[[JobKey], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs, self._store, self._memories = jobs, store, memories
        self._channel, self._changed, self._clock = channel, changed, clock
        self._polls: dict[str, _Poll] = {}

    async def run(self) -> None:
        """Ask whoever is due, twice a second; one that does not answer holds up nobody."""
        pending: set[asyncio.Task[None]] = set()
        while True:
            pending |= self.start_due()
            await asyncio.sleep(TICK_S)
            pending = {task for task in pending if not task.done()}

    def start_due(self) -> set[asyncio.Task[None]]:
        """One question to every job whose turn it is."""
        running = [(key, job) for key, job in self._jobs if _phase(job) in ASKED_PHASES]
        self._forget({job["metadata"]["uid"] for _, job in running})
        interval, now = max(MIN_INTERVAL_S, len(running) / CALLS_PER_SECOND), self._clock()
        started = set()
        for key, job in running:
            poll = self._polls.setdefault(job["metadata"]["uid"], _Poll(moved_at=now))
            if poll.due <= now:
                poll.due = now + interval
                started.add(asyncio.create_task(self._pull(key, job, poll)))
        return started

    async def _pull(self, key: JobKey, job: Json, poll: _Poll) -> None:
        uid, attempt = job["metadata"]["uid"], int(job["status"].get("attempt", 0))
        pods = {pod.index: pod for pod in self._live(key.namespace, uid, attempt)}
        if 0 not in pods:
            return
        report = await self._report(key, pods[0], uid, attempt)
        if self._jobs.get(key) is None:
            return  # deleted meanwhile: nothing must be remembered of it
        if report is not None and report.ranks:
            self._take(key, uid, report.ranks[0], poll)
        await self._look_for_laggard(key, uid, attempt, pods.values(), poll)

    def _take(self, key: JobKey, uid: str, progress: Progress, poll: _Poll) -> None:
        memory = self._memories.of(uid)
        memory.progress = progress
        seen = (progress.attempt, progress.step, str(progress.phase))
        now = self._clock()
        if seen != poll.seen:
            poll.seen, poll.moved_at, memory.laggard = seen, now, None
        # A pass decides what is worth a write; durable checkpoints and damaged ones come with unmoved steps.
        self._changed(key)

    async def _look_for_laggard(
        self, key: JobKey, uid: str, attempt: int, pods: Iterable[PodView], poll: _Poll
    ) -> None:
        """Once the step is stale, ask every pod and remember the rank that is furthest behind."""
        memory, now = self._memories.of(uid), self._clock()
        usual = memory.progress.step_seconds if memory.progress is not None else None
        stale_s = max(STALE_MIN_S, STALE_FACTOR * (usual or 0.0))
        if poll.seen[1] == 0 or now - poll.moved_at < stale_s or now < poll.all_due:
            return
        poll.all_due = now + STALE_INTERVAL_S
        reports = await asyncio.gather(*(self._report(key, pod, uid, attempt) for pod in pods))
        slowest = [report.slowest for report in reports if report is not None]
        known = [rank for rank in slowest if rank is not None]
        memory.laggard = min(known, key=lambda rank: (rank.step, rank.heartbeat_at), default=None)
        self._changed(key)

    async def _report(self, key: JobKey, pod: PodView, uid: str, attempt: int) -> WorkerReport | None:
        try:
            report = await self._channel.report(Worker(namespace=key.namespace, pod=pod.name, ip=pod.pod_ip))
        except ChannelError as error:
            log.debug("progress: %s", error)
            return None
        # An address may be another pod's by now.
        return report if report.job_uid == uid and report.attempt == attempt else None

    def _live(self, namespace: str, uid: str, attempt: int) -> Iterable[PodView]:
        present, _ = self._store.of_job(owner_key(namespace, uid))
        return [pod for pod in present if pod.attempt == attempt and pod.started and not pod.ended]

    def _forget(self, running: set[str]) -> None:
        self._polls = {uid: poll for uid, poll in self._polls.items() if uid in running}


def _phase(job: Json) -> str:
    return str(job.get("status", {}).get("phase", ""))
