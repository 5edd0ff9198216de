"""Meaning of the reasons and types of a job's conditions, events and failures, and what to do about them.

The keys are the texts that `kubectl describe` shows (`operator.constants`), without an import of the API's
models. A test compares the table with the operator's enums. Used by `explain` and `describe`.
"""

from __future__ import annotations

from dataclasses import dataclass

NOTHING = "nothing to do"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """One row of the table."""

    name: str
    kind: str
    """Either condition or reason."""
    meaning: str
    way_out: str


def _rows(kind: str, rows: dict[str, tuple[str, str]]) -> dict[str, Meaning]:
    return {
        name: Meaning(name=name, kind=kind, meaning=meaning, way_out=way_out)
        for name, (meaning, way_out) in rows.items()
    }


CONDITIONS = _rows(
    "condition",
    {
        "Ready": ("True once the job has completed; what tools that wait for the object wait for", NOTHING),
        "Reconciling": (
            "True while the operator still works towards the spec",
            "wait; zerotrain describe NAME shows for what",
        ),
        "Stalled": (
            "True if the job cannot go on before you correct it; the reason and the message name the field",
            "correct the field that the message names and apply the job again",
        ),
        "Admitted": ("the queue or the operator's own check lets the job have pods", "see its reason"),
        "PodsScheduled": ("every worker of the attempt has a node", "see its reason; kubectl describe pod"),
        "RendezvousComplete": ("all ranks of the attempt have met", "see its reason and zerotrain logs"),
        "Progressing": (
            "the step of the current attempt advances",
            "zerotrain top shows which rank waits for what",
        ),
        "CheckpointDurable": (
            "a checkpoint of the job is committed and synced",
            "give spec.checkpoint, or wait for the first one",
        ),
        "Hung": (
            "the step has not advanced for longer than hangPolicy allows",
            "read the stacks in the ConfigMap that status.hang.stacks names; the operator restarts the job "
            "unless hangPolicy.action is Report",
        ),
        "Suspended": ("the job has released its pods and waits", "zerotrain resume NAME"),
        "Complete": ("all steps are done", NOTHING),
        "Failed": ("the job has ended without reaching its last step", "zerotrain describe NAME shows why"),
    },
)

_SPEC = {
    "InvalidSpec": (
        "a field is wrong in every version; the message has its path, the rule and the value",
        "correct the field and apply the job again",
    ),
    "NotSupported": (
        "the field is part of the API but this version has no behaviour for it",
        "remove the field, or do what the message proposes",
    ),
    "EgressNotAllowed": (
        "spec.network.egressCidrs names networks beyond what the installation allows jobs to reach",
        "name parts of what the message lists, have the chart's jobs.allowedEgressCidrs widened, or give a "
        "NetworkPolicy of your own for the label zerotrain.dev/job",
    ),
    "SpecAccepted": ("the spec is valid", NOTHING),
    "DoesNotFit": (
        "by the memory planner's numbers a worker cannot hold its part; no pod was created",
        "take the nearest configuration that the message names (zerotrain plan job.yaml has the numbers), or "
        "set the annotation zerotrain.dev/ignore-memory-plan=true",
    ),
    "MemoryTight": (
        "the job fits only if the planner's estimates err on the safe side",
        "leave more headroom: a smaller micro-batch, activation checkpointing or a higher stage",
    ),
    "MemoryPlanIgnored": (
        "the job does not fit by the planner's numbers and starts because an annotation allows it",
        "expect OutOfMemory, or remove the annotation",
    ),
    "VolumeNotEncrypted": (
        "requireEncryptedVolume of spec.nvme or spec.checkpoint is true and the volume's StorageClass does "
        "not declare encryption; no pod was created",
        "take a class that declares it, or have its owner annotate it: "
        "kubectl annotate storageclass NAME zerotrain.dev/encrypted-volumes=true",
    ),
    "StorageClassUnknown": (
        "requireEncryptedVolume of spec.nvme or spec.checkpoint is true and the StorageClass, or the claim "
        "that names it, is missing or may not be read",
        "name one that exists, or grant the operator get on storageclasses.storage.k8s.io and "
        "persistentvolumeclaims",
    ),
    "IpcLockAdded": (
        'for spec.resources.rdma the workers ask for IPC_LOCK, which Pod Security "restricted" forbids',
        "nothing to do where the namespace allows it; docs/operator/rdma.md lists what nodes need",
    ),
    "TrackerUnreachable": (
        "the configuration enables a tracker on the network, and the job names no network for it or no key; "
        "it trains all the same, and the tracker gets nothing",
        "name the tracker's network in spec.network.egressCidrs, and a Secret with its key in "
        "spec.podTemplate.envFrom",
    ),
    "PodSecurity": (
        "the namespace's Pod Security level rejects the job's pods; the message names the violations",
        "take that out of the job, or label the namespace with a level that allows it; the operator tries "
        "again by itself",
    ),
    "NameTaken": (
        "an object of the name that the job needs belongs to another owner",
        "remove that object or give the job another name",
    ),
    "QuotaExceeded": (
        "a ResourceQuota of the namespace is exhausted; the operator tries again by itself",
        "kubectl describe quota; request less or raise the quota",
    ),
    "ApiRefused": (
        "the API server refused a request of the operator's; the message quotes it",
        "often an admission policy or missing RBAC: correct it; the operator tries again by itself",
    ),
    "StatusUnfit": (
        "parts of the job's status cannot be read, or it is older than the job's pods: another version of "
        "the operator or of the custom resource wrote it, or somebody edited it; the operator decides those "
        "parts anew",
        "after an upgrade or a rollback, check that the CustomResourceDefinition and the operator are of one "
        "version",
    ),
    "InternalError": (
        "the operator fails to process the job, and its status may be outdated; pods that run go on",
        "the traceback is in the log of the operator, which tries again by itself: after an upgrade, check "
        "that the CustomResourceDefinition and the operator are of one version; otherwise report it",
    ),
}

