"""The input of reconcile from the cluster: typed, frozen views that are independent of the API client.

The reflector in `cluster` turns every pod event into a `PodView` at once (with `pods.pod_view`) and drops the
JSON, so that 20,000 pods stay small. Tests build the same views by hand.
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
    """The state of one worker's pod, as far as it affects the attempt."""

    PENDING = "Pending"
    """The worker's container has not started."""
    RUNNING = "Running"
    TERMINATING = "Terminating"
    """Deletion was requested, and the container has not ended yet."""
    SUCCEEDED = "Succeeded"
    YIELDED = "Yielded"
    """Ended with the code for a durable checkpoint and a stop on request."""
    FAILED = "Failed"


class Stage(Enum):
    """The progress in the start of a pod that has a node."""

    MOUNTING = "Mounting"
    """The kubelet sets up the pod's volumes, then its network."""
    PULLING = "Pulling"
    """The kubelet creates the containers and may have to pull images."""
    INITIALIZING = "Initializing"
    """An init container runs."""


ENDED = frozenset({PodState.SUCCEEDED, PodState.YIELDED, PodState.FAILED})

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
    def state(self) -> PodState:
        # A rank that completed its work says so, even if its node was evicting the pod at that moment.
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
            return PodState.TERMINATING
        return PodState.RUNNING if self.started else PodState.PENDING

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An action of the last pass that the API server rejected. Conditions show it until the action
    succeeds."""

    reason: str
    """Reason in CamelCase, as in a condition (`QuotaExceeded`, `NameTaken`, ...)."""
    message: str
    lasting: bool = False
    """Whether only the user can resolve it. An exhausted quota, for example, may resolve by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class YieldState:
    """Progress of the operator's request to one attempt to write a checkpoint and stop."""

    attempt: int
    acked_at: datetime | None = None
    error: str | None = None
    refused: bool = False
    """Whether repeating the request is useless: no channel, no token, or a user program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StacksView:
    """The result of collecting the ranks' stacks."""

    attempt: int
    at: datetime
    """Time at which the collection began: stacks of one alarm say nothing about a later one."""
    config_map: str = ""
    """Name of the ConfigMap with the stacks; empty if none could be stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """The result of the last request about an attempt's disruption budget."""

    attempt: int
    exists: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LogView:
    """Evidence that logs can be read, and the last attempt whose failed rank's log was read."""

    attempt: int = 0
    error: str = ""
    """Reason why no log could be stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageClassView:
    """The encryption that a StorageClass declares, as the answer to an AskStorageClass."""

    name: str
    """Name of the class; empty if the claim in question names none, or could not be read."""
    at: datetime
    """Time at which the class was read."""
    encryption: str | None = None
    """The declaration that the class's volumes are encrypted; None without one."""
    problem: str | None = None
    """Reason why it could not be read, in the API server's words."""
    field: str = "spec.nvme"
    claim: str = ""

    def answers(self, field: str, claim: str, name: str) -> bool:
        """Return whether the view answers this question."""
        return (self.field, self.claim) == (field, claim) and (bool(claim) or self.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """A hint on how many workers the cluster could hold at one moment; nothing is reserved for them."""

    at: datetime
    workers: int
    """Number of workers that the hint was requested for."""
    fits: int | None
    """Number of workers that fit; None if it cannot be determined.

    That is the case if nodes or pods may not be read, or if no node's allocatable contains a resource, such
    as one from dynamic resource allocation.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The state of one job outside its own object, at one moment."""

    pods: tuple[PodView, ...] = ()
    """All pods that this job's UID owns, of any attempt."""
    gone: tuple[PodView, ...] = ()
    """Last views of pods that were deleted while this operator watched."""
    helpers: tuple[PodView, ...] = ()
    """Pods of this job that are no workers, such as the one that verifies a checkpoint."""
    synced_at: datetime | None = None
    """Time since which this operator leads and knows all pods. Of pods that were missing then, no earlier
    state is known."""
    progress: Progress | None = None
    """Newest record of rank 0."""
    step_moved_at: datetime | None = None
    """Time at which rank 0's step was seen to change, by this operator's clock."""
    inspection: Inspection | None = None
    """The last inspection of all workers. It is made only if rank 0's step is stale or its pod does not
    answer."""
    unresponsive: bool = False
    """Whether worker 0 runs and has not answered for long, so that the job's progress is unknown."""
    stacks: StacksView | None = None
    """The result of the last collection of stacks."""
    yielding: YieldState | None = None
    protection: Protection | None = None
    """The last result about the disruption budget; None while this operator has requested nothing."""
    ungrouped: int | None = None
    """The attempt whose pod group this operator deleted last."""
    shared_due: datetime | None = None
    """Time from which the shared objects of the pods should be checked again; None while no check is
    scheduled."""
    problem: Problem | None = None
    in_start_queue: bool = False
    """Whether the job's pods are not created yet because other jobs of its namespace create theirs first."""
    creating: bool = False
    """Whether the last pass left the creation of some pods to this one, though nothing prevented it."""
    apis: ClusterApis | None = None
    """Gang schedulers and queues of the cluster; None until discovery has run."""
    queue: QueueView | None = None
    """The job's Workload in Kueue; None while it is not known whether one exists."""
    follows_queues: bool = False
    """Whether Workloads are watched or looked up, even if `queue` is not known yet."""
    limits: StartLimits = START_LIMITS
    older_in_shortage: str | None = None
    """Name of an older job of the namespace that holds a part of its resources and is refused the rest.

    It is looked up for jobs in the same state, and for jobs that released their resources.
    """
    capacity: Capacity | None = None
    """The last reading of the cluster's free capacity; None without a reading."""
    egress_bounds: tuple[str, ...] = ()
    """Networks that jobs of this installation may request in spec.network."""
    storage_classes: tuple[StorageClassView, ...] = ()
    """Answers about the encryption of StorageClasses; empty if nothing was asked."""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    """Nodes that hold pods of this job and are not simply healthy, by name; empty while nodes are not
    known."""
    sees_nodes: bool = True
    """Whether the operator may read nodes; one that is restricted to namespaces may not."""
    last_responses: Mapping[str, datetime] = field(default_factory=dict)
    """Time at which a worker on the node last answered, by name of the node, for nodes that are not ready."""
    unasked: Set[str] = frozenset()
    """Nodes that are not ready and whose workers were not asked in the last round, because no slot was
    free."""
    log: LogView | None = None
    """The state of the log collection; None if no log can be read (simulated nodes)."""
