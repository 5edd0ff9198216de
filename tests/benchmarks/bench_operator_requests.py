"""Cost of single writes of a job in the API server: bytes that it allocates, and its processor time.

    python -m tests.benchmarks.bench_operator_requests [--jobs 200]      # two minutes

Each row is a number of equal requests, one after the other, to simulated jobs that no operator manages. The
status is one that the operator wrote for a running job. Allocations do not depend on what else runs on the
machine; processor time does.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from tests.benchmarks.bench_operator import MIB, session
from tests.benchmarks.bench_operator_belongings import MANAGER, Belongings
from tests.benchmarks.bench_operator_loads import Bench, zerotrain_job

Json = dict[str, Any]
WORKERS = 4


async def repeated(bench: Bench, what: str, requests: Sequence[Callable[[], Awaitable[Json]]]) -> list[Json]:
    """Send the requests, print what one of them cost, and return their answers."""
    before = await bench.meter.all(None)
    answers = [await request() for request in requests]
    cpu = bench.meter.cpu(None)
    after = (await bench.meter.requests(None)).with_cpu(cpu)
    name = "kube-apiserver"
    allocated = (after.allocated_bytes - before.allocated_bytes) / len(requests) / MIB
    milliseconds = (after.cpu_s[name] - before.cpu_s[name]) / len(requests) * 1000
    print(f"| {what} | {allocated:.2f} MiB | {milliseconds:.1f} ms |", flush=True)
    return answers


def statuses(status: Json) -> dict[str, Json]:
    """Return what is written in turn, by the name of its row."""
    smallest = {name: status[name] for name in ("attempt", "observedGeneration", "shape")}
    without_plan = {name: value for name, value in status.items() if name != "memoryPlan"}
    counted = {**status["workers"], "running": status["workers"]["running"] - 1}
    return {
        "a first status of four fields": {**smallest, "phase": "Pending"},
        "the next, without the memory plan": {**without_plan, "phase": "Starting"},
        "the next, another phase": status,
        "the next, the same phase": {**status, "workers": counted},
    }


async def main(jobs: int) -> None:
    async with session(20) as here:
        bench = here.bench
        with here.operator():
            status = (await Belongings.learned(bench)).status
        print(f"| {jobs} requests, each | allocated | processor time |\n|---|---|---|")
        for rows in ({"a whole first status": status}, statuses(status)):
            namespace = await bench.namespace()
            bodies = [
                zerotrain_job(namespace, f"job-{number}", WORKERS, managedBy=MANAGER)
                for number in range(jobs)
            ]
            kept = await repeated(bench, "a job", [partial(bench.post, body) for body in bodies])
            for what, value in rows.items():
                kept = await repeated(
                    bench,
                    what,
                    [partial(bench.put_status, {**job, "status": value}) for job in kept],
                )
            await bench.clean(namespace)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=200)
    asyncio.run(main(parser.parse_args().jobs))