_ATTEMPT = {
    "Created": ("the operator has seen the job", NOTHING),
    "CreatingPods": ("the attempt's pods are being made", NOTHING),
    "WaitingForPods": ("not all pods of the attempt run yet", "wait; zerotrain describe NAME says for which"),
    "AllScheduled": ("every pod of the attempt has a node", NOTHING),
    "Unschedulable": (
        "the scheduler has no node for a pod; the message quotes it",
        "free or add nodes, ask for less, or look at taints and the job's scheduling",
    ),
    "ContainerWaiting": (
        "a container does not start: image, volume or configuration",
        "kubectl describe pod; most often the image's name or pull secret, or a claim that is not bound",
    ),
    "AllRanksJoined": ("all ranks have met", NOTHING),
    "WaitingForRanks": (
        "some ranks have not joined the rendezvous yet",
        "zerotrain logs NAME of those ranks",
    ),
    "StepAdvanced": ("the step advances", NOTHING),
    "NoStepYet": ("no step of this attempt is done yet", "wait: the first step compiles and loads"),
    "WorkersUnreachable": (
        "worker 0 runs and has not answered the operator for two minutes, so a hang would not be found",
        "open TCP 8471 of the job's pods for the operator's: network policies, a service mesh",
    ),
    "StepStale": (
        "the step has not advanced for a while; not yet a hang",
        "zerotrain top NAME; a rank that waits for data or disk stands out",
    ),
    "Restarting": ("the pods of the ended attempt go away before the next one", NOTHING),
    "PodNotStarting": (
        "a pod has a node, and the kubelet has not set up its volumes for 30 s, or pulls for 5 minutes",
        "zerotrain describe NAME quotes the kubelet; create the ConfigMap, Secret or claim that is missing",
    ),
    "InitContainerRuns": (
        "an init container has run for minutes, and no rank starts before it ends",
        "zerotrain logs NAME; the job's NetworkPolicy drops its packets but to ranks, DNS and "
        "spec.network.egressCidrs, without an answer",
    ),
    "PodHeld": (
        "a finalizer blocks the deletion of a pod; no other attempt starts before the pod is gone",
        "zerotrain describe NAME names pod and finalizer; the owner of the finalizer must remove it",
    ),
    "TerminatingPods": ("pods are terminating", NOTHING),
    "BackOff": ("the next attempt waits a while after repeated failures", "correct the cause meanwhile"),
    "NotSuspended": ("the job is not suspended", NOTHING),
    "NotFinished": ("the job has not ended", NOTHING),
    "LogNotKept": (
        "the failing rank's last lines could not be stored",
        "read the pod's log while it exists; check the operator's rights on ConfigMaps",
    ),
}

