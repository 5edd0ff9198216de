"""Status of a ZeroTrainingJob. It has one writer: the operator's reconcile pass.

Texts have no maximum length here: the writer cuts them, and a status that the API server rejects would hide
the very failure that it reports.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, ConfigDict, Field

from .base import ATOMIC, ATOMIC_MAP, Bool, Int, Number, ObservedModel, keyed_by
from .elastic import ElasticStatus
from .hangs import HangStatus, StragglerStatus
from .lenient import OpenEnum
from .lifecycle import Verification, YieldRequest
from .memory_plan import MemoryPlan
from .scheduling import AttemptShape

MAX_FAILURES = 10
MAX_MOVED_OFF = 64
MAX_RANK_FAILURES = 16
MAX_EXCLUDED_NODES = 64
MAX_CONDITIONS = 24
MAX_RECENT_RESTARTS = 1000


class Phase(OpenEnum):
    """One-word summary for the column of `kubectl get`; the conditions hold the details."""

    QUEUED = "Queued"
    """The job has no pods yet: it waits for admission by a queue, or for its pod group's API to be found."""
    PENDING = "Pending"
    """Pods are being created or wait for nodes."""
    STARTING = "Starting"
    """All pods run; the ranks have not reached the first step."""
    RUNNING = "Running"
    RESTARTING = "Restarting"
    """Pods of the failed attempt end before the next attempt starts."""
    YIELDING = "Yielding"
    """The ranks checkpoint and stop, so that the next attempt can run elsewhere or with another size."""
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    STALLED = "Stalled"
    """The job waits until the user edits the spec."""
    COMPLETED = "Completed"
    FAILED = "Failed"


class RestartCause(OpenEnum):
    APP = "app"
    INFRA = "infra"
    PREEMPTION = "preemption"


class Restart(ObservedModel):
    """One restart within the budget's window."""

    time: AwareDatetime
    """Time of the decision."""

    cause: RestartCause
    """Budget that the restart was charged to."""

    attempt: Int = 0
    """Attempt that ended."""

    reason: str = ""
    """Reason in one word, as in failures."""

    step: Int = 0
    """Newest step known when it was decided; the hold-off grows only while no step is gained."""

    charged: Bool = True
    """Whether it counts against the budget; false if a rule took it out."""


class Restarts(ObservedModel):
    """Restarts over the life of the job, by cause."""

    app: Int = 0
    """Restarts after failures of the training program; only these count against failurePolicy.maxRestarts."""

    infra: Int = 0
    """Restarts after lost nodes, evictions and rendezvous that never completed."""

    preemption: Int = 0
    """Restarts after preemptions."""

    uncharged: Int = 0
    """Restarts that cost no budget: a rule with RestartAllIgnoreBudget."""

    total: Int = 0
    """Number of all restarts."""

    recent: Annotated[
        tuple[Restart, ...], Field(max_length=MAX_RECENT_RESTARTS, json_schema_extra=ATOMIC)
    ] = ()
    """Restarts of the current window, and those that are remembered longer: the newest two after a hang, and
    those that happen once per job. Oldest first."""


class Shortage(ObservedModel):
    """Shortage of the current attempt, which holds only a part of what it needs."""

    since: AwareDatetime
    """Time when it began."""

    reason: str
    """Kind of the shortage: Unschedulable for nodes, else the reason of rejected creations, as
    QuotaExceeded."""


class GivenBack(ObservedModel):
    """Attempts that ended because they did not get all that they needed."""

    times: Int
    """Number of such attempts in a row; the hold-off grows with it."""

    message: str = ""
    """Message about what the last one did not get."""


class Count(ObservedModel):
    """Numbers of desired, running and ready ones."""

    desired: Int = 0
    """Number that the spec asks for."""

    running: Int = 0
    """Number that have started."""

    ready: Int = 0
    """Number that are past the rendezvous."""

    summary: str = ""
    """Text ready/desired, for the column of kubectl get."""


