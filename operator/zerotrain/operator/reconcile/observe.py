"""What reconcile sees of the cluster: typed, frozen views without a trace of the API client.

The reflector in `cluster` turns every pod event into a `PodView` at once (by `pods.pod_view`) and drops the
JSON, so that 20,000 pods stay small; tests build the same views by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.progress import Progress, Termination
from zerotrain.operator.reconcile.inspection import Inspection
from zerotrain.operator.reconcile.limits import START_LIMITS, StartLimits
from zerotrain.operator.reconcile.nodes import NodeView
from zerotrain.operator.reconcile.queues import ClusterApis, QueueView


class PodState(Enum):
    """One worker's state, as far as an attempt's fate depends on it."""

    PENDING = "Pending"
    """The worker's container has not started."""
    RUNNING = "Running"
    GOING = "Going"
    """Deletion was requested and the container has not ended yet."""
    SUCCEEDED = "Succeeded"
    YIELDED = "Yielded"
    """Ended with the code that says: checkpoint durable, stopped on request."""
    FAILED = "Failed"


class Stage(Enum):
    """How far the start of a pod is that has a node."""

    MOUNTING = "Mounting"
    """The kubelet sets up its volumes, then its network."""
    PULLING = "Pulling"
    """It creates the containers, for which images may have to be pulled."""
    INITIALIZING = "Initializing"
    """An init container runs."""


ENDED = frozenset({PodState.SUCCEEDED, PodState.YIELDED, PodState.FAILED})

