"""What decisions need to know of the cluster's gang schedulers and of the queue that admits a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from zerotrain.operator.api.core.meta import Toleration
from zerotrain.operator.api.scheduling import Gang


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterApis:
    """The API versions that the cluster serves, of those that the operator can write."""

    at: datetime
    """When discovery was asked."""
    gangs: Mapping[Gang, str] = field(default_factory=dict)
    """API version of the pod group, by mechanism; absent where the cluster has none."""
    kueue: str | None = None
    """API version of Kueue's Workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueView:
    """The job's Workload in Kueue; all defaults stand for one that does not exist."""

    exists: bool = False
    workers: int = 0
    """How many the Workload was made for."""
    made_from: str = ""
    """Hash of what its pods were described from; empty where an older operator made it."""
    queue: str = ""
    priority_class: str = ""
    admitted: bool = False
    evicted: str | None = None
    """Why the queue wants its resources back: `Preempted: ...`."""
    holds_quota: bool = False
    finished: bool = False
    pods_ready: bool = False
    message: str = ""
    """The queue's own words on why it does not admit."""
    cluster_queue: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    gates: tuple[str, ...] = ()
    """Scheduling gates of the pods that the queue opens once it has chosen a place for each."""
    excluded_nodes: frozenset[str] = frozenset()
    """Nodes that it knows the pods must not run on."""
    problem: str | None = None
    """Why an admission cannot be used, as a flavor that does not exist."""


class QueueStep(StrEnum):
    """What the job's Workload should become."""

    FOLLOW = "Follow"
    """Nothing: only watch it."""
    CREATE = "Create"
    DELETE = "Delete"
    RELEASE = "Release"
    """All pods are gone after an eviction: the quota is free again."""
    FINISH = "Finish"
    PODS_READY = "PodsReady"
    PODS_NOT_READY = "PodsNotReady"
