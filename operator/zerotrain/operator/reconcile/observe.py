"""What reconcile sees of the cluster: typed, frozen views without a trace of the API client.

The reflector in `cluster` turns every pod event into a `PodView` at once and drops the JSON, so that
20,000 pods stay small; tests build the same views by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from zerotrain.contract.exit_codes import ExitCode, signal_of
from zerotrain.contract.progress import Progress, Termination
from zerotrain.operator.constants import (
    CONTAINER_NAME,
    LABEL_ATTEMPT,
    LABEL_HELPER,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_RANK,
)
from zerotrain.operator.reconcile.clock import parse_time
from zerotrain.operator.reconcile.inspection import Inspection
from zerotrain.operator.reconcile.nodes import NodeView
from zerotrain.operator.reconcile.queues import ClusterApis, QueueView
from zerotrain.operator.resources.identity import pod_name


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


ENDED = frozenset({PodState.SUCCEEDED, PodState.YIELDED, PodState.FAILED})

_TERMINAL = frozenset({"Succeeded", "Failed"})
"""Phases of pods none of whose containers runs any more."""

KILLED = 128 + 9
"""Code of a program that was made to end."""


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
    exit_code: int | None = None
    exit_reason: str | None = None
    """The container runtime's word on the end (`OOMKilled`, `Error`, ...)."""
    pod_reason: str | None = None
    """`status.reason` of the pod (`Evicted`, `NodeLost`, `UnexpectedAdmissionError`, ...)."""
    pod_message: str | None = None
    disruption: str | None = None
    """Reason of the `DisruptionTarget` condition (`PreemptionByScheduler`, `DeletionByTaintManager`, ...)."""
    termination: Termination | None = None
    finished_at: datetime | None = None
    deletion_at: datetime | None = None
    """When the grace of the requested deletion ends."""
    deletion_grace_s: int | None = None
    ended_seen_at: datetime | None = None
    """When this operator first saw the end; for waiting, never for ordering causes."""

    @property
    def state(self) -> PodState:
        # A rank that came to its end says so, also where its node was just putting the pod out.
        if self.exit_code == ExitCode.DONE:
            return PodState.SUCCEEDED
        if self.exit_code == ExitCode.YIELDED:
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
    """What a StorageClass says of its volumes."""

    name: str
    at: datetime
    """When it was read."""
    encryption: str | None = None
    """What declares that its volumes are encrypted; None when nothing does."""
    problem: str | None = None
    """Why it could not be read, in the API server's words."""


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
    making: bool = False
    """The last pass left pods of the attempt to this one, though nothing kept it from them."""
    apis: ClusterApis | None = None
    """Gang schedulers and queues of the cluster; None until somebody asked."""
    queue: QueueView | None = None
    """The job's Workload in Kueue; None while it is not known whether there is one."""
    follows_queues: bool = False
    """Workloads are watched, or looked for, whether or not `queue` is known yet."""
    room: Room | None = None
    """The last reading of the cluster's free room; None where none was made."""
    storage_class: StorageClassView | None = None
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


def pod_view(pod: Mapping[str, Any], *, seen_at: datetime) -> PodView | None:
    """Read a pod's JSON; None when it does not carry our labels in readable form, or not the name that goes
    with them."""
    meta, status = pod["metadata"], pod.get("status", {})
    helper = meta.get("labels", {}).get(LABEL_HELPER)
    place = (0, 0) if helper else worker_of(meta)
    if place is None:
        return None
    attempt, index = place
    conditions = {item["type"]: item for item in status.get("conditions", ())}
    container = _container(status, helper or CONTAINER_NAME)
    state = container.get("state", {})
    ended = state.get("terminated")
    code = None if ended is None else int(ended.get("exitCode", -1))
    if ended is None and status.get("phase") == "Failed":
        ended, code = _failed_init_container(pod)
    finished = ended is not None or status.get("phase") in ("Failed", "Succeeded")
    return PodView(
        name=meta["name"],
        uid=meta["uid"],
        attempt=attempt,
        index=index,
        helper=helper,
        phase=status.get("phase", "Pending"),
        node=pod.get("spec", {}).get("nodeName"),
        pod_ip=status.get("podIP"),
        ready=_is_ready(conditions.get("Ready"), container),
        scheduled=_is_true(conditions.get("PodScheduled")),
        unscheduled_reason=_unscheduled(conditions.get("PodScheduled")),
        refused_seen_at=seen_at if _is_refused(status, conditions.get("PodScheduled")) else None,
        started="running" in state or ended is not None,
        waiting=_waiting(state.get("waiting")) or _waiting_before(status, state),
        exit_code=code,
        exit_reason=(ended or {}).get("reason"),
        pod_reason=status.get("reason"),
        pod_message=status.get("message"),
        disruption=_disruption(conditions.get("DisruptionTarget")),
        termination=_termination((ended or {}).get("message"), attempt),
        finished_at=parse_time((ended or {}).get("finishedAt")),
        deletion_at=parse_time(meta.get("deletionTimestamp")),
        deletion_grace_s=meta.get("deletionGracePeriodSeconds"),
        ended_seen_at=seen_at if finished else None,
    )


