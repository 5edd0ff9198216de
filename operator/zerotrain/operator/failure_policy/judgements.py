"""Why did a worker end, and which budget pays for it, before any rule of the user's.

The table of exit codes is the contract's; this module adds what only the cluster knows: the pod's reason,
a disruption, a node that is lost, a deletion by somebody else.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

from zerotrain.contract.exit_codes import ExitCode, RetryClass, meaning_of, signal_of
from zerotrain.operator.api import RestartCause
from zerotrain.operator.constants import Reason


class Verdict(StrEnum):
    RESTART = "Restart"
    RESTART_ONCE = "RestartOnce"
    """Another attempt unless this job already had one for the same reason."""
    FAIL = "Fail"


class Evidence(IntEnum):
    """How surely a worker's end is the first cause and not the echo of a peer's. Lower is surer."""

    SELF_INFLICTED = 0
    """Codes that a lost peer cannot produce: bad input, divergence, damaged spill."""
    KILLED = 1
    """A signal, the OOM killer, the node, the scheduler."""
    UNCLEAR = 2
    """A plain failure: a rank whose peer vanished ends like this too."""
    ECHO = 3
    """A rendezvous that lacked a peer, a SIGTERM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnd:
    """How one worker ended, without the code's meaning."""

    exit_code: int | None
    exit_reason: str | None = None
    pod_reason: str | None = None
    disruption: str | None = None
    exception: str | None = None
    """Type and text of the exception that ended the rank, in its program's words."""
    node_lost: bool = False
    """The pod's node does not answer, was deleted or is out of service."""
    by_init_container: bool = False
    """What ended is an init container: the table of exit codes says nothing of its codes."""
    deleted: bool = False
    """Somebody other than this operator asked for the pod's deletion, or the pod is just not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a worker's end means."""

    cause: RestartCause
    reason: Reason
    verdict: Verdict
    evidence: Evidence


BY_KUBELET = "TerminationByKubelet"
"""Says who, not why: the kubelet names it for a node that shuts down, for a critical pod that needs the room,
and for a node that ran out of memory or disk. The last one alone comes with the pod's reason `Evicted`, and
the job itself may have brought it about."""
PREEMPTING_DISRUPTIONS = frozenset({"PreemptionByScheduler", "EvictionByEvictionAPI", BY_KUBELET})
LOSING_DISRUPTIONS = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})
UNKNOWN_ENDS = frozenset({"ContainerStatusUnknown", "Unknown"})
"""What the kubelet (code 137) and containerd (code 255) say of a container that they find gone, or dead
without a witness, when they come back: its node was started anew."""
ABORTED = 128 + signal.SIGABRT

_POD_REASONS: dict[str, Judgement] = {
    "Evicted": Judgement(
        cause=RestartCause.INFRA, reason=Reason.EVICTED, verdict=Verdict.RESTART, evidence=Evidence.KILLED
    ),
    "Preempting": Judgement(
        cause=RestartCause.PREEMPTION,
        reason=Reason.PREEMPTED,
        verdict=Verdict.RESTART,
        evidence=Evidence.KILLED,
    ),
    "NodeLost": Judgement(
        cause=RestartCause.INFRA, reason=Reason.NODE_LOST, verdict=Verdict.RESTART, evidence=Evidence.KILLED
    ),
}
# UnexpectedAdmissionError, NodeAffinity, OutOfcpu, Terminated (node shutdown): the node refused or dropped
# the pod before or beside the program, so the program is not to blame.
_OTHER_POD_REASON = Judgement(
    cause=RestartCause.INFRA, reason=Reason.POD_REJECTED, verdict=Verdict.RESTART, evidence=Evidence.KILLED
)
_LOST = Judgement(
    cause=RestartCause.INFRA, reason=Reason.POD_LOST, verdict=Verdict.RESTART, evidence=Evidence.KILLED
)
_PREEMPTED = Judgement(
    cause=RestartCause.PREEMPTION, reason=Reason.PREEMPTED, verdict=Verdict.RESTART, evidence=Evidence.KILLED
)
_NODE_LOST = _POD_REASONS["NodeLost"]
_EVICTED = _POD_REASONS["Evicted"]
_OOM = Judgement(
    cause=RestartCause.APP, reason=Reason.OUT_OF_MEMORY, verdict=Verdict.RESTART, evidence=Evidence.KILLED
)
# A rank that ran out of memory takes no peer with it but by vanishing: no echo looks like this.
_OUT_OF_DEVICE_MEMORY = replace(_OOM, evidence=Evidence.SELF_INFLICTED)
_KILLED = Judgement(
    cause=RestartCause.APP, reason=Reason.KILLED, verdict=Verdict.RESTART, evidence=Evidence.KILLED
)
# NCCL's watchdog aborts a rank whose peer vanished, so an abort is no surer evidence than a plain failure.
# The launcher says the same of ranks (`launch.verdict`).
_ABORTED = replace(_KILLED, evidence=Evidence.UNCLEAR)
_RENDEZVOUS = Judgement(
    cause=RestartCause.INFRA,
    reason=Reason.RENDEZVOUS_TIMEOUT,
    verdict=Verdict.RESTART,
    evidence=Evidence.ECHO,
)
_STORAGE = Judgement(
    cause=RestartCause.INFRA,
    reason=Reason.STORAGE_FAILED,
    verdict=Verdict.RESTART,
    evidence=Evidence.KILLED,
)
_SPILL = Judgement(
    cause=RestartCause.INFRA,
    reason=Reason.SPILL_INTEGRITY,
    verdict=Verdict.RESTART_ONCE,
    evidence=Evidence.SELF_INFLICTED,
)
_PERMANENT = Judgement(
    cause=RestartCause.APP,
    reason=Reason.PERMANENT_FAILURE,
    verdict=Verdict.FAIL,
    evidence=Evidence.SELF_INFLICTED,
)
_PLAIN = Judgement(
    cause=RestartCause.APP, reason=Reason.RANK_FAILED, verdict=Verdict.RESTART, evidence=Evidence.UNCLEAR
)
_INIT_FAILED = Judgement(
    cause=RestartCause.APP,
    reason=Reason.INIT_CONTAINER_FAILED,
    verdict=Verdict.RESTART,
    evidence=Evidence.SELF_INFLICTED,
)
HUNG = Judgement(
    cause=RestartCause.APP, reason=Reason.HANG, verdict=Verdict.RESTART, evidence=Evidence.SELF_INFLICTED
)
"""Not asked of `judge`: a hung worker has not ended."""
NOT_STARTED = Judgement(
    cause=RestartCause.INFRA,
    reason=Reason.START_DEADLINE_EXCEEDED,
    verdict=Verdict.RESTART,
    evidence=Evidence.KILLED,
)
"""Neither has one that never started."""
_TERMINATED = Judgement(
    cause=RestartCause.APP, reason=Reason.KILLED, verdict=Verdict.RESTART, evidence=Evidence.ECHO
)


