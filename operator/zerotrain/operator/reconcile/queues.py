"""The state of the cluster's gang schedulers, and of the queue that admits a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from zerotrain.operator.api.core.meta import Toleration
from zerotrain.operator.api.scheduling import Gang


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterApis:
    """The API versions that the cluster serves, among those that the operator can write."""

    at: datetime
    """Time of the discovery."""
    gangs: Mapping[Gang, str] = field(default_factory=dict)
    """API version of the pod group, by mechanism; a mechanism that the cluster lacks is absent."""
    kueue: str | None = None
    """API version of Kueue's Workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueView:
    """The job's Workload in Kueue; the defaults describe one that does not exist."""

    exists: bool = False
    workers: int = 0
    """Number of workers that the Workload was made for."""
    made_from: str = ""
    """Hash of what its pods were described from; empty if an older operator made it."""
    queue: str = ""
    priority_class: str = ""
    admitted: bool = False
    evicted: str | None = None
    """Reason why the queue evicts the job: `Preempted: ...`."""
    holds_quota: bool = False
    finished: bool = False
    pods_ready: bool = False
    message: str = ""
    """The queue's message on why it does not admit the job."""
    cluster_queue: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    gates: tuple[str, ...] = ()
    """Scheduling gates of the pods that the queue removes once it has placed each pod."""
    excluded_nodes: frozenset[str] = frozenset()
    """Nodes that the Workload excludes for the pods."""
    problem: str | None = None
    """Reason why an admission cannot be used, such as a flavor that does not exist."""


class QueueStep(StrEnum):
    """The next state of the job's Workload."""

    FOLLOW = "Follow"
    """Watch the Workload without changing it."""
    CREATE = "Create"
    DELETE = "Delete"
    RELEASE = "Release"
    """Release the quota after an eviction, because all pods are gone."""
    FINISH = "Finish"
    PODS_READY = "PodsReady"
    PODS_NOT_READY = "PodsNotReady"
