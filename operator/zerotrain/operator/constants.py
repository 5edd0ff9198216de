"""Names that appear in the cluster: group, labels, condition types, reasons, object and volume names.

Everything else of the operator takes its names from here, so that a label selector, an alert and a test
cannot drift apart.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

GROUP: Final = "zerotrain.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "zerotrain.dev/v1alpha1"
KIND: Final = "ZeroTrainingJob"
PLURAL: Final = "zerotrainingjobs"
SINGULAR: Final = "zerotrainingjob"
SHORT_NAME: Final = "ztj"

MANAGER: Final = "zerotrain.dev/operator"
"""Value of `spec.managedBy` in jobs that this operator manages; a job with any other value is left alone."""

FIELD_MANAGER: Final = "zerotrain-operator"
"""Name of this operator in metadata.managedFields and in events."""

LABEL_JOB: Final = f"{GROUP}/job"
"""Name of the job; the selector of the pod reflector and the NetworkPolicy."""

LABEL_JOB_UID: Final = f"{GROUP}/job-uid"
"""UID of the job: a job that was deleted and created again must not adopt the pods of the earlier one."""

LABEL_HELPER: Final = f"{GROUP}/helper"
"""Label on pods of a job that are no workers, in place of attempt and rank. Its value is the container's
name."""

LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
LABEL_RANK: Final = f"{GROUP}/rank"
"""Index of the worker pod (the node rank), 0-based; its processes are ranks of their own."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label on a job with the same meaning as spec.scheduling.queueName."""

ANNOTATION_IGNORE_MEMORY_PLAN: Final = f"{GROUP}/ignore-memory-plan"
"""Annotation on a job: "true" starts the job although its memory plan says DoesNotFit."""

ANNOTATION_MADE_FROM: Final = f"{GROUP}/made-from"
"""Annotation on a Kueue Workload: hash of the parts of the spec from which its pods were described."""

ANNOTATION_EXCLUDED: Final = f"{GROUP}/excluded-nodes"
"""Annotation on a Kueue Workload: comma-separated names of the nodes that its pods avoid after failures."""

ANNOTATION_ENCRYPTED_VOLUMES: Final = f"{GROUP}/encrypted-volumes"
"""Annotation on a StorageClass by which the platform team declares that its volumes are encrypted ("true") or
not ("false"), whatever the parameters say."""

RESERVED_METADATA_PREFIXES: Final = (f"{GROUP}/", "app.kubernetes.io/")
"""Label and annotation prefixes that podTemplate may not set: selectors and dashboards rely on them."""

APP_NAME: Final = "zerotrain"
COMPONENT_WORKER: Final = "worker"
COMPONENT_OPERATOR: Final = "operator"

CONTAINER_NAME: Final = "worker"
"""Name of the container that runs the launcher; `kubectl logs` shows it by default."""

RESERVED_PREFIX: Final = "zerotrain-"
"""Prefix that names of volumes and containers in podTemplate may not have."""

CONFIG_DIR: Final = "/etc/zerotrain/job"
"""Folder of a worker with ds_config.json, train.json and the channel token."""

TOKEN_KEY: Final = "token"
"""Name of the file with the channel token."""

CHECKPOINT_MOUNT: Final = "/checkpoints"
"""Root of the checkpoint volume; each job writes to a folder of its own below it."""

SHARED_MEMORY_DIR: Final = "/dev/shm"
SCRATCH_DIR: Final = "/tmp"
RESERVED_MOUNTS: Final = (
    CONFIG_DIR,
    CHECKPOINT_MOUNT,
    SHARED_MEMORY_DIR,
    SCRATCH_DIR,
    "/dev",
    "/proc",
    "/sys",
)
"""Paths at which podTemplate may mount nothing; nor may it mount above or below the first two."""

HTTP_PORT_NAME: Final = "http"
RENDEZVOUS_PORT_NAME: Final = "rendezvous"

MAX_JOB_NAME_LENGTH: Final = 51
"""Longest name of a job: a pod name is `<job>-<attempt>-<index>` and must fit the 63 characters of a DNS
label."""

