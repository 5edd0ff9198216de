"""Pulling progress: who is asked and how often, whose answer counts, who is named when nothing moves."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from tests.operator.api_double import Json, pod_json
from zerotrain.contract.progress import Phase, Progress
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster.channel import ChannelError, Worker
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.memory import Memories
from zerotrain.operator.cluster.progress import CALLS_PER_SECOND, MIN_INTERVAL_S, STALE_MIN_S, ProgressPuller
from zerotrain.operator.cluster.store import JobKey, PodStore

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RUNNING = [{"name": "worker", "state": {"running": {}}}]


class Workers:
    """Answers for every pod by its name."""

    def __init__(self, steps: dict[str, int]) -> None:
        self.steps = steps
        self.asked: list[str] = []
        self.uid, self.attempt = "job-uid", 1

    async def report(self, worker: Worker) -> WorkerReport:
        self.asked.append(worker.pod)
        if worker.pod not in self.steps:
            raise ChannelError("no answer")
        index = int(worker.pod.rsplit("-", 1)[-1])
        rank = Progress(rank=index, attempt=self.attempt, step=self.steps[worker.pod], phase=Phase.STEP)
        return WorkerReport(
            job="gpt", job_uid=self.uid, attempt=self.attempt, node_rank=index, world_size=2, ranks=(rank,)
        )

    async def request_yield(self, worker: Worker, *, attempt: int, token: str) -> None:
        raise ChannelError("not asked here")


class Bench:
    """A puller with its surroundings and a clock that the test moves."""

    def __init__(self, workers: Workers, *, phase: str = "Running", jobs: int = 1) -> None:
        self.workers, self.now = workers, 1000.0
        self.changed: list[JobKey] = []
        self.memories, self.store = Memories(), PodStore()
        cache = JobCache()
        for number in range(jobs):
            uid, name = ("job-uid", "gpt") if number == 0 else (f"uid-{number}", f"gpt{number}")
            cache.put(stored(name, uid, phase))
        for index in (0, 1):
            self.store.put(pod_json(index, version=1, phase="Running", containerStatuses=RUNNING), now=NOW)
        self.puller = ProgressPuller(
            jobs=cache,
            store=self.store,
            memories=self.memories,
            channel=workers,
            changed=self.changed.append,
            clock=lambda: self.now,
        )

    async def after(self, seconds: float) -> list[str]:
        """Let time pass; the pods that are asked then."""
        self.now += seconds
        self.workers.asked.clear()
        await asyncio.gather(*self.puller.start_due())
        return sorted(self.workers.asked)

    @property
    def memory(self) -> Any:
        return self.memories.of("job-uid")


def stored(name: str, uid: str, phase: str) -> Json:
    meta = {"name": name, "namespace": "ml", "uid": uid, "resourceVersion": "1"}
    return {"metadata": meta, "status": {"phase": phase, "attempt": 1}}


async def test_rank_0_alone_is_asked_and_the_job_gets_a_pass() -> None:
    bench = Bench(Workers({"gpt-1-0": 7, "gpt-1-1": 7}))
    assert await bench.after(0) == ["gpt-1-0"]
    assert bench.memory.progress.step == 7
    assert bench.changed == [JobKey("ml", "gpt")]


async def test_not_again_before_the_interval_is_over() -> None:
    bench = Bench(Workers({"gpt-1-0": 7}))
    await bench.after(0)
    assert await bench.after(MIN_INTERVAL_S / 2) == []
    assert await bench.after(MIN_INTERVAL_S / 2) == ["gpt-1-0"]


async def test_many_jobs_share_the_budget() -> None:
    bench = Bench(Workers({"gpt-1-0": 7}), jobs=200)
    await bench.after(0)
    assert await bench.after(200 / CALLS_PER_SECOND - 1) == []
    assert await bench.after(1) == ["gpt-1-0"]


async def test_a_suspended_job_is_not_asked() -> None:
    assert await Bench(Workers({}), phase="Suspended").after(0) == []


async def test_an_answer_of_another_attempt_or_job_does_not_count() -> None:
    workers = Workers({"gpt-1-0": 7})
    workers.attempt = 2
    bench = Bench(workers)
    await bench.after(0)
    assert bench.memory.progress is None
    workers.attempt, workers.uid = 1, "another-job"
    await bench.after(MIN_INTERVAL_S)
    assert bench.memory.progress is None
    assert bench.changed == []


async def test_a_step_that_does_not_move_makes_all_pods_be_asked_and_the_last_rank_be_named() -> None:
    workers = Workers({"gpt-1-0": 7, "gpt-1-1": 6})
    bench = Bench(workers)
    await bench.after(0)
    assert await bench.after(STALE_MIN_S) == ["gpt-1-0", "gpt-1-0", "gpt-1-1"]
    assert bench.memory.laggard.rank == 1
    assert await bench.after(MIN_INTERVAL_S) == ["gpt-1-0"], "all pods only now and then"
    workers.steps["gpt-1-0"] = 8
    await bench.after(MIN_INTERVAL_S)
    assert bench.memory.laggard is None
