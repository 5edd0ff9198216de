"""Costs of many jobs for the operator: idle, while polled, and at 20,000 pods. For bench_operator."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.bench_operator_cluster import (
    latency_quantile,
    operator_writes,
    process_cpu_s,
    process_memory_bytes,
)
from tests.benchmarks.bench_operator_loads import (
    Bench,
    RunningWatch,
    Size,
    collection,
    zerotrain,
    zerotrain_job,
)
from tests.operator.operator_process import OperatorProcess
from tests.support.devcluster import wait_until

PASSES = "zerotrain_operator_reconcile_duration_seconds"
REQUESTS = "zerotrain_operator_api_request_duration_seconds"
PENDING_TIMEOUT_S = 300.0
MANY_TIMEOUT_S = 3600.0
MANY_POLL_S = 10.0
"""Seconds between two lists of the jobs; a list of 2,000 jobs costs the machine a third of a second."""

StartOperator = Callable[[dict[str, str]], AbstractContextManager[OperatorProcess]]
"""Function that runs a leading operator with these variables, for the length of a block."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Jobs that need no action."""

    jobs: int
    cpu_percent: float


@dataclass(frozen=True, kw_only=True)
class Polling:
    """Running jobs whose workers answer."""

    jobs: int
    cpu_percent: float
    every_s: float
    """Seconds between two polls of a job, on average."""
    status_writes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Many:
    """Many jobs at once."""

    size: Size
    running_s: float
    pass_p50_s: float
    pass_p99_s: float
    """99th percentile of all passes from the first job until all ran, their requests included."""
    creation_p50_s: float
    creation_p99_s: float
    """99th percentile of one POST: a pod, a shared object, or an event.

    A pass waits for the slowest of several.
    """
    resident_bytes: int
    peak_bytes: int
    running_cpu_percent: float
    """Load in percent of one processor once all pods run and nothing happens."""
    restart_s: float
    """Seconds from the start of a new operator process until it leads with a complete view."""
    restarted_bytes: int
    restarted_peak_bytes: int


