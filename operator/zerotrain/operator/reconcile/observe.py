"""The input of reconcile from the cluster: typed, frozen views that are independent of the API client.

The reflector in `cluster` turns every pod event into a `PodView` at once (with `pod_reader.pod_view`) and
drops the JSON, so that 20,000 pods stay small. Tests build the same views by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime

from zerotrain.contract.progress import Progress
from zerotrain.operator.api.core.meta import Toleration
from zerotrain.operator.api.scheduling import Gang
from zerotrain.operator.reconcile.inspection import Inspection
from zerotrain.operator.reconcile.nodes import NodeView
from zerotrain.operator.reconcile.pods import PodView


@dataclass(frozen=True, kw_only=True, slots=True)
class StartLimits:
    """Limits in seconds on how long an attempt may hold a part of what it needs: options of the operator."""

    refused_creation_s: float = 60.0
    """Limit for pods that the API server rejects while other pods of the attempt exist."""
    start_deadline_s: float = 600.0
    """Limit for the pods without a node while others have one.

    A cluster autoscaler needs minutes to add a node. The job's own runPolicy.startDeadlineSeconds takes
    precedence.
    """
    max_hold_off_s: float = 300.0
    """Longest hold-off after an attempt that released what it held."""


START_LIMITS = StartLimits()
"""Defaults of the operator's options."""


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
    deleting: bool = False
    """Whether its deletion was requested, and finalizers keep it."""
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
    lost_attempt: int = 0
    """Attempt of pods that existed before the job was read, if its status has none: it was reset. 0
    otherwise."""
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
    """Whether the job's pods are not created yet because other jobs create theirs first."""
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
