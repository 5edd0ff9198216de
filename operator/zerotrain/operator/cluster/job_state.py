"""Memory of the operator about jobs between passes. Losing it costs time, never correctness."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from zlib import crc32

from zerotrain.contract.progress import Progress
from zerotrain.operator.cluster.discovery import Priorities
from zerotrain.operator.cluster.nodes import NodeStore
from zerotrain.operator.cluster.store import PodStore, owner_key
from zerotrain.operator.reconcile import (
    Capacity,
    Known,
    LogView,
    Observed,
    Problem,
    Protection,
    StacksView,
    StorageClassView,
    YieldState,
)
from zerotrain.operator.reconcile.inspection import Inspection
from zerotrain.operator.reconcile.observe import ClusterApis, QueueView, StartLimits

MOST_MODELS = 256
"""Number of jobs whose parsed models are kept: those that have pass after pass. The models of all other jobs
would fill most of the operator's memory, to save a fifth of a millisecond now and then."""


@dataclass(slots=True)
class JobState:
    """State that the operator keeps of one job."""

    problem: Problem | None = None
    refused_until: float = 0.0
    """End of the backoff after `problem`, by the monotonic clock."""
    making: bool = False
    """Whether the last pass left pods to create, though nothing prevented it from creating them."""
    failures: int = 0
    """Number of consecutive passes that ended in a problem; determines the backoff."""
    conflicts: int = 0
    """Number of consecutive passes whose status write met a conflict; determines their own backoff."""
    yielding: YieldState | None = None
    protection: Protection | None = None
    ungrouped: int | None = None
    """Attempt whose pod group is gone."""
    progress: Progress | None = None
    step_moved_at: datetime | None = None
    """Time at which the job's step was seen to move, by the clock that decides passes."""
    inspection: Inspection | None = None
    unresponsive: bool = False
    """Whether worker 0 runs and has been unresponsive for long."""
    responded_at: dict[str, datetime] = field(default_factory=dict)
    """Time at which a worker last answered, by the name of a node that is not ready."""
    unasked: set[str] = field(default_factory=set)
    """Nodes that are not ready and whose workers were not polled in time, for want of slots or budget."""
    stacks: StacksView | None = None
    log: LogView | None = None
    capacity: Capacity | None = None
    storage_classes: dict[str, StorageClassView] = field(default_factory=dict)
    """Views of the StorageClasses, by the part of the job whose volume it is."""
    ensured: int | None = None
    """Hash of the shared objects that are known to exist as they should for one attempt."""
    shared_at: datetime | None = None
    """Time at which the shared objects were last made or checked."""
    secret: str | None = None
    """Name of the Secret that was last made or found to exist."""


@dataclass(slots=True)
class JobStates:
    """States of all jobs, by UID, and what the operator knows for all of them."""

    jobs: dict[str, JobState] = field(default_factory=dict)
    keep_shared_s: float | None = None
    """Seconds between two checks of an attempt's shared objects, at the latest after twice that; None for no
    checks."""
    acting_since: datetime | None = None
    """Time at which this replica began to lead. None without leader election."""
    limits: StartLimits = field(default_factory=StartLimits)
    egress_bounds: tuple[str, ...] = ()
    """Networks that jobs may request in spec.network."""
    nodes: NodeStore = field(default_factory=NodeStore)
    reads_logs: bool = False
    """Whether pods have logs; false on simulated nodes."""
    apis: ClusterApis | None = None
    queues_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set once a job is in a queue: from then on the Workloads are watched."""
    queues: dict[str, QueueView] = field(default_factory=dict)
    """Views of the Workloads, by `owner_key`, whether or not the job has had a pass: the list may arrive
    before the job does."""
    queues_listed: set[str | None] = field(default_factory=set)
    """Namespaces (None: all) whose Workloads are known, so that a job there without a known one has none."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that is held while all nodes and pods are read: one job at a time."""
    reads_again_at: float = 0.0
    """Time of the event loop from which on they may be read again."""
    reading_stacks: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that is held while the stacks of a worker are read beside the event loop: one worker at a time."""
    priorities: Priorities = field(default_factory=Priorities)
    collections: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Tasks that collect stacks, by the job's UID; the reference also keeps the tasks alive."""
    models: dict[str, Known] = field(default_factory=dict)
    """Models of the MOST_MODELS jobs that had the latest passes, the most recent at the end."""

    def of(self, uid: str) -> JobState:
        return self.jobs.setdefault(uid, JobState())

    def knows(self, uid: str) -> bool:
        """Return whether the job is remembered, so that late results do not bring it back."""
        return uid in self.jobs

    def known(self, uid: str) -> Known:
        """Return the models of the job's last pass; empty when that was long ago."""
        models = self.models[uid] = self.models.pop(uid, Known())
        if len(self.models) > MOST_MODELS:
            del self.models[next(iter(self.models))]
        return models

    def forget(self, uid: str) -> None:
        self.jobs.pop(uid, None)
        self.models.pop(uid, None)

    def prune(self, alive: Set[str]) -> None:
        """Drop jobs that are not among `alive`: a pass that ran during a job's deletion brought them back."""
        for uid in (self.jobs.keys() | self.models.keys()) - alive:
            self.forget(uid)

    def observe(self, namespace: str, uid: str, store: PodStore) -> Observed:
        """Return everything outside the job's own object, at this moment."""
        key = owner_key(namespace, uid)
        pods, gone = store.of_job(key)
        job_state = self.of(uid)
        known = not self.queues_listed.isdisjoint((None, namespace))
        return Observed(
            pods=pods,
            gone=gone,
            helpers=store.helpers_of(key),
            synced_at=self._acts_since(store.sight.since(namespace)),
            progress=job_state.progress,
            step_moved_at=job_state.step_moved_at,
            inspection=job_state.inspection,
            unresponsive=job_state.unresponsive,
            stacks=job_state.stacks,
            yielding=job_state.yielding,
            protection=job_state.protection,
            ungrouped=job_state.ungrouped,
            shared_due=self._shared_due(uid, job_state.shared_at or store.sight.since(namespace)),
            problem=job_state.problem,
            creating=job_state.making,
            nodes=self.nodes.of(pods),
            sees_nodes=self.nodes.are_seen,
            last_responses=job_state.responded_at,
            unasked=job_state.unasked,
            log=job_state.log or (LogView() if self.reads_logs else None),
            apis=self.apis,
            queue=self.queues.get(key, QueueView()) if known else None,
            follows_queues=self.queues_wanted.is_set(),
            limits=self.limits,
            capacity=job_state.capacity,
            egress_bounds=self.egress_bounds,
            storage_classes=tuple(job_state.storage_classes.values()),
        )

    def _acts_since(self, seen: datetime | None) -> datetime | None:
        """Return the time since which pods are seen and a leader acts on them: without a leader no pods were
        made."""
        return seen if seen is None or self.acting_since is None else max(seen, self.acting_since)

    def _shared_due(self, uid: str, since: datetime | None) -> datetime | None:
        """Return when the shared objects are checked next, after one to two periods: the jobs of an operator
        that has just started do not fall due together."""
        if since is None or self.keep_shared_s is None:
            return None
        return since + timedelta(seconds=self.keep_shared_s * (1 + crc32(uid.encode()) / 2**32))
