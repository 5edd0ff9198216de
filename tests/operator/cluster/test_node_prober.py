"""Workers on not-ready nodes are heard in time, whatever other polls so large a job needs."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.operator.reconcile_builders import NOW, UID, job, ready, status
from zerotrain.contract.progress import Motion, Phase, Progress
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster.channel import CallKind, ChannelError, NotAsked
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.progress_poller import ProgressPoller
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.cluster.worker_calls import MISSED_S
from zerotrain.operator.reconcile import NodeView

pytestmark = pytest.mark.unit


WORKERS = 4000
LOST_AFTER_S = 60
"""Value of `failurePolicy.nodeNotReadySeconds`, unless given."""
KEY = JobKey("ml", "gpt")


class Cluster:
    """A job of thousands of workers in a long first step, whose workers all answer at once."""

    def __init__(self) -> None:
        self.now_s, self.calls, self.job_states = 1000.0, 0, JobStates()
        self.refuses: ChannelError | None = None
        """Error that workers raise in the place of a report."""
        self.changed: list[JobKey] = []
        self._job = job(spec={"workers": WORKERS}, status=status("Running"))
        self._pods = tuple(ready(index) for index in range(WORKERS))
        self.poller = ProgressPoller(
            jobs=cast(Any, self),
            store=cast(Any, SimpleNamespace(of_job=lambda _: (self._pods, ()))),
            job_states=self.job_states,
            channel=cast(Any, self),
            changed=self.changed.append,
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
        if self.refuses is not None and worker.call_kind is CallKind.PROBE:
            raise self.refuses
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
        known = self.job_states.nodes
        for number in range(nodes):
            name = f"node-{number}"
            known._known.add(name)
            known._keep(name, NodeView(name=name, ready=False, not_ready_since=self.now()))

    async def go_on(self, seconds: float) -> None:
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s += 0.5
            await asyncio.gather(*self.poller.start_due())


@pytest.mark.parametrize("nodes", [1, 60, 1500])
async def test_looks_at_all_workers_leave_calls_for_those_on_silent_nodes(nodes: int) -> None:
    cluster = Cluster()
    await asyncio.gather(*cluster.poller.start_due())
    assert cluster.calls > WORKERS, "no look was begun"
    cluster.silence(nodes)
    for _ in range(2):
        asked_at = cluster.now()
        await cluster.go_on(LOST_AFTER_S / 2)
        responded_at = cluster.job_states.of(UID).responded_at
        assert len(responded_at) == nodes
        assert min(responded_at.values()) > asked_at


async def test_a_worker_that_was_not_polled_is_remembered_until_it_is() -> None:
    cluster = Cluster()
    await asyncio.gather(*cluster.poller.start_due())
    cluster.silence(2)
    job_state, nodes = cluster.job_states.of(UID), {"node-0", "node-1"}
    full, silent = NotAsked("all slots are taken"), ChannelError("no answer", timed_out=True)
    cluster.refuses = full
    await cluster.go_on(10)
    assert (job_state.unasked, job_state.responded_at) == (nodes, {})
    cluster.refuses, num_changed = silent, len(cluster.changed)
    await cluster.go_on(10)
    assert (job_state.unasked, job_state.responded_at) == (set(), {})
    assert len(cluster.changed) > num_changed, "when the nodes count as lost is another moment now"
    cluster.refuses = full
    await cluster.go_on(MISSED_S - 10)
    assert job_state.unasked == set(), "they were asked just now"
    await cluster.go_on(20)
    assert job_state.unasked == nodes
    cluster.refuses = None
    await cluster.go_on(10)
    assert job_state.unasked == set()
    assert job_state.responded_at.keys() == nodes


async def test_a_question_that_the_budget_forbids_was_not_asked() -> None:
    cluster = Cluster()
    cluster.silence(WORKERS)
    await asyncio.gather(*cluster.poller.start_due())
    job_state = cluster.job_states.of(UID)
    assert (len(job_state.responded_at), job_state.unasked) == (WORKERS, set())
    await cluster.go_on(MISSED_S + 5)
    assert len(job_state.unasked) == WORKERS
    await cluster.go_on(10)
    assert job_state.unasked == set()


async def test_a_node_that_spoke_again_is_not_remembered() -> None:
    cluster = Cluster()
    await asyncio.gather(*cluster.poller.start_due())
    cluster.silence(2)
    cluster.refuses = NotAsked("all slots are taken")
    await cluster.go_on(10)
    cluster.job_states.nodes._keep("node-1", None)
    await cluster.go_on(10)
    assert cluster.job_states.of(UID).unasked == {"node-0"}