class ProgressStatus(ObservedModel):
    """Last report of rank 0."""

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

    step_flops: Number | None = None
    """Floating-point operations of the model in one step of all ranks, by formula."""

    mfu: Number | None = None
    """Model FLOPs utilisation: these operations as a part (up to 1) of what the devices could do in the time;
    absent where their peak is not known."""

    phase: str = ""
    """Activity of rank 0: init, step, checkpoint and so on."""

    last_heartbeat: AwareDatetime | None = None
    """Time of rank 0's last report."""

    last_step_time: AwareDatetime | None = None
    """Time when the step last advanced."""


class CheckpointRecord(ObservedModel):
    """One checkpoint."""

    step: Int
    """Step after which it was taken."""

    path: str = ""
    """Folder in the worker."""

    time: AwareDatetime | None = None
    """Time when it was committed."""

    attempt: Int = 0
    """Attempt whose ranks reported it: they wrote it, or started from it."""

    durable: Bool = False
    """Whether manifest and shards are complete and synced to the volume."""


class CheckpointStatus(ObservedModel):
    """State of the job's checkpoints."""

    last: CheckpointRecord | None = None
    """Newest checkpoint."""

    requested_at: AwareDatetime | None = None
    """Time when a checkpoint was requested (suspend); absent when none is under way."""

    resumed_from_step: Int | None = None
    """Step that the current attempt resumed from; absent when it started from scratch."""

    resumed_from_job: str | None = None
    """UID of the other job that wrote that checkpoint: empty if no job did (imported, or of a local run),
    absent if this job wrote it itself."""

    verification: Verification | None = None
    """Outcome of checkpoint.verify; absent until the job has completed."""


class RankFailure(ObservedModel):
    """One of the ranks that had failed when an attempt was ended."""

    rank: Int | None = None
    """Rank that failed, if the pod could tell."""

    pod: str = ""
    """Pod of the worker."""

    node: str = ""
    """Node of the pod."""

    exit_code: Int | None = None
    """Exit code of the rank; 128+n for signal n."""

    reason: str = ""
    """Reason in one word, as of the attempt's failure."""

    message: str = ""
    """Description of the failure, cut to 200 characters."""


class FailureRecord(ObservedModel):
    """Failure that ended an attempt."""

    attempt: Int
    """Attempt that failed."""

    time: AwareDatetime
    """Time when the operator saw it."""

    pod: str = ""
    """Pod that failed first."""

    container: str = ""
    """Init container of podTemplate that failed before the ranks started; empty if a rank failed."""

    rank: Int | None = None
    """Rank that failed first, if the pod could tell."""

    node: str = ""
    """Node of the pod."""

    exit_code: Int | None = None
    """Exit code of the rank, or of that container; 128+n for signal n."""

    reason: str = ""
    """Reason in one word: RankFailed, OutOfMemory, NodeLost, Preempted and so on."""

    cause: RestartCause | None = None
    """Budget that the restart was charged to."""

    message: str = ""
    """Type and text of the exception, if there was one."""

    last_line: str = ""
    """Last line that the rank wrote."""

    stacks: str = ""
    """ConfigMap with the stacks of the ranks, after a hang or a rendezvous that a rank did not reach."""

    step: Int | None = None
    """Step that the job had reached."""

    rule: Int | None = None
    """Index of the rule in failurePolicy.rules that decided; absent if the built-in table did."""

    action: str = ""
    """Action taken: FailJob, RestartAll and so on; empty if the attempt was to end anyway."""

    log: str = ""
    """Key in the ConfigMap <job>-failures with the last lines of the rank; empty without a pod to ask."""

    ranks: Annotated[
        tuple[RankFailure, ...], Field(max_length=MAX_RANK_FAILURES, json_schema_extra=ATOMIC)
    ] = ()
    """Ranks that had failed by then, at most 16: the cause, then the first one of each other worker, then
    their other ranks."""


class ExcludedNode(ObservedModel):
    """Node that the job avoids for a while."""

    name: str
    """Name of the node."""

    until: AwareDatetime
    """End of the exclusion. Attempts that start later may use the node again."""

    reason: str = ""
    """Reason of the failure that led to it."""