def worker_of(meta: Mapping[str, Any]) -> tuple[int, int] | None:
    """Attempt and index of the worker that a pod's labels and name agree on. Labels alone are anybody's word:
    with the name, which is unique, nobody can be a second worker 0."""
    labels = meta.get("labels", {})
    try:
        attempt, index = int(labels[LABEL_ATTEMPT]), int(labels[LABEL_RANK])
        named = meta["name"] == pod_name(labels[LABEL_JOB], attempt, index)
    except (KeyError, ValueError):
        return None
    return (attempt, index) if named and attempt > 0 and index >= 0 else None


def job_uid_of(pod: Mapping[str, Any]) -> str | None:
    """UID of the job that controls this pod; None when the label and the owner do not agree."""
    uid = pod["metadata"].get("labels", {}).get(LABEL_JOB_UID)
    owners = pod["metadata"].get("ownerReferences", ())
    return uid if any(owner.get("uid") == uid and owner.get("controller") for owner in owners) else None


def _container(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    for item in status.get("containerStatuses", ()):
        if item.get("name") == name:
            return dict(item)
    return {}


def _failed_init_container(pod: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, int | None]:
    """Its end, as a plain failure: the contract's meanings of codes are the worker program's alone. What the
    deletion of its pod killed did not fail, and a sidecar among them fails no pod: it is started again."""
    before = pod.get("spec", {}).get("initContainers", ())
    sidecars = {item.get("name") for item in before if item.get("restartPolicy") == "Always"}
    for item in pod["status"].get("initContainerStatuses", ()):
        ended = item.get("state", {}).get("terminated")
        if item.get("name") not in sidecars and ended is not None and (code := ended.get("exitCode")):
            is_killed = "deletionTimestamp" in pod["metadata"] and signal_of(code) is not None
            return ended, KILLED if is_killed else 1
    return None, None


def _is_ready(condition: Mapping[str, Any] | None, container: Mapping[str, Any]) -> bool:
    """A container beside the worker's keeps the pod from being ready; so does a node that fell silent, and
    then what is said of containers is old."""
    by_another = condition is not None and condition.get("reason") == "ContainersNotReady"
    return _is_true(condition) or (by_another and container.get("ready") is True)


def _is_true(condition: Mapping[str, Any] | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _unscheduled(condition: Mapping[str, Any] | None) -> str | None:
    if condition is None or condition.get("status") != "False":
        return None
    return f"{condition.get('reason', 'Unschedulable')}: {condition.get('message', '')}".rstrip(": ")


def _is_refused(status: Mapping[str, Any], condition: Mapping[str, Any] | None) -> bool:
    """Whether the scheduler found no node, and none that it could make free by preemption."""
    said = condition or {}
    unplaced = said.get("status") == "False" and said.get("reason") == "Unschedulable"
    return unplaced and not status.get("nominatedNodeName")


def _disruption(condition: Mapping[str, Any] | None) -> str | None:
    return str((condition or {}).get("reason")) if _is_true(condition) else None


def _waiting(state: Mapping[str, Any] | None) -> str | None:
    # ContainerCreating and PodInitializing are the ordinary way to a start, not something to report.
    if state is None or state.get("reason") in (None, "ContainerCreating", "PodInitializing"):
        return None
    return f"{state['reason']}: {state.get('message', '')}".rstrip(": ")


def _waiting_before(status: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """The same of the first init container that keeps the worker's from starting."""
    if "running" in state or "terminated" in state:
        return None
    for item in status.get("initContainerStatuses", ()):
        said = _waiting(item.get("state", {}).get("waiting"))
        if said is not None:
            return f"init container {item.get('name')}: {said}"
    return None


def _termination(message: str | None, attempt: int) -> Termination | None:
    if not message or not message.strip():
        return None
    try:
        parsed = Termination.from_json(message)
    except ValueError:
        # A program of the user's own, or a sidecar's text: the last line is still worth showing.
        return Termination(attempt=attempt, code=-1, last_line=message.strip().splitlines()[-1][:1000])
    # A launcher that could not read its environment does not know its attempt, and says 0.
    return parsed if parsed.attempt in (0, attempt) else None