_QUEUES = {
    "Queued": (
        "the job waits for admission by a queue, or for a gang scheduler",
        "wait, or raise its priority",
    ),
    "Admitted": ("the queue admitted the job, or its gang scheduler was found", NOTHING),
    "GaveBack": (
        "the attempt got only a part of its pods or nodes and released all of them, so that other jobs can "
        "start; the next one comes after a hold-off, and no budget is charged",
        "wait; if it repeats, raise the quota, add nodes, request less, or let Kueue queue the jobs",
    ),
    "QueueChanged": (
        "the label kueue.x-k8s.io/queue-name names another queue than the job is in",
        "nothing: it counts from the job's next suspension",
    ),
    "SchedulerMissing": (
        "no scheduler has reported on the job's pods for minutes: the one that they name may not run",
        "start that scheduler, or change scheduling.schedulerName or scheduling.gang while the job is "
        "suspended",
    ),
    "QueueMissing": ("queueName is given and the cluster has no Kueue", "install Kueue or remove queueName"),
    "GangMissing": (
        "the cluster does not have the requested pod group",
        "install the scheduler that scheduling.gang names, or choose Auto",
    ),
    "QueueEvicted": (
        "the queue reclaims its resources; the job checkpoints and waits for admission",
        NOTHING,
    ),
}

_YIELDS = {
    "Draining": (
        "a worker's node is going away; all ranks checkpoint and move together",
        NOTHING,
    ),
    "Resizing": ("the job goes on with another number of workers", NOTHING),
    "ResizeRefused": (
        "the requested size does not divide the batch or does not fit the memory; the job keeps its own",
        "choose a number of workers that divides the batch and fits",
    ),
    "Yielded": (
        "not a failure: all ranks stopped at one step and the checkpoint is durable",
        NOTHING,
    ),
    "YieldTimeout": (
        "the ranks did not checkpoint within the grace",
        "raise checkpoint.gracePeriodSeconds above one step plus one checkpoint",
    ),
    "Suspended": ("spec.suspend is true and the pods are gone", "zerotrain resume NAME"),
    "Resumed": ("the job goes on from its last checkpoint", NOTHING),
    "Suspend": ("the ranks stop because spec.suspend became true", NOTHING),
    "QueueEviction": ("the ranks stop because the queue reclaims its resources", NOTHING),
    "Drain": ("the ranks stop because a worker has to leave its node", NOTHING),
    "Resize": ("the ranks stop because the job goes on in another size", NOTHING),
}

_CHECKPOINTS = {
    "CheckpointRequested": ("all ranks were requested to checkpoint and stop", NOTHING),
    "CheckpointDurable": ("a checkpoint is committed and synced", NOTHING),
    "NoCheckpoint": (
        "the job has none yet: a restart would begin at step 0",
        "give spec.checkpoint with everySteps or everySeconds",
    ),
    "CheckpointRejected": (
        "a damaged checkpoint was skipped; the job resumed from an older one",
        "check the volume; zerotrain checkpoint verify FOLDER names the damaged file",
    ),
    "CheckpointOfAnotherJob": (
        "the attempt began with a checkpoint that this job did not write: its folder holds those of an "
        "earlier job, of the same name for instance",
        "nothing, where that is meant; otherwise give the job a folder of its own (spec.checkpoint.volume, "
        "another name), or checkpoint.resumeFrom: None",
    ),
    "CheckpointVerified": ("every byte of the last checkpoint is as it was written", NOTHING),
    "CheckpointDamaged": (
        "the last checkpoint differs from what was written, or does not exist any more",
        "do not use it: resume from an older one (spec.checkpoint.resumeFrom), and check the volume",
    ),
    "CheckpointOutdated": (
        "the job stopped without saving its last steps",
        "resume from the step that the message names; raise checkpoint.gracePeriodSeconds",
    ),
    "VerificationFailed": (
        "the checkpoint could not be verified",
        "zerotrain checkpoint verify FOLDER where the volume is mounted",
    ),
}

_ENDS = {
    "Completed": ("all steps are done", NOTHING),
    "DeadlineExceeded": (
        "the job was active for longer than runPolicy.activeDeadlineSeconds",
        "raise the deadline and make the job again: it resumes from its last checkpoint",
    ),
    "RestartsExhausted": (
        "the budget of restarts for this cause is used up",
        "zerotrain describe NAME lists the failures: correct what they have in common, then apply the job "
        "again; failurePolicy has the budgets",
    ),
    "PermanentFailure": (
        "a rank ended with a code that stands for a permanent failure",
        "zerotrain explain exit-codes; correct what the message names",
    ),
    "FailedByRule": ("a rule of failurePolicy.rules ended the job", "see the failure that matched the rule"),
    "NoProgress": (
        "too many restarts in a row made no progress",
        "zerotrain describe NAME: the failures have the cause; maxRestartsWithoutProgress has the number",
    ),
}

