"""The status of a ZeroTrainingJob. One writer: the operator's reconcile pass.

Texts have no maximum length here: the writer cuts them, and a status that the API server refuses would hide
the very failure it reports.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from .base import ATOMIC, ATOMIC_MAP, Bool, Int, Number, ObservedModel, keyed_by
from .elastic import ElasticStatus
from .hangs import HangStatus, StragglerStatus
from .lifecycle import Verification
from .memory_plan import MemoryPlan
from .shape import AttemptShape
from .yields import YieldRequest

MAX_FAILURES = 10
MAX_MOVED_OFF = 64
MAX_RANK_FAILURES = 16
MAX_EXCLUDED_NODES = 64
MAX_CONDITIONS = 24
MAX_RECENT_RESTARTS = 1000


class Phase(StrEnum):
    """One word for the column of `kubectl get`; the conditions hold the truth."""

    QUEUED = "Queued"
    """No pods yet: the job waits for admission by a queue, or for its pod group's API to be found."""
    PENDING = "Pending"
    """Pods are being created or wait for nodes."""
    STARTING = "Starting"
    """All pods run; ranks are on their way to the first step."""
    RUNNING = "Running"
    RESTARTING = "Restarting"
    """Pods of the failed attempt go away before the next attempt starts."""
    YIELDING = "Yielding"
    """The ranks checkpoint and stop, so that the next attempt can run elsewhere or in another size."""
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    STALLED = "Stalled"
    """Nothing happens until the user edits the spec."""
    COMPLETED = "Completed"
    FAILED = "Failed"


class RestartCause(StrEnum):
    APP = "app"
    INFRA = "infra"
    PREEMPTION = "preemption"


class Restart(ObservedModel):
    """One restart within the budget's window."""

    time: datetime
    """When it was decided."""

    cause: RestartCause
    """Which budget it was charged to."""

    attempt: Int = 0
    """Attempt that ended."""

    reason: str = ""
    """One word, as in failures."""

    step: Int = 0
    """Newest step known when it was decided; the hold-off grows only while no step is gained."""

    charged: Bool = True
    """False where a rule took it out of the budget."""


class Restarts(ObservedModel):
    """Restarts over the life of the job, by cause."""

    app: Int = 0
    """After failures of the training program; only these count against failurePolicy.maxRestarts."""

    infra: Int = 0
    """After lost nodes, evictions and rendezvous that never completed."""

    preemption: Int = 0
    """After preemptions."""

    uncharged: Int = 0
    """Those that cost no budget: a rule with RestartAllIgnoreBudget."""

    total: Int = 0
    """All of them."""

    recent: Annotated[
        tuple[Restart, ...], Field(max_length=MAX_RECENT_RESTARTS, json_schema_extra=ATOMIC)
    ] = ()
    """Those of the current window, and what is remembered longer: the newest two after a hang, and those that
    happen once per job. Oldest first."""


class Shortage(ObservedModel):
    """The current attempt holds a part of what it needs and is refused the rest."""

    since: datetime
    """From when on."""

    reason: str
    """What is refused: Unschedulable for nodes, else the reason of refused creations, as QuotaExceeded."""


class GivenBack(ObservedModel):
    """Attempts that ended because they were refused a part of what they needed."""

    times: Int
    """In a row; the hold-off grows with it."""

    message: str = ""
    """What the last one was refused."""


class Count(ObservedModel):
    """How many are wanted, running and ready."""

    desired: Int = 0
    """How many the spec asks for."""

    running: Int = 0
    """How many have started."""

    ready: Int = 0
    """How many are past the rendezvous."""

    summary: str = ""
    """ready/desired, for the column of kubectl get."""


class ProgressStatus(ObservedModel):
    """What rank 0 last reported."""

    attempt: Int = 0
    """Attempt that reported it."""

    step: Int = 0
    """Optimizer steps done, over all attempts."""

    total_steps: Int = 0
    """Steps of the whole job."""

    loss: Number | None = None
    """Loss of the last step."""

    tokens_per_second: Number | None = None
    """Tokens of all ranks per second."""

    step_seconds: Number | None = None
    """Duration of the last step in seconds."""

    phase: str = ""
    """What rank 0 is doing: init, step, checkpoint and so on."""

    last_heartbeat: datetime | None = None
    """When rank 0 last reported."""

    last_step_time: datetime | None = None
    """When the step last moved."""


