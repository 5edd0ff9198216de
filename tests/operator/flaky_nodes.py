"""A slow but healthy job on two nodes, with kubelets and an API server that fail and return, on one simulated
clock.

The poller, its memory of nodes, and reconcile are real. Passes happen only after an event that the operator
could see, and when it asked to be woken. The ranks are those of `test_hang_simulation`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from tests.operator.api_double import pod_json
from tests.operator.reconcile.test_hang_simulation import START, Ranks, started
from tests.operator.reconcile_builders import UID
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster import worker_calls
from zerotrain.operator.cluster.channel import ChannelError, WorkerAddress
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.nodes import NodeStore
from zerotrain.operator.cluster.progress_poller import ProgressPoller
from zerotrain.operator.cluster.store import PodStore
from zerotrain.operator.reconcile import reconcile

NODES = ("node-0", "node-1")
PATIENCE_S = 60
"""Value of `nodeNotReadySeconds` unless given."""

LOST = 0.1
"""Share of the operator's requests to workers that get no answer."""

NEVER = float("inf")


@dataclass
class Site:
    """One job of two workers, its operator, its nodes and the API server between them. Times in seconds."""

    chance: random.Random
    now: float = 0.0
    silent: dict[str, float] = field(default_factory=dict)
    """Nodes that are not ready -> since when."""
    dead: set[str] = field(default_factory=set)
    cut_off: set[str] = field(default_factory=set)
    """Nodes that run on, and that the operator cannot reach either."""
    away_until: float = 0.0
    """End of the API server's outage: until then there is no news of nodes and no write succeeds."""
    events: list[tuple[float, str, str]] = field(default_factory=list)
    blips: Counter[str] = field(default_factory=Counter)
    """Number of nodes that were not ready for longer than the policy's time and came back, by the phase of
    job and of ranks.
    """
    ranks: Ranks = field(init=False)
    job: dict[str, Any] = field(init=False)
    _pulled_at: float = NEVER
    """Time at which worker 1's image is pulled; worker 0 runs and waits for it."""
    _wake_at: float = NEVER
    _version: int = 0

    def __post_init__(self) -> None:
        self._store, self._cache = PodStore(), JobCache()
        self._job_states = JobStates(nodes=NodeStore(now=self._time))
        self._store.sight.gained(None, now=START)
        self._poller = ProgressPoller(
            jobs=self._cache,
            store=self._store,
            job_states=self._job_states,
            channel=self,
            changed=lambda key: None,
            now=self._time,
            clock=lambda: self.now,
        )

    def start(self, attempt: int) -> None:
        """Start a new attempt; its second worker's image is pulled for a while."""
        self.job = started(attempt, self.now)
        self._pulled_at = self.now + self.chance.uniform(100, 900)
        self.ranks = Ranks(attempt, self.now, self.chance)
        self.ranks.until = max(self.ranks.until, self._pulled_at + 60)
        for index in (0, 1):
            self._pod(index, runs=index == 0)
        self._wake_at = self.now

    def go_on(self, until: float) -> None:
        """Advance the time; the operator polls workers when due, and runs passes when it may."""
        while self.now < until:
            tick_s = worker_calls.INTERVAL_S if self.silent else 30.0 * self.chance.uniform(0.8, 1.2)
            end = min(until, self.now + tick_s)
            while self._wake_at <= end:
                self._reach(max(self.now, self._wake_at))
                self._look()
            self._reach(end)
            asyncio.run(self._ask())

    def say(self, name: str, *, ready: bool) -> None:
        """Set a node ready or not ready, as the node controller does. The operator learns of it once the API
        server is there.
        """
        if not ready:
            self.silent.setdefault(name, self.now)
        elif self.silent.pop(name, self.now) < self.now - PATIENCE_S:
            self.blips[str(self.job["status"]["phase"])] += 1
            self.blips[str(self.ranks.phase)] += 1
        if self.now >= self.away_until:
            self.hear(name)

    def hear(self, name: str) -> None:
        """Deliver the node's last condition by the watch of nodes."""
        since = self.silent.get(name)
        condition = {"type": "Ready", "status": "True" if since is None else "Unknown"}
        if since is not None:
            condition["lastTransitionTime"] = f"{START + timedelta(seconds=since):%Y-%m-%dT%H:%M:%SZ}"
        self._job_states.nodes.put({"metadata": {"name": name}, "status": {"conditions": [condition]}})
        self._wake_at = self.now

    @property
    def has_reported(self) -> set[str]:
        """Reasons of all events so far."""
        return {reason for _, reason, _ in self.events}

    async def report(self, worker: WorkerAddress) -> WorkerReport:
        """Answer as the launcher's HTTP, which needs neither kubelet nor API server."""
        index = int(worker.pod[-1])
        if NODES[index] in self.dead | self.cut_off or self.chance.random() < LOST:
            raise ChannelError("no answer")
        return replace(self.ranks.report(index), job_uid=UID)

    async def request_yield(self, worker: WorkerAddress, *, attempt: int, token: str) -> None:
        raise AssertionError("nobody has a reason to stop")

    async def stacks(self, worker: WorkerAddress, *, token: str) -> str:
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
        if not self.dead:  # otherwise no rank gets past its next collective
            self.ranks.to(now)
        if now >= self._pulled_at and NODES[1] not in self.silent:
            self._pulled_at = NEVER
            self._pod(1, runs=True)
            self._wake_at = now

    def _look(self) -> None:
        """Run one pass, if the API server is there to write to."""
        if self.now < self.away_until:
            self._wake_at = self.away_until
            return
        plan = reconcile(self.job, self._job_states.observe("ml", UID, self._store), self._time())
        self.events += [(self.now, event.reason, event.message) for event in plan.events]
        if plan.status is not None:
            stored = plan.status.model_dump(mode="json", by_alias=True, exclude_none=True)
            self.job = {**self.job, "status": stored}
        self._wake_at = NEVER if plan.wake_at is None else (plan.wake_at - START).total_seconds()

    async def _ask(self) -> None:
        """Run the poller's polls of this moment, and the pass after them."""
        self._version += 1
        self._cache.put(
            {**self.job, "metadata": {**self.job["metadata"], "resourceVersion": str(self._version)}}
        )
        await asyncio.gather(*self._poller.start_due())
        self._look()