async def idle(bench: Bench, start: StartOperator, *, jobs: int, window_s: float) -> Idle:
    """Measure the operator with half of the jobs finished and half suspended.

    Within the window the operator lists all of them again, as it does every five minutes.
    """
    namespace = await bench.namespace()
    done = {"devcluster.zerotrain.dev/exit-code": "0"}
    ends = {"podTemplate": {"annotations": done}}
    with start({}):
        await bench.create(zerotrain_job(namespace, f"ends-{n}", 1, **ends) for n in range(jobs // 2))
        await bench.create(
            zerotrain_job(namespace, f"waits-{n}", 10, suspend=True) for n in range(jobs - jobs // 2)
        )
        await _phases_become(bench, namespace, {"Completed": jobs // 2, "Suspended": jobs - jobs // 2})
    with start({"ZEROTRAIN_OPERATOR_RESYNC_SECONDS": str(window_s)}) as operator:
        await asyncio.sleep(min(10.0, window_s / 2))
        percent = await _cpu_percent(operator, window_s)
    await bench.clean(namespace)
    return Idle(jobs=jobs, cpu_percent=percent)


async def polling(bench: Bench, start: StartOperator, *, jobs: int, window_s: float) -> Polling:
    """Measure the polling of jobs with one pod each. Every pod's address has its own HTTP server."""
    namespace = await bench.namespace()
    watch = RunningWatch(bench.cluster, namespace)
    with start({}):
        await bench.create(zerotrain(namespace, Size(jobs=jobs, workers=1)))
        await watch.reached(jobs)
        await _phases_become(bench, namespace, {"Running": jobs})
    watch.close()
    async with _workers(bench, namespace) as answered:
        with start({"ZEROTRAIN_OPERATOR_CHANNEL": "direct"}) as operator:
            # Every worker was polled twice: from then on it is the steady state.
            await _until(answered, 2 * jobs)
            asked, wrote = await answered(), operator_writes(operator, "zerotrainingjobs/status")
            percent = await _cpu_percent(operator, window_s)
            asked = await answered() - asked
            wrote = operator_writes(operator, "zerotrainingjobs/status") - wrote
    await bench.clean(namespace)
    return Polling(
        jobs=jobs,
        cpu_percent=percent,
        every_s=window_s * jobs / max(asked, 1),
        status_writes_per_s=wrote / window_s,
    )


async def many(bench: Bench, start: StartOperator, *, size: Size, window_s: float) -> Many:
    namespace = await bench.namespace()
    with start({}) as operator:
        started = time.monotonic()
        await bench.create(zerotrain(namespace, size))
        # The jobs' status decides: the API server may end a watch of so many pods again and again as too
        # slow.
        await _phases_become(
            bench, namespace, {"Running": size.jobs}, timeout_s=MANY_TIMEOUT_S, every_s=MANY_POLL_S
        )
        running = time.monotonic() - started
        metrics = operator.get("/metrics")
        resident, peak = process_memory_bytes(operator.pid)
        percent = await _cpu_percent(operator, window_s)
    began = time.monotonic()
    with start({}) as operator:
        wait_until(lambda: operator.get("/readyz"), "the operator to be ready")
        restart = time.monotonic() - began
        await asyncio.sleep(10)
        resident_again, peak_again = process_memory_bytes(operator.pid)
    return Many(
        size=size,
        running_s=running,
        pass_p50_s=latency_quantile(metrics, PASSES, 0.5),
        pass_p99_s=latency_quantile(metrics, PASSES, 0.99),
        creation_p50_s=latency_quantile(metrics, REQUESTS, 0.5, verb="POST"),
        creation_p99_s=latency_quantile(metrics, REQUESTS, 0.99, verb="POST"),
        resident_bytes=resident,
        peak_bytes=peak,
        running_cpu_percent=percent,
        restart_s=restart,
        restarted_bytes=resident_again,
        restarted_peak_bytes=peak_again,
    )


async def _phases_become(
    bench: Bench,
    namespace: str,
    wanted: dict[str, int],
    *,
    timeout_s: float = PENDING_TIMEOUT_S,
    every_s: float = 2.0,
) -> None:
    """Wait until the jobs have these phases. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        found: dict[str, int] = {}
        for job in await bench.list("ZeroTrainingJob", namespace):
            phase = job.get("status", {}).get("phase", "")
            found[phase] = found.get(phase, 0) + 1
        if found == wanted:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"phases are {found}, wanted {wanted}")
        await asyncio.sleep(every_s)


async def _until(count: Callable[[], Any], wanted: int) -> None:
    while True:
        if await count() >= wanted:
            return
        await asyncio.sleep(0.5)


async def _cpu_percent(operator: OperatorProcess, window_s: float) -> float:
    """Return the operator's load in percent of one processor."""
    before, began = process_cpu_s(operator.pid), time.monotonic()
    await asyncio.sleep(window_s)
    return 100 * (process_cpu_s(operator.pid) - before) / (time.monotonic() - began)


@asynccontextmanager
async def _workers(bench: Bench, namespace: str) -> AsyncIterator[Callable[[], Any]]:
    """Give every pod an address with a server; yield a function that returns the count of answers."""
    pods = await bench.list("Pod", namespace)
    workers = [
        {
            "address": f"127.210.{number // 250}.{number % 250 + 1}",
            "pod": pod["metadata"]["name"],
            "job": pod["metadata"]["labels"]["zerotrain.dev/job"],
            "uid": pod["metadata"]["labels"]["zerotrain.dev/job-uid"],
        }
        for number, pod in enumerate(pods)
    ]
    double = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.bench_operator_workers"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    assert double.stdin is not None
    assert double.stdout is not None
    requests, responses = double.stdin, double.stdout

    async def ask(line: str) -> bytes:
        requests.write(f"{line}\n".encode())
        await requests.drain()
        return await responses.readline()

    async def answered() -> int:
        return int(await ask(""))

    try:
        await ask(json.dumps(workers))
        for worker in workers:
            path = f"{collection('Pod', namespace)}/{worker['pod']}/status"
            address = worker["address"]
            await bench.patch(path, {"status": {"podIP": address, "podIPs": [{"ip": address}]}})
        yield answered
    finally:
        double.kill()
        await double.wait()