class CheckpointRecord(ObservedModel):
    """One checkpoint."""

    step: Int
    """Step that it was taken after."""

    path: str = ""
    """Folder in the worker."""

    time: datetime | None = None
    """When it was committed."""

    attempt: Int = 0
    """Attempt whose ranks told of it: they wrote it, or began with it."""

    durable: Bool = False
    """Whether manifest and shards are complete and synced to the volume."""


class CheckpointStatus(ObservedModel):
    """What is known of the job's checkpoints."""

    last: CheckpointRecord | None = None
    """The newest one."""

    requested_at: datetime | None = None
    """When a checkpoint was asked for (suspend); absent when none is under way."""

    resumed_from_step: Int | None = None
    """Step that the current attempt resumed from; absent when it started afresh."""

    resumed_from_job: str | None = None
    """UID of the other job that wrote that checkpoint: empty where no job did (imported, or of a local run),
    absent where this job wrote it itself."""

    verification: Verification | None = None
    """What became of checkpoint.verify; absent until the job completed."""


class RankFailure(ObservedModel):
    """One of the ranks that had failed when an attempt was ended."""

    rank: Int | None = None
    """Rank that failed, where the pod could tell."""

    pod: str = ""
    """The worker's pod."""

    node: str = ""
    """Node of the pod."""

    exit_code: Int | None = None
    """Exit code of the rank; 128+n for signal n."""

    reason: str = ""
    """One word, as of the attempt's failure."""

    message: str = ""
    """What happened, cut to 200 characters."""


class Failure(ObservedModel):
    """Why an attempt ended."""

    attempt: Int
    """Attempt that failed."""

    time: datetime
    """When the operator saw it."""

    pod: str = ""
    """Pod that failed first."""

    container: str = ""
    """Init container of podTemplate that failed before the ranks started; empty where a rank did."""

    rank: Int | None = None
    """Rank that failed first, where the pod could tell."""

    node: str = ""
    """Node of the pod."""

    exit_code: Int | None = None
    """Exit code of the rank, or of that container; 128+n for signal n."""

    reason: str = ""
    """One word: RankFailed, OutOfMemory, NodeLost, Preempted and so on."""

    cause: RestartCause | None = None
    """Budget that the restart was charged to."""

    message: str = ""
    """Type and text of the exception, where there was one."""

    last_line: str = ""
    """Last line that the rank wrote."""

    stacks: str = ""
    """ConfigMap with the stacks of the ranks, after a hang or a rendezvous that one did not come to."""

    step: Int | None = None
    """Step that the job had reached."""

    rule: Int | None = None
    """Index of the rule in failurePolicy.rules that decided; absent for the built-in table."""

    action: str = ""
    """What was done: FailJob, RestartAll and so on; empty where the attempt was to end anyway."""

    log: str = ""
    """Key in the ConfigMap <job>-failures with the last lines of the rank; empty without a pod to ask."""

    ranks: Annotated[
        tuple[RankFailure, ...], Field(max_length=MAX_RANK_FAILURES, json_schema_extra=ATOMIC)
    ] = ()
    """The ranks that had failed by then, at most 16: the cause, then the first one of each other worker, then
    their other ranks."""


class ExcludedNode(ObservedModel):
    """A node that the job keeps off for a while."""

    name: str
    """Name of the node."""

    until: datetime
    """When the exclusion ends. Attempts that start later may use the node again."""

    reason: str = ""
    """Reason of the failure that led to it."""


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ObservedModel):
    """One observation about the job, in the form of metav1.Condition."""

    type: str
    """Kind of the condition."""

    status: ConditionStatus
    """True, False or Unknown."""

    reason: str
    """One CamelCase word for programs."""

    message: str = ""
    """A sentence for people: what is the case and what to do next."""

    last_transition_time: datetime
    """When the status last changed."""

    observed_generation: Int = 0
    """metadata.generation that it is about."""


