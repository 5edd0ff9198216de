"""What the operator remembers of a job between passes and may forget: that costs time, never correctness."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from zlib import crc32

from zerotrain.contract.progress import Progress
from zerotrain.operator.cluster.nodes import NodeStore
from zerotrain.operator.cluster.priorities import Priorities
from zerotrain.operator.cluster.store import PodStore, owner_key
from zerotrain.operator.reconcile import (
    Known,
    LogView,
    Observed,
    Problem,
    Protection,
    Room,
    StacksView,
    StorageClassView,
    YieldState,
)
from zerotrain.operator.reconcile.inspection import Inspection
from zerotrain.operator.reconcile.limits import StartLimits
from zerotrain.operator.reconcile.queues import ClusterApis, QueueView

MOST_MODELS = 256
"""Jobs whose models are kept: those that have pass after pass. Of all others they would be most of what the
operator holds in memory, to save a fifth of a millisecond now and then."""


@dataclass(slots=True)
class JobMemory:
    """One job's scratch."""

    problem: Problem | None = None
    making: bool = False
    """The last pass left pods to make, though nothing kept it from them."""
    failures: int = 0
    """Passes in a row that ended in a problem; for the backoff."""
    conflicts: int = 0
    """Passes in a row that lost the race for the status; for theirs."""
    yielding: YieldState | None = None
    protection: Protection | None = None
    ungrouped: int | None = None
    """The attempt whose pod group is gone."""
    progress: Progress | None = None
    step_moved_at: datetime | None = None
    """When its step was seen to move, by the clock that passes are decided at."""
    inspection: Inspection | None = None
    unheard: bool = False
    """Worker 0 runs and has not answered for long."""
    heard: dict[str, datetime] = field(default_factory=dict)
    """By node that is not ready: when a worker on it last answered."""
    unasked: set[str] = field(default_factory=set)
    """Such nodes whose workers were to be asked last, and no slot was free."""
    stacks: StacksView | None = None
    log: LogView | None = None
    room: Room | None = None
    storage_classes: dict[str, StorageClassView] = field(default_factory=dict)
    """By the part of the job whose volume it is."""
    ensured: int | None = None
    """Hash of the shared objects that are known to exist as they should for one attempt."""
    shared_at: datetime | None = None
    """When they were made or looked at last."""
    secret: str | None = None
    """Name of the Secret that was made last, or was found to exist."""


@dataclass(slots=True)
class Memories:
    """By the job's UID."""

    jobs: dict[str, JobMemory] = field(default_factory=dict)
    keep_shared_s: float | None = None
    """So often, and at the latest after twice that, the shared objects of an attempt are looked at; None: not
    at all."""
    acting_since: datetime | None = None
    """When this replica began to lead. None where nobody elects."""
    limits: StartLimits = field(default_factory=StartLimits)
    egress_bounds: tuple[str, ...] = ()
    """Networks that jobs may ask for in spec.network."""
    nodes: NodeStore = field(default_factory=NodeStore)
    reads_logs: bool = False
    """False on simulated nodes, which have none."""
    apis: ClusterApis | None = None
    queues_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a job is in a queue: from then on the Workloads are watched."""
    queues: dict[str, QueueView] = field(default_factory=dict)
    """By `owner_key`: Workloads, whether or not the job has had a pass: the list may come
    before the job does."""
    queues_listed: set[str | None] = field(default_factory=set)
    """Namespaces (None: all) whose Workloads are known, so that a job there without one has none."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while all nodes and pods are read: one job at a time."""
    priorities: Priorities = field(default_factory=Priorities)
    collections: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Stacks that are being collected; also what keeps the tasks alive."""
    models: dict[str, Known] = field(default_factory=dict)
    """Of the latest MOST_MODELS jobs that had a pass, the last of them at the end."""

    def of(self, uid: str) -> JobMemory:
        return self.jobs.setdefault(uid, JobMemory())

    def knows(self, uid: str) -> bool:
        """Whether the job is remembered, so that what comes late does not bring it back."""
        return uid in self.jobs

    def known(self, uid: str) -> Known:
        """The models of the job's last pass; empty when it is long ago."""
        models = self.models[uid] = self.models.pop(uid, Known())
        if len(self.models) > MOST_MODELS:
            del self.models[next(iter(self.models))]
        return models

    def forget(self, uid: str) -> None:
        self.jobs.pop(uid, None)
        self.models.pop(uid, None)

    def prune(self, alive: Set[str]) -> None:
        """Drop jobs that are not among `alive`: a pass that ran when its job went brought them back."""
        for uid in (self.jobs.keys() | self.models.keys()) - alive:
            self.forget(uid)

    def observe(self, namespace: str, uid: str, store: PodStore) -> Observed:
        """Everything outside the job's own object, at this moment."""
        key = owner_key(namespace, uid)
        pods, gone = store.of_job(key)
        memory = self.of(uid)
        known = not self.queues_listed.isdisjoint((None, namespace))
        return Observed(
            pods=pods,
            gone=gone,
            helpers=store.helpers_of(key),
            synced_at=self._acts_since(store.sight.since(namespace)),
            progress=memory.progress,
            step_moved_at=memory.step_moved_at,
            inspection=memory.inspection,
            unheard=memory.unheard,
            stacks=memory.stacks,
            yielding=memory.yielding,
            protection=memory.protection,
            ungrouped=memory.ungrouped,
            shared_due=self._shared_due(uid, memory.shared_at or store.sight.since(namespace)),
            problem=memory.problem,
            making=memory.making,
            nodes=self.nodes.of(pods),
            sees_nodes=self.nodes.are_seen,
            heard=memory.heard,
            unasked=memory.unasked,
            log=memory.log or (LogView() if self.reads_logs else None),
            apis=self.apis,
            queue=self.queues.get(key, QueueView()) if known else None,
            follows_queues=self.queues_wanted.is_set(),
            limits=self.limits,
            room=memory.room,
            egress_bounds=self.egress_bounds,
            storage_classes=tuple(memory.storage_classes.values()),
        )

    def _acts_since(self, seen: datetime | None) -> datetime | None:
        """Since when pods are seen and somebody acts on it: while there was no leader nobody made any."""
        return seen if seen is None or self.acting_since is None else max(seen, self.acting_since)

    def _shared_due(self, uid: str, since: datetime | None) -> datetime | None:
        """After one period to two: the jobs of an operator that has just started do not fall due together."""
        if since is None or self.keep_shared_s is None:
            return None
        return since + timedelta(seconds=self.keep_shared_s * (1 + crc32(uid.encode()) / 2**32))
