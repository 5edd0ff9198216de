"""The output of one pass of reconcile.

`cluster.executor` carries it out in this order: the status write, then the events (only if that write was
accepted), then the actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from zerotrain.operator.api import AttemptShape, ZeroTrainingJobStatus
from zerotrain.operator.constants import CONTAINER_NAME


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One Kubernetes event on the job. An event with the same reason, attempt and message is written once."""

    reason: str
    message: str
    type: EventType = EventType.NORMAL
    attempt: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateWorkers:
    """Ensure that the attempt's shared objects exist, then create the pods of these worker indices."""

    attempt: int
    indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepShared:
    """Recreate those of the attempt's shared objects that were deleted."""

    attempt: int
    protected: int | None = None
    """Number of workers of the attempt if its disruption budget is one of the objects; None otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteWorkers:
    """Delete all pods of one attempt with one request."""

    attempt: int
    grace_s: int | None
    """Grace period in seconds; None keeps the pods' own terminationGracePeriodSeconds."""
    spared: int | None = None
    """Index of a worker that stays for now, because its log is still to be read."""
    ended: bool = True
    """False spares pods that have ended by then, because their termination message may not have been read
    yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletePods:
    """Delete these pods one by one; `grace_s` 0 removes them without waiting for their node."""

    names_uids: tuple[tuple[str, str], ...]
    grace_s: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveLog:
    """Store the last log lines of a rank in the job's ConfigMap of failures.

    If they cannot be read or stored, the ConfigMap or the operator's log says so; the following actions are
    carried out in any case.
    """

    attempt: int
    pod: str
    rank: int | None
    """Rank of the lines; None takes the lines of all ranks of the pod."""
    key: str
    title: str
    """First line of the stored text."""
    container: str = CONTAINER_NAME
    """The worker's container, or the init container that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestYield:
    """Ask a worker to write a checkpoint and stop. It informs all ranks; the request is safe to repeat."""

    attempt: int
    pod: str
    pod_ip: str | None
    others: tuple[tuple[str, str | None], ...] = ()
    """Name and address of further pods to ask: ranks of a user program may not inform each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProtectWorkers:
    """Create the attempt's disruption budget."""

    attempt: int
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnprotectWorkers:
    """Delete the attempt's disruption budget."""

    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateVerification:
    """Create the pod that reads every byte of one checkpoint."""

    pod: str
    checkpoint: str
    """Name of the checkpoint in the job's folder."""
    limit_s: int
    """Seconds after which the pod ends by itself, even if no operator runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSource:
    """A worker that is asked for the stacks of its ranks."""

    worker: int
    pod: str
    pod_ip: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetGroup:
    """Delete the pod group of an attempt that is over."""

    attempt: int
    gang: str
    """API version of the group, as in the attempt's shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectStacks:
    """Ask these workers for the stacks of their ranks and store them in a ConfigMap of the job.

    This continues in the background after the pass, and is safe to repeat.
    """

    attempt: int
    sources: tuple[StackSource, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoverApis:
    """Find out which gang schedulers and queues the cluster has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskStorageClass:
    """Find out what a StorageClass declares about the encryption of its volumes."""

    field: str = "spec.nvme"
    """The field of the spec that the volume belongs to."""
    name: str = ""
    """Name of the class; empty if the claim names it."""
    claim: str = ""
    """Name of the PersistentVolumeClaim in the job's namespace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCapacity:
    """Read the cluster's nodes and pods once, for a hint on how many workers of an attempt would fit."""

    shape: AttemptShape


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


@dataclass(frozen=True, kw_only=True, slots=True)
class AskQueue:
    """Bring the job's Workload in Kueue to the next step, and watch it from now on."""

    step: QueueStep
    workers: int = 0
    """Number of workers, for CREATE."""
    excluded_nodes: tuple[str, ...] = ()
    """Nodes on which the queue must not place the workers, for CREATE."""
    queue: str = ""
    """Name of the queue, for CREATE."""
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteJob:
    """Delete the job, because its time to live after the end is over."""


Action = (
    CreateWorkers
    | KeepShared
    | DeleteWorkers
    | DeletePods
    | SaveLog
    | RequestYield
    | ProtectWorkers
    | UnprotectWorkers
    | ForgetGroup
    | CollectStacks
    | CreateVerification
    | DiscoverApis
    | AskStorageClass
    | ReadCapacity
    | AskQueue
    | DeleteJob
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The outcome of one pass."""

    status: ZeroTrainingJobStatus | None = None
    """The whole new status; None if the stored one is already right."""
    events: tuple[Event, ...] = ()
    actions: tuple[Action, ...] = ()
    wake_at: datetime | None = None
    """Time of the next pass if no event causes an earlier one."""


NOTHING = Plan()
