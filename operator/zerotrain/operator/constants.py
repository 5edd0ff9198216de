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
"""`spec.managedBy` of the jobs that this operator looks after; any other value is left alone."""

FIELD_MANAGER: Final = "zerotrain-operator"
"""Name of this operator in metadata.managedFields and in events."""

LABEL_JOB: Final = f"{GROUP}/job"
"""Name of the job; the selector of the pod reflector and the NetworkPolicy."""

LABEL_JOB_UID: Final = f"{GROUP}/job-uid"
"""UID of the job: a job that was deleted and made again must not adopt the pods of its namesake."""

LABEL_HELPER: Final = f"{GROUP}/helper"
"""On pods of a job that are no workers, in place of attempt and rank; its value is the container's name."""

LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
LABEL_RANK: Final = f"{GROUP}/rank"
"""Index of the worker pod (the node rank), 0-based; its processes are ranks of their own."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""On a job: means the same as spec.scheduling.queueName."""

ANNOTATION_IGNORE_MEMORY_PLAN: Final = f"{GROUP}/ignore-memory-plan"
"""On jobs: "true" starts the job although its memory plan says DoesNotFit."""

ANNOTATION_MADE_FROM: Final = f"{GROUP}/made-from"
"""On Workloads of Kueue: hash of the parts of the spec that their pods were described from."""

ANNOTATION_EXCLUDED: Final = f"{GROUP}/excluded-nodes"
"""On Workloads of Kueue: the nodes that their pods keep off after failures, with commas between them."""

ANNOTATION_ENCRYPTED_VOLUMES: Final = f"{GROUP}/encrypted-volumes"
"""On StorageClasses: "true" is the platform team's word that its volumes are encrypted, "false" that they are
not, whatever the parameters say."""

RESERVED_METADATA_PREFIXES: Final = (f"{GROUP}/", "app.kubernetes.io/")
"""Label and annotation prefixes that podTemplate may not set: selectors and dashboards rely on them."""

APP_NAME: Final = "zerotrain"
COMPONENT_WORKER: Final = "worker"
COMPONENT_OPERATOR: Final = "operator"

CONTAINER_NAME: Final = "worker"
"""The container that runs the launcher; `kubectl logs` shows it by default."""

RESERVED_PREFIX: Final = "zerotrain-"
"""Volumes and containers of podTemplate may not start with it."""

CONFIG_DIR: Final = "/etc/zerotrain/job"
"""Where a worker finds ds_config.json, train.json and its channel token."""

TOKEN_KEY: Final = "token"
"""Name of the file with the token."""

CHECKPOINT_MOUNT: Final = "/checkpoints"
"""Root of the checkpoint volume; a job writes to a folder of its own below it."""

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
"""podTemplate may mount nothing at these paths, nor above or below the first two."""

HTTP_PORT_NAME: Final = "http"
RENDEZVOUS_PORT_NAME: Final = "rendezvous"

MAX_JOB_NAME_LENGTH: Final = 51
"""A pod name is `<job>-<attempt>-<index>` and must fit the 63 characters of a DNS label."""

MAX_WORKERS: Final = 10_000
"""Keeps the index of a pod name at four digits, which leaves the attempt six."""


MAX_SPEC_BYTES: Final = 64 * 1024
"""Of a spec as JSON. Beyond it, or beyond the two limits below, a job stalls and its spec is not kept."""

MAX_SPEC_DEPTH: Final = 16
"""Lists and objects within each other in one field of a spec."""

MAX_SPEC_VALUES: Final = 4096
"""Values in all lists and objects of a spec: each takes a hundred bytes of memory, however short it is."""

MAX_FREE_ENTRIES: Final = 1024
"""Of one list or object where a job takes any JSON: more of them are refused when they are stored."""


