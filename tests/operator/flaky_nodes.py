"""A slow but healthy job on two nodes that kubelets and API server come and go on, on one simulated clock.

What runs is real: the puller, its memory of nodes, and reconcile. Passes happen only after something that the
operator could see, and when it asked to be woken. What the ranks do is `test_hang_simulation`'s.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from tests.operator.api_double import pod_json
from tests.operator.reconcile_builders import UID
from tests.operator.test_hang_simulation import START, Ranks, started
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster import node_prober
from zerotrain.operator.cluster.channel import ChannelError, Worker
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.nodes import NodeStore
from zerotrain.operator.cluster.progress import ProgressPuller
from zerotrain.operator.cluster.store import PodStore
from zerotrain.operator.reconcile import reconcile

NODES = ("node-0", "node-1")
PATIENCE_S = 60
"""`nodeNotReadySeconds` unless given."""

LOST = 0.1
"""Of the operator's questions to workers, so many get no answer."""

NEVER = float("inf")


@dataclass
class Site:
    """One job of two workers, its operator, its nodes and the API server between them. Times in seconds."""

    chance: random.Random
    now: float = 0.0
    silent: dict[str, float] = field(default_factory=dict)
    """Nodes that are not ready, and since when."""
    dead: set[str] = field(default_factory=set)
    cut_off: set[str] = field(default_factory=set)
    """Nodes that run on, and that the operator does not reach either."""
    away_until: float = 0.0
    """Of the API server: until then nothing is heard of nodes and nothing can be written."""
    events: list[tuple[float, str, str]] = field(default_factory=list)
    blips: Counter[str] = field(default_factory=Counter)
    """Nodes that were not ready for longer than the policy's time and came back, by the phase of job and
    ranks."""
    ranks: Ranks = field(init=False)
    job: dict[str, Any] = field(init=False)
    _pulled_at: float = NEVER
    """When worker 1's image is there; worker 0 runs and waits for it."""
    _wake_at: float = NEVER
    _version: int = 0

    def __post_init__(self) -> None:
        self._store, self._cache = PodStore(), JobCache()
        self._memories = JobStates(nodes=NodeStore(now=self._time))
        self._store.sight.gained(None, now=START)
        self._puller = ProgressPuller(
            jobs=self._cache,
            store=self._store,
            memories=self._memories,
            channel=self,
            changed=lambda key: None,
            now=self._time,
            clock=lambda: self.now,
        )

    def start(self, attempt: int) -> None:
        """A new attempt; its second worker's image is pulled for a while."""
        self.job = started(attempt, self.now)
        self._pulled_at = self.now + self.chance.uniform(100, 900)
        self.ranks = Ranks(attempt, self.now, self.chance)
        self.ranks.until = max(self.ranks.until, self._pulled_at + 60)
        for index in (0, 1):
            self._pod(index, runs=index == 0)
        self._wake_at = self.now

    def go_on(self, until: float) -> None:
        """Time goes on; the operator asks workers when it does, and looks when it may."""
        while self.now < until:
            tick_s = node_prober.INTERVAL_S if self.silent else 30.0 * self.chance.uniform(0.8, 1.2)
            end = min(until, self.now + tick_s)
            while self._wake_at <= end:
                self._reach(max(self.now, self._wake_at))
                self._look()
            self._reach(end)
            asyncio.run(self._ask())

    def say(self, name: str, *, ready: bool) -> None:
        """The node controller's word. The operator hears of it when the API server is there."""
        if not ready:
            self.silent.setdefault(name, self.now)
        elif self.silent.pop(name, self.now) < self.now - PATIENCE_S:
            self.blips[str(self.job["status"]["phase"])] += 1
            self.blips[str(self.ranks.phase)] += 1
        if self.now >= self.away_until:
            self.hear(name)

    def hear(self, name: str) -> None:
        """The watch of nodes brings what was last said."""
        since = self.silent.get(name)
        condition = {"type": "Ready", "status": "True" if since is None else "Unknown"}
        if since is not None:
            condition["lastTransitionTime"] = f"{START + timedelta(seconds=since):%Y-%m-%dT%H:%M:%SZ}"
        self._memories.nodes.put({"metadata": {"name": name}, "status": {"conditions": [condition]}})
        self._wake_at = self.now

    @property
    def has_told(self) -> set[str]:
        """Reasons of all events so far."""
        return {reason for _, reason, _ in self.events}

    async def report(self, worker: Worker) -> WorkerReport:
        """The launcher's HTTP, which needs neither kubelet nor API server."""
        index = int(worker.pod[-1])
        if NODES[index] in self.dead | self.cut_off or self.chance.random() < LOST:
            raise ChannelError("no answer")
        return replace(self.ranks.report(index), job_uid=UID)

    async def request_yield(self, worker: Worker, *, attempt: int, token: str) -> None:
        raise AssertionError("nobody has a reason to stop")

    async def stacks(self, worker: Worker, *, token: str) -> str:
        raise ChannelError("no answer")

    def _time(self) -> datetime:
        return START + timedelta(seconds=self.now)

    def _pod(self, index: int, *, runs: bool) -> None:
        self._version += 1
        state = {"running": {}} if runs else {"waiting": {"reason": "ContainerCreating"}}
        pod = pod_json(
            index,
            version=self._version,
            uid=UID,
            phase="Running" if runs else "Pending",
            containerStatuses=[{"name": "worker", "state": state}],
            conditions=[{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")[: 1 + runs]],
        )
        attempt = self.ranks.attempt
        pod["metadata"] |= {"name": f"gpt-{attempt}-{index}", "uid": f"{attempt}-{index}"}
        pod["metadata"]["labels"]["zerotrain.dev/attempt"] = str(attempt)
        pod["spec"] = {"nodeName": NODES[index]}
        self._store.put(pod, now=self._time())

    def _reach(self, now: float) -> None:
        self.now = now
        if not self.dead:  # else no rank gets past its next collective
            self.ranks.to(now)
        if now >= self._pulled_at and NODES[1] not in self.silent:
            self._pulled_at = NEVER
            self._pod(1, runs=True)
            self._wake_at = now

    def _look(self) -> None:
        """One pass, if the API server is there to write to."""
        if self.now < self.away_until:
            self._wake_at = self.away_until
            return
        plan = reconcile(self.job, self._memories.observe("ml", UID, self._store), self._time())
        self.events += [(self.now, event.reason, event.message) for event in plan.events]
        if plan.status is not None:
            stored = plan.status.model_dump(mode="json", by_alias=True, exclude_none=True)
            self.job = {**self.job, "status": stored}
        self._wake_at = NEVER if plan.wake_at is None else (plan.wake_at - START).total_seconds()

    async def _ask(self) -> None:
        """What the puller does at this moment, and the pass after it."""
        self._version += 1
        self._cache.put(
            {**self.job, "metadata": {**self.job["metadata"], "resourceVersion": str(self._version)}}
        )
        await asyncio.gather(*self._puller.start_due())
        self._look()
