"""What one pass of reconcile asks for. `cluster.executor` carries it out in this order: the status write,
then (only if that write was accepted) the events, then the actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from zerotrain.operator.api import AttemptShape, ZeroTrainingJobStatus
from zerotrain.operator.constants import CONTAINER_NAME
from zerotrain.operator.reconcile.queues import QueueStep


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One Kubernetes event on the job. The same reason, attempt and message is written once."""

    reason: str
    message: str
    type: EventType = EventType.NORMAL
    attempt: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateWorkers:
    """Make sure of the attempt's shared objects, then create the pods of these worker indices."""

    attempt: int
    indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepShared:
    """Make again what somebody deleted of the attempt's shared objects."""

    attempt: int
    protected: int | None = None
    """Workers of the attempt where its disruption budget is among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteWorkers:
    """Delete all pods of one attempt with one request."""

    attempt: int
    grace_s: int | None
    """None leaves the pods their own terminationGracePeriodSeconds."""
    spared: int | None = None
    """Index of a worker that stays for now: its log is still to be read."""
    ended: bool = True
    """False leaves the pods that have ended by then, whose last words may not have been heard yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletePods:
    """Delete these pods one by one; `grace_s` 0 removes them without waiting for their node."""

    names_uids: tuple[tuple[str, str], ...]
    grace_s: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveLog:
    """Keep the last lines of a rank in the job's ConfigMap of failures. What cannot be read or stored is
    said there or in the log of this operator; the actions behind it go on either way."""

    attempt: int
    pod: str
    rank: int | None
    """None takes the lines of all ranks of the pod."""
    key: str
    title: str
    """First line of what is kept."""
    container: str = CONTAINER_NAME
    """The worker's, or the init container that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestYield:
    """Ask a worker to checkpoint and stop, by which all ranks learn it; safe to repeat."""

    attempt: int
    pod: str
    pod_ip: str | None
    others: tuple[tuple[str, str | None], ...] = ()
    """Name and address of further pods: programs of the user's own may not tell each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProtectWorkers:
    """Make the attempt's disruption budget."""

    attempt: int
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnprotectWorkers:
    """Take the attempt's disruption budget away."""

    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateVerification:
    """Make the pod that reads every byte of one checkpoint."""

    pod: str
    checkpoint: str
    """Name of the checkpoint in the job's folder."""
    limit_s: int
    """The pod ends by itself after so long, whether an operator looks or not."""


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
    """Ask these workers for the stacks of their ranks and keep them in a ConfigMap of the job. Goes on behind
    the pass; safe to repeat."""

    attempt: int
    sources: tuple[StackSource, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoverApis:
    """Find out which gang schedulers and queues the cluster has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskStorageClass:
    """Find out what a StorageClass declares of its volumes."""

    field: str = "spec.nvme"
    """The part of the job whose volume it is."""
    name: str = ""
    """The class; empty where the claim names it."""
    claim: str = ""
    """PersistentVolumeClaim of the job's namespace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRoom:
    """Read the cluster's nodes and pods once, for a hint on how many workers of an attempt would fit."""

    shape: AttemptShape


@dataclass(frozen=True, kw_only=True, slots=True)
class AskQueue:
    """Bring the job's Workload in Kueue to the next step, and watch it from now on."""

    step: QueueStep
    workers: int = 0
    """For CREATE."""
    excluded_nodes: tuple[str, ...] = ()
    """For CREATE: where the queue must not place the workers."""
    queue: str = ""
    """For CREATE: its name."""
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteJob:
    """The time to live after the end is over."""


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
    | ReadRoom
    | AskQueue
    | DeleteJob
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The outcome of one pass."""

    status: ZeroTrainingJobStatus | None = None
    """The whole new status; None when the stored one is already right."""
    events: tuple[Event, ...] = ()
    actions: tuple[Action, ...] = ()
    wake_at: datetime | None = None
    """When to look again even if nothing happens."""


NOTHING = Plan()
