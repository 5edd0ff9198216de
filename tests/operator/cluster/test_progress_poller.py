"""Polling of progress: which workers are polled and how often, whose answer counts, and which ranks are
named.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.operator.api_double import Json, pod_json
from zerotrain.contract.progress import CheckpointProgress, Motion, Phase, Progress, Straggler
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster import worker_calls
from zerotrain.operator.cluster.channel import ChannelError, WorkerAddress
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.progress_poller import (
    ALARM_INTERVAL_S,
    CALLS_PER_SECOND,
    INSPECTION_CALLS_PER_SECOND,
    INSPECTION_INTERVAL_S,
    MIN_INTERVAL_S,
    PASS_INTERVAL_S,
    SILENT_S,
    ProgressPoller,
)
from zerotrain.operator.cluster.store import JobKey, PodStore

pytestmark = pytest.mark.unit


NOW = datetime(2026, 1, 1, tzinfo=UTC)
RUNNING = [{"name": "worker", "state": {"running": {}}}]


class Workers:
    """Channel that answers for every pod by its name."""

    def __init__(self, steps: dict[str, int]) -> None:
        self.steps = steps
        self.asked: list[str] = []
        self.uid, self.attempt = "job-uid", 1
        self.idle_s = 1.0
        """Seconds since any step moved."""
        self.phases: dict[str, Phase] = {}
        """Phase by pod, for those that are in no step."""
        self.empty = False
        """Whether the launchers answer without any rank."""
        self.checkpoint: CheckpointProgress | None = None
        self.straggler: Straggler | None = None

    async def report(self, worker: WorkerAddress) -> WorkerReport:
        self.asked.append(worker.pod)
        if worker.pod not in self.steps:
            raise ChannelError("no answer")
        index = int(worker.pod.rsplit("-", 1)[-1])
        rank = Progress(
            rank=index,
            attempt=self.attempt,
            step=self.steps[worker.pod],
            phase=self.phases.get(worker.pod, Phase.STEP),
            checkpoint=self.checkpoint,
            straggler=self.straggler,
            motion=Motion(idle_seconds=self.idle_s, silent_seconds=1.0, steps_seen=100),
        )
        return WorkerReport(
            job="gpt",
            job_uid=self.uid,
            attempt=self.attempt,
            node_rank=index,
            world_size=2,
            ranks=() if self.empty else (rank,),
        )

    async def request_yield(self, worker: WorkerAddress, *, attempt: int, token: str) -> None:
        raise ChannelError("not asked here")

    async def stacks(self, worker: WorkerAddress, *, token: str) -> str:
        raise ChannelError("not asked here")


class Bench:
    """A poller with its surroundings and a clock that the test advances."""

    def __init__(self, workers: Workers, *, phase: str = "Running", jobs: int = 1) -> None:
        self.workers, self.now = workers, 1000.0
        self.changed: list[JobKey] = []
        self.job_states, self.store = JobStates(), PodStore()
        cache = JobCache()
        self.cache = cache
        for number in range(jobs):
            uid, name = ("job-uid", "gpt") if number == 0 else (f"uid-{number}", f"gpt{number}")
            cache.put(stored(name, uid, phase))
        for index in (0, 1):
            self.store.put(pod_json(index, version=1, phase="Running", containerStatuses=RUNNING), now=NOW)
        self.poller = ProgressPoller(
            jobs=cache,
            store=self.store,
            job_states=self.job_states,
            channel=workers,
            changed=self.changed.append,
            now=lambda: NOW,
            clock=lambda: self.now,
        )

    async def after(self, seconds: float) -> list[str]:
        """Advance the time; return the pods that are polled then."""
        self.now += seconds
        self.workers.asked.clear()
        await asyncio.gather(*self.poller.start_due())
        return sorted(self.workers.asked)

    @property
    def slow_rank(self) -> Any:
        return self.job_state.inspection.slow_rank

    @property
    def job_state(self) -> Any:
        return self.job_states.of("job-uid")


def stored(name: str, uid: str, phase: str, *, version: str = "1") -> Json:
    meta = {"name": name, "namespace": "ml", "uid": uid, "resourceVersion": version}
    return {"metadata": meta, "status": {"phase": phase, "attempt": 1}}


async def test_rank_0_alone_is_asked_and_the_job_gets_a_pass() -> None:
    bench = Bench(Workers({"gpt-1-0": 7, "gpt-1-1": 7}))
    assert await bench.after(0) == ["gpt-1-0"]
    assert bench.job_state.progress.step == 7
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
    assert bench.job_state.progress is None
    workers.attempt, workers.uid = 1, "another-job"
    await bench.after(MIN_INTERVAL_S)
    assert bench.job_state.progress is None
    assert bench.changed == []


async def test_a_record_without_news_gets_no_pass_at_once() -> None:
    workers = Workers({"gpt-1-0": 7})
    bench = Bench(workers)
    await bench.after(0)
    for step in (8, 9, 10):
        workers.steps["gpt-1-0"] = step
        await bench.after(MIN_INTERVAL_S)
    assert len(bench.changed) == 1, "a moved step alone"
    assert bench.job_state.progress.step == 10
    workers.checkpoint = CheckpointProgress(step=10, path="/ckpt/10", time=1.0)
    await bench.after(MIN_INTERVAL_S)
    assert len(bench.changed) == 2, "a durable checkpoint"
    await bench.after(PASS_INTERVAL_S)
    assert len(bench.changed) == 3, "the step, now and then"


async def test_a_step_is_timed_by_the_clock_of_the_operator() -> None:
    workers = Workers({"gpt-1-0": 7})
    bench = Bench(workers)
    workers.idle_s = 40.0
    await bench.after(0)
    first = NOW - timedelta(seconds=40)
    assert bench.job_state.step_moved_at == first, "when it moved, not when it was first heard of"
    workers.idle_s = 1.0
    await bench.after(MIN_INTERVAL_S)
    assert bench.job_state.step_moved_at == first, "another phase is no step"
    workers.steps["gpt-1-0"], workers.idle_s = 8, float("nan")
    await bench.after(MIN_INTERVAL_S)
    assert bench.job_state.step_moved_at == NOW


async def test_the_seconds_of_the_slowest_rank_are_no_news_but_a_straggler_is() -> None:
    workers = Workers({"gpt-1-0": 7})
    bench = Bench(workers)
    for rank, own in ((0, 1.01), (1, 1.02), (0, 1.03), (1, 1.0)):
        workers.straggler = Straggler(rank=rank, own_seconds=own, median_seconds=1.0)
        await bench.after(MIN_INTERVAL_S)
    assert len(bench.changed) == 1, "every look shows other seconds"
    workers.straggler = Straggler(rank=1, own_seconds=2.0, median_seconds=1.0)
    await bench.after(MIN_INTERVAL_S)
    assert len(bench.changed) == 2, "a straggler"
    workers.straggler = Straggler(rank=0, own_seconds=2.1, median_seconds=1.0)
    await bench.after(MIN_INTERVAL_S)
    assert len(bench.changed) == 2, "another rank of its node"
    workers.straggler = Straggler(rank=0, own_seconds=1.1, median_seconds=1.0)
    await bench.after(MIN_INTERVAL_S)
    assert len(bench.changed) == 3, "its end"


LIMIT_S = 300
BOTH = ["gpt-1-0", "gpt-1-0", "gpt-1-1"]
"""Polls of rank 0 alone, then of all workers."""


async def test_a_step_that_stands_still_makes_all_pods_be_asked_and_the_last_rank_be_named() -> None:
    workers = Workers({"gpt-1-0": 7, "gpt-1-1": 6})
    bench = Bench(workers)
    workers.idle_s = LIMIT_S / 2 - 1
    assert await bench.after(0) == ["gpt-1-0"], "not before half of the limit"
    workers.idle_s = LIMIT_S / 2
    assert await bench.after(MIN_INTERVAL_S) == BOTH
    assert bench.job_state.inspection.slow_rank.rank == 1
    assert bench.job_state.inspection.step == 7
    assert await bench.after(MIN_INTERVAL_S) == ["gpt-1-0"], "all pods only now and then"
    assert await bench.after(INSPECTION_INTERVAL_S) == BOTH
    workers.steps["gpt-1-0"], workers.idle_s = 8, 0.0
    await bench.after(MIN_INTERVAL_S)
    assert bench.job_state.inspection is None


async def test_while_the_alarm_stands_all_pods_are_asked_more_often_and_every_answer_gets_a_pass() -> None:
    workers = Workers({"gpt-1-0": 7, "gpt-1-1": 7})
    bench = Bench(workers)
    workers.idle_s = LIMIT_S
    assert await bench.after(0) == BOTH, "the look that raises it"
    job = stored("gpt", "job-uid", "Running")
    job["metadata"]["resourceVersion"] = "2"
    job["status"]["hang"] = {"attempt": 1, "detectedAt": "2026-01-01T00:00:00Z"}
    bench.cache.put(job)
    for _ in range(2):
        passes = len(bench.changed)
        assert await bench.after(ALARM_INTERVAL_S) == BOTH
        assert len(bench.changed) == passes + 2


async def test_when_worker_0_is_silent_the_others_show_whether_the_job_moves() -> None:
    workers = Workers({"gpt-1-1": 7})
    bench = Bench(workers)
    await bench.after(0)
    assert await bench.after(SILENT_S) == BOTH
    assert bench.job_state.inspection is None, "it does: no look is kept that could be taken for an alarm"
    workers.idle_s = LIMIT_S
    await bench.after(INSPECTION_INTERVAL_S)
    slow_rank = bench.slow_rank
    assert (slow_rank.worker, "does not answer" in slow_rank.why) == (0, True)


async def test_when_worker_0_has_ended_the_others_are_asked_without_it() -> None:
    """Rank 0 returned; rank 1 hangs in its last work."""
    workers = Workers({"gpt-1-0": 7, "gpt-1-1": 7})
    bench = Bench(workers)
    await bench.after(0)
    ended = [{"name": "worker", "state": {"terminated": {"exitCode": 0}}}]
    bench.store.put(pod_json(0, version=2, phase="Succeeded", containerStatuses=ended), now=NOW)
    workers.idle_s = LIMIT_S
    assert await bench.after(SILENT_S) == ["gpt-1-1"]
    look = bench.job_state.inspection
    assert (look.step, look.paces[Phase.STEP].idle_s) == (7, LIMIT_S)


async def test_an_inspection_of_a_large_job_delays_no_other_job() -> None:
    workers = Workers({"gpt-1-0": 7, "gpt-1-1": 7})
    workers.idle_s = LIMIT_S
    bench = Bench(workers, jobs=2)
    for index in range(2000):
        pod = pod_json(index, version=1, uid="uid-1", phase="Running", containerStatuses=RUNNING)
        pod["metadata"] |= {"name": f"gpt1-1-{index}", "uid": f"gpt1-{index}"}
        pod["metadata"]["labels"]["zerotrain.dev/job"] = "gpt1"
        bench.store.put(pod, now=NOW)
    bench.poller._is_suspect = lambda *_: True  # type: ignore[method-assign]
    looks = []
    for _ in range(4):
        asked = await bench.after(INSPECTION_INTERVAL_S)
        looks.append((asked.count("gpt-1-1"), asked.count("gpt1-1-1999")))
    assert looks == [(1, 1), (1, 0), (1, 0), (1, 0)]


async def test_a_program_that_never_reports_is_never_suspected() -> None:
    class Silent(Workers):
        async def report(self, worker: WorkerAddress) -> WorkerReport:
            self.asked.append(worker.pod)
            rank = Progress(rank=0, attempt=1)
            return WorkerReport(
                job="gpt", job_uid=self.uid, attempt=1, node_rank=0, world_size=2, ready=True, ranks=(rank,)
            )

    bench = Bench(Silent({}))
    for _ in range(3):
        assert await bench.after(3600) == ["gpt-1-0"]


async def test_when_everything_stands_still_the_looks_stay_within_their_budget() -> None:
    workers = Workers({"gpt-1-0": 7, "gpt-1-1": 7})
    workers.idle_s = LIMIT_S
    jobs = 100
    bench = Bench(workers, jobs=jobs)
    for key, job in bench.cache:
        for index in (0, 1):
            pod = pod_json(
                index, version=1, uid=job["metadata"]["uid"], phase="Running", containerStatuses=RUNNING
            )
            pod["metadata"] |= {"name": f"{key.name}-1-{index}", "uid": f"{key.name}-{index}"}
            pod["metadata"]["labels"]["zerotrain.dev/job"] = key.name
            bench.store.put(pod, now=NOW)
            workers.steps[pod["metadata"]["name"]] = 7
    workers.uid = ""  # every answer is another job's: what counts here is which workers are polled
    bench.poller._is_suspect = lambda *_: True  # type: ignore[method-assign]
    await bench.after(0)
    looks = 0
    for _ in range(20):
        asked = await bench.after(MIN_INTERVAL_S)
        looks += len(asked) - jobs
    assert looks <= 20 * MIN_INTERVAL_S * INSPECTION_CALLS_PER_SECOND + 2
    assert looks >= 0.5 * 20 * MIN_INTERVAL_S * INSPECTION_CALLS_PER_SECOND


async def test_workers_of_a_node_that_is_not_ready_are_asked_whether_they_live() -> None:
    bench = Bench(Workers({"gpt-1-0": 7, "gpt-1-1": 7}), phase="Yielding")
    for index in (0, 1):
        pod = pod_json(index, version=2, phase="Running", containerStatuses=RUNNING)
        bench.store.put(pod | {"spec": {"nodeName": f"node-{index}"}}, now=NOW)
    silent = {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    bench.job_states.nodes.put({"metadata": {"name": "node-1"}, "status": {"conditions": [silent]}})
    assert await bench.after(0) == ["gpt-1-0", "gpt-1-1"]
    assert bench.job_state.responded_at == {"node-1": NOW}
    assert await bench.after(MIN_INTERVAL_S) == ["gpt-1-0"]
    del bench.workers.steps["gpt-1-1"]
    bench.job_state.responded_at.clear()
    assert await bench.after(worker_calls.INTERVAL_S) == ["gpt-1-0", "gpt-1-1"]
    assert bench.job_state.responded_at == {}


async def test_also_in_a_job_that_still_waits_for_other_workers() -> None:
    bench = Bench(Workers({"gpt-1-0": 0}), phase="Pending")
    pod = pod_json(0, version=2, phase="Running", containerStatuses=RUNNING)
    bench.store.put(pod | {"spec": {"nodeName": "node-0"}}, now=NOW)
    assert await bench.after(0) == []
    silent = {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    bench.job_states.nodes.put({"metadata": {"name": "node-0"}, "status": {"conditions": [silent]}})
    assert await bench.after(worker_calls.INTERVAL_S) == ["gpt-1-0"]
    assert bench.job_state.responded_at == {"node-0": NOW}


async def test_and_no_more_seldom_the_more_jobs_there_are() -> None:
    bench = Bench(Workers({"gpt-1-0": 7, "gpt-1-1": 7}), jobs=3000)
    pod = pod_json(1, version=2, phase="Running", containerStatuses=RUNNING)
    bench.store.put(pod | {"spec": {"nodeName": "node-1"}}, now=NOW)
    silent = {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    bench.job_states.nodes.put({"metadata": {"name": "node-1"}, "status": {"conditions": [silent]}})
    await bench.after(0)
    assert await bench.after(worker_calls.INTERVAL_S) == ["gpt-1-1"]