_TERMINAL = frozenset({"Succeeded", "Failed"})
"""Phases of pods none of whose containers runs any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """The fields of a worker pod that decisions rest on."""

    name: str
    uid: str
    attempt: int
    index: int
    """Index of the worker, the rank of its node in the rendezvous."""
    helper: str | None = None
    """What a pod of the job that is no worker is there for; attempt and index then mean nothing."""
    phase: str = "Pending"
    node: str | None = None
    pod_ip: str | None = None
    ready: bool = False
    """The worker's container is; what runs beside it does not count."""
    scheduled: bool = False
    unscheduled_reason: str | None = None
    refused_seen_at: datetime | None = None
    """When this operator first saw that the scheduler has no node for it; None while it makes one free."""
    started: bool = False
    """The worker's container runs now or has run."""
    waiting: str | None = None
    """Why the container does not start: `Reason: message` of its waiting state."""
    stage: Stage | None = None
    """None without a node, and once the worker's container has started."""
    needs: str = ""
    """ConfigMaps, Secrets and claims that its volumes are made of; the init container that runs."""
    bound_at: datetime | None = None
    """When it got its node, while it starts."""
    exit_code: int | None = None
    """Of the worker's container, or of `failed_container`."""
    exit_reason: str | None = None
    """The container runtime's word on the end (`OOMKilled`, `Error`, ...)."""
    pod_reason: str | None = None
    """`status.reason` of the pod (`Evicted`, `NodeLost`, `UnexpectedAdmissionError`, ...)."""
    pod_message: str | None = None
    disruption: str | None = None
    """Reason of the `DisruptionTarget` condition (`PreemptionByScheduler`, `DeletionByTaintManager`, ...)."""
    termination: Termination | None = None
    failed_container: str | None = None
    """The init container whose failure ended the pod before the worker's container started. Code, reason and
    last words are its own, and the contract's meanings of codes do not hold for it."""
    beside: str | None = None
    """How a sidecar ended that did so before the worker failed."""
    finished_at: datetime | None = None
    deletion_at: datetime | None = None
    """When the grace of the requested deletion ends."""
    deletion_grace_s: int | None = None
    finalizers: tuple[str, ...] = ()
    """What keeps a pod from going whose deletion was asked for."""
    ended_seen_at: datetime | None = None
    """When this operator first saw the end; for waiting, never for ordering causes."""

    @property
    def worker_code(self) -> int | None:
        """Exit code of the worker's own container."""
        return self.exit_code if self.failed_container is None else None

    @property
    def state(self) -> PodState:
        # A rank that came to its end says so, also where its node was just putting the pod out.
        if self.worker_code == ExitCode.DONE:
            return PodState.SUCCEEDED
        if self.worker_code == ExitCode.YIELDED:
            return PodState.YIELDED
        if self.exit_code is not None and self.pod_reason is None:
            return PodState.FAILED
        if self.phase == "Failed":
            return PodState.FAILED
        if self.phase == "Succeeded":
            return PodState.SUCCEEDED
        if self.deletion_at is not None:
            return PodState.GOING
        return PodState.RUNNING if self.started else PodState.PENDING

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def lingers(self) -> bool:
        """Whether another container outlives the worker's, as a sidecar that a webhook put in may. Until it
        has ended, too, the pod's devices count as taken."""
        return self.ended and self.phase not in _TERMINAL

    @property
    def is_over(self) -> bool:
        """Whether nothing of the pod runs any more."""
        return self.ended and not self.lingers


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An action of the last pass that the API server refused; shown in conditions until it succeeds."""

    reason: str
    """CamelCase, as a condition's reason (`QuotaExceeded`, `NameTaken`, ...)."""
    message: str
    lasting: bool = False
    """Only people can change it: it does not pass by itself, as a quota that is used up may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class YieldState:
    """How far the operator's request to checkpoint and stop has come for one attempt."""

    attempt: int
    acked_at: datetime | None = None
    error: str | None = None
    refused: bool = False
    """Asking again cannot help: no channel, no token, a program of the user's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StacksView:
    """How the collection of the ranks' stacks ended."""

    attempt: int
    at: datetime
    """When it began: what was collected for one alarm says nothing of a later one."""
    config_map: str = ""
    """Where they are; empty when nothing could be kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """What became of the last request about an attempt's disruption budget."""

    attempt: int
    exists: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LogView:
    """That logs can be read here, and the last attempt whose failing rank's was."""

    attempt: int = 0
    error: str = ""
    """Why nothing could be stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageClassView:
    """What a StorageClass says of its volumes, as the answer to an AskStorageClass."""

    name: str
    """Empty where a claim that was asked about names none, or could not be read."""
    at: datetime
    """When it was read."""
    encryption: str | None = None
    """What declares that its volumes are encrypted; None when nothing does."""
    problem: str | None = None
    """Why it could not be read, in the API server's words."""
    field: str = "spec.nvme"
    claim: str = ""

    def answers(self, field: str, claim: str, name: str) -> bool:
        """Whether that was the question."""
        return (self.field, self.claim) == (field, claim) and (bool(claim) or self.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """A hint on how many workers the cluster could hold at one moment; nothing is kept free for them."""

    at: datetime
    workers: int
    """How many were asked for."""
    fits: int | None
    """None where it cannot be told: nodes or pods may not be read, or a resource is in no node's allocatable,
    as one that comes through dynamic resource allocation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Everything about one job outside its own object at one moment."""

    pods: tuple[PodView, ...] = ()
    """All pods that this job's UID owns, of any attempt."""
    gone: tuple[PodView, ...] = ()
    """Last views of pods that were deleted while this operator watched."""
    helpers: tuple[PodView, ...] = ()
    """Pods of this job that are no workers, as the one that verifies a checkpoint."""
    synced_at: datetime | None = None
    """Since when this operator knows all pods and leads; what was missing then has no earlier history."""
    progress: Progress | None = None
    """Newest record of rank 0."""
    step_moved_at: datetime | None = None
    """When its step was seen to move, by this operator's clock."""
    inspection: Inspection | None = None
    """The last look at all workers; made only when rank 0's step went stale or its pod does not answer."""
    unheard: bool = False
    """Worker 0 runs and has not answered for long: nobody knows whether the job moves."""
    stacks: StacksView | None = None
    """The stacks that were collected last."""
    yielding: YieldState | None = None
    protection: Protection | None = None
    """None while this operator asked for nothing yet."""
    ungrouped: int | None = None
    """The attempt whose pod group this operator deleted last."""
    shared_due: datetime | None = None
    """From when the objects that pods share should be looked at again; None while nobody counts."""
    problem: Problem | None = None
    in_line: bool = False
    """The job's pods are not created yet: other jobs of its namespace create theirs first."""
    making: bool = False
    """The last pass left pods of the attempt to this one, though nothing kept it from them."""
    apis: ClusterApis | None = None
    """Gang schedulers and queues of the cluster; None until somebody asked."""
    queue: QueueView | None = None
    """The job's Workload in Kueue; None while it is not known whether there is one."""
    follows_queues: bool = False
    """Workloads are watched, or looked for, whether or not `queue` is known yet."""
    limits: StartLimits = START_LIMITS
    older_in_shortage: str | None = None
    """Name of an older job of the namespace that is refused a part of what it needs and holds another; looked
    up for jobs that are, or gave back."""
    room: Room | None = None
    """The last reading of the cluster's free room; None where none was made."""
    egress_bounds: tuple[str, ...] = ()
    """Networks that jobs of this installation may ask for in spec.network."""
    storage_classes: tuple[StorageClassView, ...] = ()
    """What the class that was asked about declares; None when nobody asked."""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    """By name, those that hold pods of this job and are not simply well; empty while they are not known."""
    sees_nodes: bool = True
    """Whether the operator may look at nodes: one with namespaces of its own may be refused."""
    heard: Mapping[str, datetime] = field(default_factory=dict)
    """By node that is not ready: when a worker on it last answered."""
    unasked: Set[str] = frozenset()
    """Such nodes whose workers were to be asked last, and no slot was free."""
    log: LogView | None = None
    """None where no log can be read (simulated nodes)."""