class ZeroTrainingJobStatus(ObservedModel):
    """What the operator observed."""

    # One writer owns all of it: keeping record of who set each of its hundred fields would be the dearest
    # part of a write.
    model_config = ConfigDict(json_schema_extra=ATOMIC_MAP)

    observed_generation: Int = 0
    """metadata.generation that this status is about."""

    phase: Phase | None = None
    """One word for people; programs read the conditions."""

    attempt: Int = 0
    """Number of the current attempt, counted from 1. Written before the pods of that attempt are created."""

    start_time: datetime | None = None
    """When the job first became active; anew on resume, when a queue lets it in again, and after Stalled.
    activeDeadlineSeconds counts from it."""

    shape: AttemptShape | None = None
    """What the pods of the current attempt depend on beyond the spec. Written together with its number."""

    yield_request: YieldRequest | None = None
    """Why the ranks were asked to checkpoint and stop; absent when they were not."""

    elastic: ElasticStatus | None = None
    """What was decided about the size of an elastic job; absent before its first attempt."""

    moved_off: Annotated[tuple[str, ...], Field(max_length=MAX_MOVED_OFF, json_schema_extra=ATOMIC)] = ()
    """Nodes that the job was moved off, newest last, at most 64: where a pod came back all the same, the same
    cordon does not move it again."""

    protected_attempt: Int | None = None
    """Attempt whose pods a PodDisruptionBudget protects; absent while there is none."""

    attempt_start_time: datetime | None = None
    """When the current attempt was decided."""

    pods_created: Bool = False
    """Whether every pod of the current attempt existed once: a missing one is lost, not late."""

    next_attempt_time: datetime | None = None
    """When the hold-off before the next attempt ends; absent while none is pending."""

    shortage: Shortage | None = None
    """What the current attempt is refused beside what it holds; absent while it lacks nothing, or holds
    nothing."""

    given_back: GivenBack | None = None
    """Attempts in a row that gave back what they held; absent once all ranks of one have met."""

    queue_name: str | None = None
    """Queue that the label kueue.x-k8s.io/queue-name named when the job began, or was last suspended; absent
    where spec.scheduling.queueName names it, and without a queue."""

    next_queue_name: str | None = None
    """What the label says by now, for when the job is suspended next: empty where it was removed, absent
    while it says the same."""

    completion_time: datetime | None = None
    """When the job completed or failed. ttlSecondsAfterFinished counts from it."""

    zero_stage: Int | None = None
    """ZeRO stage of the configuration."""

    restarts: Restarts = Field(default_factory=Restarts)
    """Restarts by cause."""

    workers: Count = Field(default_factory=Count)
    """Worker pods of the current attempt."""

    ranks: Count = Field(default_factory=Count)
    """Processes of the current attempt."""

    selector: str = ""
    """Label selector of the worker pods, for the scale subresource."""

    progress: ProgressStatus = Field(default_factory=ProgressStatus)
    """How far the training is."""

    checkpoint: CheckpointStatus = Field(default_factory=CheckpointStatus)
    """Newest checkpoint."""

    hang: HangStatus | None = None
    """The hang of the current attempt; absent while its step moves."""

    straggler: StragglerStatus | None = None
    """The rank that slows the current attempt down; absent while none stands out."""

    memory_plan: MemoryPlan | None = None
    """Predicted bytes of each rank."""

    failures: Annotated[tuple[Failure, ...], Field(max_length=MAX_FAILURES, json_schema_extra=ATOMIC)] = ()
    """Why attempts ended, newest first, at most 10."""

    excluded_nodes: Annotated[
        tuple[ExcludedNode, ...], Field(max_length=MAX_EXCLUDED_NODES, json_schema_extra=keyed_by("name"))
    ] = ()
    """Nodes that ReplaceNodeAndRestart keeps the job off, at most 64."""

    conditions: Annotated[
        tuple[Condition, ...], Field(max_length=MAX_CONDITIONS, json_schema_extra=keyed_by("type"))
    ] = ()
    """Observations in the form of metav1.Condition; Ready, Reconciling and Stalled follow kstatus."""
