"""Collection of the stacks of a hung job, up to half a megabyte of a tenant's text from each worker."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.operator.api_double import ApiDouble, served
from tests.operator.cluster.test_executor import CORE, Channel, job, make_executor
from zerotrain.operator.cluster.actions import diagnostics
from zerotrain.operator.cluster.channel import WorkerAddress
from zerotrain.operator.reconcile import CollectStacks, StackSource
from zerotrain.operator.resources.diagnostics import WorkerStacks, read_stacks

pytestmark = pytest.mark.ranks


class Hung(Channel):
    """Workers that answer with one rank each."""

    async def stacks(self, worker: WorkerAddress, *, token: str) -> str:
        return f"=== rank {worker.pod.rpartition('-')[2]} (pid 1, sleeping)\n"


async def test_stacks_are_read_beside_the_event_loop_one_worker_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_way, most, threads = 0, 0, set[threading.Thread]()

    def read_slowly(text: str, *, workers: int) -> WorkerStacks:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        threads.add(threading.current_thread())
        time.sleep(0.02)
        under_way -= 1
        return read_stacks(text, workers=workers)

    monkeypatch.setattr(diagnostics, "read_stacks", read_slowly)
    double = ApiDouble()
    double.on(f"POST {CORE}/configmaps", (201, {}))
    sources = tuple(
        StackSource(worker=index, pod=f"gpt-1-{index}", pod_ip=f"10.0.0.{index}") for index in range(5)
    )
    async with served(double) as api:
        executor = make_executor(api, Hung())
        await executor.perform(job(), [CollectStacks(attempt=1, sources=sources)])
        await asyncio.gather(*executor.job_states.collections.values())
    assert most == 1
    assert threading.main_thread() not in threads
    (made,) = double.bodies(f"POST {CORE}/configmaps")
    assert "5 ranks: 0, 1, 2, 3, 4" in made["data"]["summary.txt"]