class ConditionStatus(OpenEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ObservedModel):
    """One observation about the job, in the form of metav1.Condition."""

    type: str
    """Type of the condition."""

    status: ConditionStatus
    """Status: True, False or Unknown."""

    reason: str
    """Reason in one CamelCase word, for programs."""

    message: str = ""
    """Sentence for people: what is the case and what to do next."""

    last_transition_time: AwareDatetime
    """Time when the status last changed."""

    observed_generation: Int = 0
    """Generation (metadata.generation) that it is about."""

    @property
    def is_true(self) -> bool:
        return self.status is ConditionStatus.TRUE


class ZeroTrainingJobStatus(ObservedModel):
    """Observed state of the job."""

    # One writer owns all of it: a record of the owner of each of its hundred fields would be the most
    # expensive part of a write.
    model_config = ConfigDict(json_schema_extra=ATOMIC_MAP)

    observed_generation: Int = 0
    """Generation (metadata.generation) that this status is about."""

    phase: Phase | None = None
    """One-word summary for people; programs read the conditions."""

    attempt: Int = 0
    """Number of the current attempt, counted from 1. Written before the pods of that attempt are created."""

    start_time: AwareDatetime | None = None
    """Time when the job first became active; set anew on resume, when a queue admits it again, and after
    Stalled. activeDeadlineSeconds counts from it."""

    shape: AttemptShape | None = None
    """Properties of the current attempt's pods beyond the spec. Written together with its number."""

    yield_request: YieldRequest | None = None
    """Request to the ranks to checkpoint and stop; absent when there is none."""

    elastic: ElasticStatus | None = None
    """Decisions about the size of an elastic job; absent before its first attempt."""

    moved_off: Annotated[tuple[str, ...], Field(max_length=MAX_MOVED_OFF, json_schema_extra=ATOMIC)] = ()
    """Nodes that the job was moved off, newest last, at most 64: if a pod came back to one all the same, the
    same cordon does not move it again."""

    protected_attempt: Int | None = None
    """Attempt whose pods a PodDisruptionBudget protects; absent while there is none."""

    attempt_start_time: AwareDatetime | None = None
    """Time when the current attempt was decided."""

    pods_created: Bool = False
    """Whether every pod of the current attempt existed once: a missing one is lost, not late."""

    next_attempt_time: AwareDatetime | None = None
    """End of the hold-off before the next attempt; absent while none is pending."""

    shortage: Shortage | None = None
    """Resources that the current attempt lacks besides what it holds; absent while it lacks nothing, or holds
    nothing."""

    given_back: GivenBack | None = None
    """Attempts in a row that gave back what they held; absent once all ranks of one have met."""

    queue_name: str | None = None
    """Queue that the label kueue.x-k8s.io/queue-name named when the job began, or was last suspended; absent
    if spec.scheduling.queueName names it, and without a queue."""

    next_queue_name: str | None = None
    """Queue that the label names by now, for when the job is suspended next: empty if it was removed, absent
    while it is unchanged."""

    completion_time: AwareDatetime | None = None
    """Time when the job completed or failed. ttlSecondsAfterFinished counts from it."""

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
    """Progress of the training."""

    checkpoint: CheckpointStatus = Field(default_factory=CheckpointStatus)
    """State of the job's checkpoints."""

    hang: HangStatus | None = None
    """Hang of the current attempt; absent while its step advances."""

    straggler: StragglerStatus | None = None
    """Rank that slows the current attempt down; absent while none stands out."""

    memory_plan: MemoryPlan | None = None
    """Predicted bytes of each rank."""

    failures: Annotated[
        tuple[FailureRecord, ...], Field(max_length=MAX_FAILURES, json_schema_extra=ATOMIC)
    ] = ()
    """Failures that ended attempts, newest first, at most 10."""

    excluded_nodes: Annotated[
        tuple[ExcludedNode, ...], Field(max_length=MAX_EXCLUDED_NODES, json_schema_extra=keyed_by("name"))
    ] = ()
    """Nodes that the job avoids after ReplaceNodeAndRestart, at most 64."""

    conditions: Annotated[
        tuple[Condition, ...], Field(max_length=MAX_CONDITIONS, json_schema_extra=keyed_by("type"))
    ] = ()
    """Observations in the form of metav1.Condition; Ready, Reconciling and Stalled follow kstatus."""
