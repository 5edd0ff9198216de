"""Workers on nodes that fell silent are heard in time, whatever else the operator asks of so large a job."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.operator.reconcile_builders import NOW, UID, job, ready, status
from zerotrain.contract.progress import Motion, Phase, Progress
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster.memory import Memories
from zerotrain.operator.cluster.progress import ProgressPuller
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.reconcile import NodeView

WORKERS = 4000
LOST_AFTER_S = 60
"""`failurePolicy.nodeNotReadySeconds`, unless given."""
KEY = JobKey("ml", "gpt")


class Cluster:
    """A job of thousands in a first step that takes long, whose workers all answer at once."""

    def __init__(self) -> None:
        self.now_s, self.calls, self.memories = 1000.0, 0, Memories()
        self._job = job(spec={"workers": WORKERS}, status=status("Running"))
        self._pods = tuple(ready(index) for index in range(WORKERS))
        self.puller = ProgressPuller(
            jobs=cast(Any, self),
            store=cast(Any, SimpleNamespace(of_job=lambda _: (self._pods, ()))),
            memories=self.memories,
            channel=cast(Any, self),
            changed=lambda _: None,
            now=self.now,
            clock=lambda: self.now_s,
        )

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.now_s - 1000)

    def in_phases(self, phases: frozenset[str]) -> list[tuple[JobKey, Any]]:
        return [(KEY, self._job)] if "Running" in phases else []

    def get(self, _: JobKey) -> Any:
        return self._job

    async def report(self, worker: Any) -> WorkerReport:
        self.calls += 1
        index = int(worker.pod.rsplit("-", 1)[1])
        motion = Motion(idle_seconds=1000, silent_seconds=1)
        progress = Progress(rank=index, attempt=1, phase=Phase.FIRST_STEP, motion=motion)
        return WorkerReport(
            job="gpt",
            job_uid=UID,
            attempt=1,
            node_rank=index,
            world_size=WORKERS,
            ready=True,
            stopping=False,
            ranks=(progress,),
        )

    def silence(self, nodes: int) -> None:
        known = self.memories.nodes
        for number in range(nodes):
            name = f"node-{number}"
            known._known.add(name)
            known._keep(name, NodeView(name=name, ready=False, not_ready_since=self.now()))

    async def go_on(self, seconds: float) -> None:
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s += 0.5
            await asyncio.gather(*self.puller.start_due())


@pytest.mark.parametrize("nodes", [1, 60, 1500])
async def test_looks_at_all_workers_leave_calls_for_those_on_silent_nodes(nodes: int) -> None:
    cluster = Cluster()
    await asyncio.gather(*cluster.puller.start_due())
    assert cluster.calls > WORKERS, "no look was begun"
    cluster.silence(nodes)
    for _ in range(5):
        asked_at = cluster.now()
        await cluster.go_on(LOST_AFTER_S / 2)
        heard = cluster.memories.of(UID).heard
        assert len(heard) == nodes
        assert min(heard.values()) > asked_at