MAX_WORKERS: Final = 10_000
"""Maximum number of workers of a job: keeps the index in a pod name at four digits, which leaves six for the
attempt."""


MAX_SPEC_BYTES: Final = 64 * 1024
"""Maximum size of a spec as JSON, in bytes. A job beyond it, or beyond one of the next two limits, stalls,
and its spec is not kept."""

MAX_SPEC_DEPTH: Final = 16
"""Maximum number of levels of nested lists and objects in one field of a spec."""

MAX_SPEC_VALUES: Final = 4096
"""Maximum number of values in all lists and objects of a spec: each takes a hundred bytes of memory, however
short it is."""

MAX_FREE_ENTRIES: Final = 1024
"""Maximum number of entries of one list or object in a field that takes any JSON; an object with more is
rejected when it is stored."""


class ConditionType(StrEnum):
    """Types in status.conditions. The first three follow kstatus, so that `helm --wait` understands them."""

    READY = "Ready"
    """True once the job has completed; tools that wait for the object wait for this."""
    RECONCILING = "Reconciling"
    """True while the operator still works towards the spec; absent or False when at rest."""
    STALLED = "Stalled"
    """True when only the user can make progress possible; the reason and the field's path say what to
    change."""
    ADMITTED = "Admitted"
    PODS_SCHEDULED = "PodsScheduled"
    RENDEZVOUS_COMPLETE = "RendezvousComplete"
    PROGRESSING = "Progressing"
    """True while the step of the current attempt advances."""
    CHECKPOINT_DURABLE = "CheckpointDurable"
    HUNG = "Hung"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Reason(StrEnum):
    """Reasons of conditions and events. Alerts and scripts match on them: never rename one."""

    # Stalled
    INVALID_SPEC = "InvalidSpec"
    NOT_SUPPORTED = "NotSupported"
    """The field is part of the API, but this version has no behaviour for it."""

    EGRESS_NOT_ALLOWED = "EgressNotAllowed"
    """The job's spec.network asks for more than the installation allows."""

    # Volumes that must be encrypted
    VOLUME_NOT_ENCRYPTED = "VolumeNotEncrypted"
    """The StorageClass does not declare that its volumes are encrypted."""
    STORAGE_CLASS_UNKNOWN = "StorageClassUnknown"
    """The StorageClass does not exist, or the operator may not read it."""

    # Privileges that RDMA needs
    IPC_LOCK_ADDED = "IpcLockAdded"
    """The workers ask for a capability that Pod Security "restricted" forbids."""
    POD_SECURITY = "PodSecurity"
    """The namespace's Pod Security level rejects the pods."""

    # Trackers of the configuration
    TRACKER_UNREACHABLE = "TrackerUnreachable"
    """A tracker is on the network, and the job names no egress to it or no key."""

    # Phases of an attempt
    CREATED = "Created"
    CREATING_PODS = "CreatingPods"
    WAITING_FOR_PODS = "WaitingForPods"
    POD_NOT_STARTING = "PodNotStarting"
    """A pod has a node, but its volumes or images have not been ready for long."""
    INIT_CONTAINER_RUNS = "InitContainerRuns"
    """An init container has run for minutes."""
    POD_HELD = "PodHeld"
    """A finalizer keeps a deleted pod in existence."""
    ALL_RANKS_JOINED = "AllRanksJoined"
    WAITING_FOR_RANKS = "WaitingForRanks"
    STEP_ADVANCED = "StepAdvanced"
    NO_STEP_YET = "NoStepYet"
    RESTARTING = "Restarting"
    TERMINATING_PODS = "TerminatingPods"

    QUEUED = "Queued"
    """The job waits for a queue's admission, or for the API of a pod group to be found."""
    GAVE_BACK = "GaveBack"
    """The attempt held a part of its pods or nodes, did not get the rest, and released all of them."""
    SCHEDULER_MISSING = "SchedulerMissing"
    """No scheduler reports on the pods: the one that the job names may not run."""
    QUEUE_MISSING = "QueueMissing"
    """Kueue is not installed in the cluster."""
    GANG_MISSING = "GangMissing"
    """The requested kind of pod group is not installed in the cluster."""
    ADMITTED = "Admitted"

    # Yields
    DRAINING = "Draining"
    RESIZING = "Resizing"
    RESIZE_REFUSED = "ResizeRefused"
    """The requested size cannot keep the global batch or does not fit the memory; the job keeps its present
    size."""
    QUEUE_EVICTED = "QueueEvicted"
    QUEUE_CHANGED = "QueueChanged"

    # Memory planner
    DOES_NOT_FIT = "DoesNotFit"
    MEMORY_TIGHT = "MemoryTight"
    """The job fits only if the planner's estimates err on the safe side."""
    MEMORY_PLAN_IGNORED = "MemoryPlanIgnored"
    """The job does not fit by the planner's numbers, and starts because an annotation says so."""

    # Checkpoint
    CHECKPOINT_REQUESTED = "CheckpointRequested"
    CHECKPOINT_DURABLE = "CheckpointDurable"
    NO_CHECKPOINT = "NoCheckpoint"
    CHECKPOINT_REJECTED = "CheckpointRejected"
    CHECKPOINT_OF_ANOTHER_JOB = "CheckpointOfAnotherJob"
    CHECKPOINT_VERIFIED = "CheckpointVerified"
    CHECKPOINT_DAMAGED = "CheckpointDamaged"
    CHECKPOINT_OUTDATED = "CheckpointOutdated"
    VERIFICATION_FAILED = "VerificationFailed"
    """The operator could not determine whether the checkpoint is whole."""

    # Ends
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    COMPLETED = "Completed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    PERMANENT_FAILURE = "PermanentFailure"
    FAILED_BY_RULE = "FailedByRule"
    NO_PROGRESS = "NoProgress"
    """The job restarted too often in a row without a new step."""

    # Failures of a worker
    RANK_FAILED = "RankFailed"
    INIT_CONTAINER_FAILED = "InitContainerFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    NODE_LOST = "NodeLost"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    START_DEADLINE_EXCEEDED = "StartDeadlineExceeded"
    """Some workers did not start in time."""
    YIELDED = "Yielded"
    """A planned end, not a failure: all ranks stopped at one step and the checkpoint is durable."""
    POD_LOST = "PodLost"
    """Another client deleted the pod, or its node does not respond."""
    POD_REJECTED = "PodRejected"
    """The node rejected or dropped the pod."""
    KILLED = "Killed"
    HANG = "Hang"
    """The step does not advance; the worker has not ended."""
    HANG_OVER = "HangOver"
    NOT_HUNG = "NotHung"
    STRAGGLER = "Straggler"
    STRAGGLER_RECOVERED = "StragglerRecovered"
    SPILL_INTEGRITY = "SpillIntegrity"
    STORAGE_FAILED = "StorageFailed"
    EXCLUSION_EXPIRED = "ExclusionExpired"
    LOG_NOT_KEPT = "LogNotKept"
    """The last lines of the failing rank could not be stored."""

    # Obstacles of an attempt that waits
    SPEC_ACCEPTED = "SpecAccepted"
    ALL_SCHEDULED = "AllScheduled"
    UNSCHEDULABLE = "Unschedulable"
    CONTAINER_WAITING = "ContainerWaiting"
    BACK_OFF = "BackOff"
    YIELD_TIMEOUT = "YieldTimeout"
    STEP_STALE = "StepStale"
    WORKERS_UNREACHABLE = "WorkersUnreachable"
    NOT_SUSPENDED = "NotSuspended"
    NOT_FINISHED = "NotFinished"

    # Answers of the API server
    NAME_TAKEN = "NameTaken"
    """An object of that name belongs to another owner."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    API_REFUSED = "ApiRefused"

    STATUS_UNFIT = "StatusUnfit"
    """Parts of the stored status cannot be read and count as absent, or it is older than the job's pods."""
    INTERNAL_ERROR = "InternalError"
    """The operator cannot process the job because of an error of its own, or of what is stored."""