class ConditionType(StrEnum):
    """Types in status.conditions. The first three follow kstatus, so that `helm --wait` understands them."""

    READY = "Ready"
    """True once the job completed: what a tool that waits for the object waits for."""
    RECONCILING = "Reconciling"
    """True while the operator still works towards the spec; absent or False when at rest."""
    STALLED = "Stalled"
    """True when only the user can make progress possible; the reason and the field's path say how."""
    ADMITTED = "Admitted"
    PODS_SCHEDULED = "PodsScheduled"
    RENDEZVOUS_COMPLETE = "RendezvousComplete"
    PROGRESSING = "Progressing"
    """The step of the current attempt moves."""
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
    """The field is part of the API but this version has no behaviour for it."""

    EGRESS_NOT_ALLOWED = "EgressNotAllowed"
    """spec.network asks for more than the installation allows."""

    # Volumes that must be encrypted
    VOLUME_NOT_ENCRYPTED = "VolumeNotEncrypted"
    """The StorageClass does not declare that its volumes are encrypted."""
    STORAGE_CLASS_UNKNOWN = "StorageClassUnknown"
    """It does not exist, or the operator may not read it."""

    # What RDMA takes
    IPC_LOCK_ADDED = "IpcLockAdded"
    """The workers ask for a capability that Pod Security "restricted" forbids."""
    POD_SECURITY = "PodSecurity"
    """The namespace's Pod Security level does not let the pods in."""

    # Phases of an attempt
    CREATED = "Created"
    CREATING_PODS = "CreatingPods"
    WAITING_FOR_PODS = "WaitingForPods"
    POD_NOT_STARTING = "PodNotStarting"
    """A pod has a node, and its volumes or images are not there for long."""
    INIT_CONTAINER_RUNS = "InitContainerRuns"
    """An init container has run for minutes."""
    POD_HELD = "PodHeld"
    """A finalizer keeps a pod that was deleted."""
    PODS_RUNNING = "PodsRunning"
    ALL_RANKS_JOINED = "AllRanksJoined"
    WAITING_FOR_RANKS = "WaitingForRanks"
    STEP_ADVANCED = "StepAdvanced"
    NO_STEP_YET = "NoStepYet"
    RESTARTING = "Restarting"
    TERMINATING_PODS = "TerminatingPods"

    QUEUED = "Queued"
    """Waits for a queue's admission, or for a pod group's API to be found."""
    GAVE_BACK = "GaveBack"
    """The attempt held a part of its pods or nodes, was refused the rest, and let go of all."""
    QUEUE_MISSING = "QueueMissing"
    """The cluster has no Kueue."""
    GANG_MISSING = "GangMissing"
    """The cluster does not have the wished pod group."""
    ADMITTED = "Admitted"

    # Yields
    DRAINING = "Draining"
    RESIZING = "Resizing"
    RESIZE_REFUSED = "ResizeRefused"
    """The size asked for cannot keep the global batch or does not fit the memory; the job keeps its own."""
    QUEUE_EVICTED = "QueueEvicted"
    QUEUE_CHANGED = "QueueChanged"

    # Memory planner
    DOES_NOT_FIT = "DoesNotFit"
    MEMORY_TIGHT = "MemoryTight"
    """Fits only if the planner's estimates err on the safe side."""
    MEMORY_PLAN_IGNORED = "MemoryPlanIgnored"
    """Does not fit by the planner's numbers, and starts because an annotation says so."""

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
    """Whether the checkpoint is whole could not be told."""

    # Ends
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    COMPLETED = "Completed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    PERMANENT_FAILURE = "PermanentFailure"
    FAILED_BY_RULE = "FailedByRule"
    NO_STEP_GAINED = "NoStepGained"
    """Too many restarts in a row led nowhere."""

    # Failures of a worker
    RANK_FAILED = "RankFailed"
    INIT_CONTAINER_FAILED = "InitContainerFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    NODE_LOST = "NodeLost"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    START_DEADLINE_EXCEEDED = "StartDeadlineExceeded"
    """Not all workers started in time."""
    YIELDED = "Yielded"
    """Not a failure: all ranks stopped at one step and the checkpoint is durable."""
    POD_LOST = "PodLost"
    """Deleted by somebody, or its node does not answer."""
    POD_REJECTED = "PodRejected"
    """The node refused or dropped the pod."""
    KILLED = "Killed"
    HANG = "Hang"
    """Not the end of a worker: its step does not move."""
    HANG_OVER = "HangOver"
    NOT_HUNG = "NotHung"
    STRAGGLER = "Straggler"
    STRAGGLER_GONE = "StragglerGone"
    SPILL_INTEGRITY = "SpillIntegrity"
    STORAGE_FAILED = "StorageFailed"
    NODE_EXCLUDED = "NodeExcluded"
    EXCLUSION_EXPIRED = "ExclusionExpired"
    LOG_NOT_KEPT = "LogNotKept"
    """The failing rank's last lines could not be stored."""

    # What an attempt waits for
    SPEC_ACCEPTED = "SpecAccepted"
    ALL_SCHEDULED = "AllScheduled"
    UNSCHEDULABLE = "Unschedulable"
    CONTAINER_WAITING = "ContainerWaiting"
    HOLD_OFF = "HoldOff"
    YIELD_TIMEOUT = "YieldTimeout"
    STEP_STALE = "StepStale"
    WORKERS_UNREACHABLE = "WorkersUnreachable"
    NOT_SUSPENDED = "NotSuspended"
    NOT_FINISHED = "NotFinished"

    # What the API server answered
    NAME_TAKEN = "NameTaken"
    """An object of that name belongs to somebody else."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    API_REFUSED = "ApiRefused"