_FAILURES = {
    "RankFailed": (
        "the training program ended with a code that has no meaning of its own",
        "zerotrain logs NAME --rank N: its last lines have the exception",
    ),
    "InitContainerFailed": (
        "an init container of podTemplate failed before any rank started; the failure has its name, code and "
        "message; the meanings of ranks' exit codes do not apply to it",
        "zerotrain logs NAME --attempt N: its last lines",
    ),
    "OutOfMemory": (
        "the kernel ended a rank at the container's memory limit",
        "raise resources.memory, or offload less; zerotrain plan job.yaml has the bytes",
    ),
    "OOMKilled": (
        "the kubelet's name for OutOfMemory; rules may use either, the status shows OutOfMemory",
        "zerotrain explain OutOfMemory",
    ),
    "Killed": (
        "a rank was ended by SIGKILL from an unknown sender",
        "check the node: out of memory of the whole node, an administrator, a debugger",
    ),
    "NodeLost": (
        "the node of a worker is gone or not ready, or was started anew",
        "nothing; the job restarts, on other nodes where this one is still away",
    ),
    "PodLost": (
        "another client deleted a worker pod, or its node does not answer",
        "find out who deletes pods",
    ),
    "PodRejected": (
        "the node refused or dropped the pod before it ran",
        "kubectl describe pod: often resources that the kubelet no longer has",
    ),
    "Preempted": ("a pod of higher priority took the place", "raise scheduling.priorityClassName"),
    "Evicted": (
        "the kubelet evicted a worker, most often for disk or memory pressure of the node",
        "give resources.memory and nvme.size, so that the scheduler reserves them; check the node",
    ),
    "RendezvousTimeout": (
        "not all ranks joined the rendezvous in time",
        "look for pods that never started, DNS, and a NetworkPolicy between ranks: zerotrain doctor --pod; "
        "where a rank ran and did not join, status.failures[].stacks names a ConfigMap with the reason",
    ),
    "StartDeadlineExceeded": (
        "workers of the attempt had not started within runPolicy.startDeadlineSeconds",
        "the failure names pods, nodes and what they waited for: an image, a volume, a node, a quota",
    ),
    "Hang": (
        "the step did not advance for longer than hangPolicy allows; stacks of all ranks were collected",
        "the stacks name the rank that the others wait for: data, disk, or a collective on one rank alone",
    ),
    "HangOver": ("the step advances again", NOTHING),
    "NotHung": ("the step advances", NOTHING),
    "Straggler": (
        "one rank's own work takes much longer than that of the others, which all wait for it",
        "check its node: a throttled GPU, a busy drive, a noisy neighbour; ReplaceNodeAndRestart moves it",
    ),
    "StragglerRecovered": ("no rank delays the others any more", NOTHING),
    "StorageFailed": (
        "a volume failed while files were read or written, and may work again",
        "nothing to do where it stays rare; otherwise check the volume's server and the nodes' mounts",
    ),
    "SpillIntegrity": (
        "the drive returned other bytes than were written (exit code 84)",
        "replace the node's drive; the job goes to another node once",
    ),
    "ExclusionExpired": ("the job may use the node again", NOTHING),
    "Capacity": ("the job is smaller because the cluster has no capacity for more workers", "add nodes"),
    "Failure": (
        "the job is smaller because a rule of failurePolicy requires it",
        "check the failed node",
    ),
    "Refused": (
        "spec.workers does not divide the global batch, or does not fit the memory",
        "choose a number of workers that divides the batch",
    ),
}

REASONS = _rows(
    "reason",
    {**_SPEC, **_ATTEMPT, **_QUEUES, **_YIELDS, **_CHECKPOINTS, **_ENDS, **_FAILURES},
)


def meaning_of_reason(text: str) -> Meaning | None:
    """Return the row of a reason, in any case; None if the table does not have it."""
    return _in_any_case(REASONS, text)


def meaning_of_condition(text: str) -> Meaning | None:
    """Return the row of a condition's type, in any case; None if the table does not have it."""
    return _in_any_case(CONDITIONS, text)


def _in_any_case(table: dict[str, Meaning], text: str) -> Meaning | None:
    return table.get(text) or next(
        (row for name, row in table.items() if name.casefold() == text.casefold()), None
    )
