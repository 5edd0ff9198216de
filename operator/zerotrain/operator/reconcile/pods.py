"""The views of a job's pods that decisions depend on: typed, frozen, and independent of the API client.

`pod_reader` makes them from JSON. Tests build the same views by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.progress import Termination


class WorkerState(Enum):
    """The state of one worker, or of another pod of the job. A pod alone shows six of them: whether a worker
    is absent, stopped or lost is known of an attempt."""

    ABSENT = "Absent"
    """A worker whose pod is not created yet."""
    PENDING = "Pending"
    """The worker's container has not started."""
    RUNNING = "Running"
    TERMINATING = "Terminating"
    """A worker whose pod is being deleted; the program may still write a checkpoint and yield."""
    SUCCEEDED = "Succeeded"
    YIELDED = "Yielded"
    """Ended with the code for a durable checkpoint and a stop on request."""
    STOPPED = "Stopped"
    """A user program that ended with 0 when its pod was to go.

    Many programs answer SIGTERM with 0, so it is not known whether the program had finished. It saved what it
    saves on SIGTERM.
    """
    FAILED = "Failed"
    LOST = "Lost"
    """A worker whose pod existed once and is gone; how its program ended is not known."""


class Stage(Enum):
    """The progress in the start of a pod that has a node."""

    MOUNTING = "Mounting"
    """The kubelet sets up the pod's volumes, then its network."""
    PULLING = "Pulling"
    """The kubelet creates the containers and may have to pull images."""
    INITIALIZING = "Initializing"
    """An init container runs."""


ENDED = frozenset({WorkerState.SUCCEEDED, WorkerState.YIELDED, WorkerState.FAILED})

_TERMINAL = frozenset({"Succeeded", "Failed"})
"""Phases of pods in which no container runs any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """The fields of a worker pod that decisions depend on."""

    name: str
    uid: str
    attempt: int
    index: int
    """Index of the worker, the rank of its node in the rendezvous."""
    helper: str | None = None
    """Purpose of a pod of the job that is no worker; attempt and index have no meaning then."""
    phase: str = "Pending"
    node: str | None = None
    pod_ip: str | None = None
    ready: bool = False
    """Whether the worker's container is ready; other containers do not count."""
    scheduled: bool = False
    unscheduled_reason: str | None = None
    refused_seen_at: datetime | None = None
    """Time at which this operator first saw that the scheduler found no node; None while the scheduler
    preempts pods for it."""
    ignored_seen_at: datetime | None = None
    """Time at which this operator first saw that no scheduler has reported on the pod."""
    started: bool = False
    """Whether the worker's container runs now or has run."""
    waiting: str | None = None
    """Reason why the container does not start: `Reason: message` of its waiting state."""
    stage: Stage | None = None
    """Stage of the start; None without a node, and once the worker's container has started."""
    needs: str = ""
    """ConfigMaps, Secrets and claims that the pod's volumes need, or the init container that runs."""
    bound_at: datetime | None = None
    """Time at which the pod got its node, while it starts."""
    exit_code: int | None = None
    """Exit code of the worker's container, or of `failed_container`."""
    exit_reason: str | None = None
    """Reason of the end given by the container runtime (`OOMKilled`, `Error`, ...)."""
    pod_reason: str | None = None
    """`status.reason` of the pod (`Evicted`, `NodeLost`, `UnexpectedAdmissionError`, ...)."""
    pod_message: str | None = None
    disruption: str | None = None
    """Reason of the `DisruptionTarget` condition (`PreemptionByScheduler`, `DeletionByTaintManager`, ...)."""
    termination: Termination | None = None
    failed_container: str | None = None
    """Name of the init container whose failure ended the pod before the worker's container started.

    Exit code, reason and termination message are then those of the init container, and the contract's
    meanings of exit codes do not apply.
    """
    failed_sidecar: str | None = None
    """Description of the end of a sidecar that ended before the worker failed."""
    finished_at: datetime | None = None
    deletion_at: datetime | None = None
    """End of the grace period of the requested deletion."""
    deletion_grace_s: int | None = None
    finalizers: tuple[str, ...] = ()
    """Finalizers of a pod whose deletion was requested; they keep it from being removed."""
    ended_seen_at: datetime | None = None
    """Time at which this operator first saw the end. It is used for waiting, never to order causes."""

    @property
    def worker_code(self) -> int | None:
        """Exit code of the worker's own container; None if an init container failed."""
        return self.exit_code if self.failed_container is None else None

    @property
    def state(self) -> WorkerState:
        # A rank that completed its work says so, even if its node was evicting the pod at that moment.
        if self.worker_code == ExitCode.DONE:
            return WorkerState.SUCCEEDED
        if self.worker_code == ExitCode.YIELDED:
            return WorkerState.YIELDED
        if self.exit_code is not None and self.pod_reason is None:
            return WorkerState.FAILED
        if self.phase == "Failed":
            return WorkerState.FAILED
        if self.phase == "Succeeded":
            return WorkerState.SUCCEEDED
        if self.deletion_at is not None:
            return WorkerState.TERMINATING
        return WorkerState.RUNNING if self.started else WorkerState.PENDING

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def lingers(self) -> bool:
        """Whether another container outlives the worker's, such as a sidecar that a webhook injected.

        Until that container has ended as well, the pod's devices count as taken.
        """
        return self.ended and self.phase not in _TERMINAL

    @property
    def is_over(self) -> bool:
        """Whether no container of the pod runs any more."""
        return self.ended and not self.lingers