def judge(end: WorkerEnd) -> Judgement:
    """The meaning of one worker's end. Not to be asked about codes 0 and 75, which are no failures.

    First match: a code that the user must answer; then what the cluster did to the pod; then the code. Where
    a code tells of files, the cluster comes first: a volume goes away with its node.
    """
    by_cluster = _by_cluster(end)
    if end.by_init_container:
        return by_cluster or _of_init_container(end)
    retry = meaning_of(end.exit_code).retry if end.exit_code is not None else None
    if by_cluster is not None and end.exit_code in ABOUT_FILES:
        return by_cluster
    if retry is RetryClass.NEVER:
        return _PERMANENT
    if retry is RetryClass.ANOTHER_NODE_ONCE:
        return _SPILL
    if by_cluster is not None:
        return by_cluster
    if end.exit_reason == "OOMKilled":
        return _OOM
    if retry is RetryClass.INFRASTRUCTURE:
        return _STORAGE if end.exit_code == ExitCode.STORAGE_FAILED else _RENDEZVOUS
    if end.exit_code is None or (end.deleted and signal_of(end.exit_code) is not None):
        return _LOST
    if end.exit_code == ExitCode.TERMINATED:
        return _TERMINATED
    if end.exit_code == ABORTED:
        return _ABORTED
    if signal_of(end.exit_code) is not None:
        return _KILLED
    return _OUT_OF_DEVICE_MEMORY if (end.exception or "").startswith(_MEMORY_ERRORS) else _PLAIN


def _of_init_container(end: WorkerEnd) -> Judgement:
    if end.exit_reason == "OOMKilled":
        return _OOM
    if end.exit_code is None or (end.deleted and signal_of(end.exit_code) is not None):
        return _LOST
    return _INIT_FAILED


def blames_a_peer(exception: str | None) -> bool:
    """Whether a rank's last words are that it lost another one: our engine's, gloo's, NCCL's and sockets'."""
    return exception is not None and _LOST_A_PEER.search(exception) is not None


def _by_cluster(end: WorkerEnd) -> Judgement | None:
    """What was done to the pod or its node, whatever its program said."""
    if end.node_lost or end.disruption in LOSING_DISRUPTIONS:
        return _NODE_LOST
    if end.disruption == BY_KUBELET and end.pod_reason == "Evicted":
        return _EVICTED
    if end.disruption in PREEMPTING_DISRUPTIONS:
        return _PREEMPTED
    if end.pod_reason is not None:
        return _POD_REASONS.get(end.pod_reason, _OTHER_POD_REASON)
    # Of a pod that somebody deleted the kubelet may say the same.
    return _NODE_LOST if end.exit_reason in UNKNOWN_ENDS and not end.deleted else None


ABOUT_FILES = frozenset({ExitCode.BAD_DATA, ExitCode.CHECKPOINT_UNUSABLE})
"""Codes that a lost volume brings about as well as a wrong path."""

_MEMORY_ERRORS = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "OutOfMemoryError", "MemoryError")
"""Exceptions of a rank that found no memory, the device's or the host's."""

_LOST_A_PEER = re.compile(
    r"another rank ended|(closed|reset) by peer|broken pipe|remote process exit|ncclRemoteError",
    re.IGNORECASE,
)
