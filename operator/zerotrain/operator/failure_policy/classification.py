"""The cause of a worker's end and the budget that it is charged to, before any rule of the user applies.

The table of exit codes is part of the contract. This module adds what only the cluster knows: the pod's
reason, a disruption, a lost node, a deletion by another client.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from enum import IntEnum

from zerotrain.contract.exit_codes import ExitCode, RetryClass, meaning_of, signal_of
from zerotrain.operator.api import RestartCause
from zerotrain.operator.api.failures import FailureAction
from zerotrain.operator.constants import Reason


class Evidence(IntEnum):
    """Certainty that a worker's end is the first cause and not a consequence of a peer's end; lower is
    surer."""

    SELF_INFLICTED = 0
    """Codes that a lost peer cannot produce: bad input, divergence, damaged spill."""
    KILLED = 1
    """Killed by a signal, the OOM killer, the node or the scheduler."""
    UNCLEAR = 2
    """A plain failure; a rank whose peer vanished ends in the same way."""
    ECHO = 3
    """A consequence of another end: a rendezvous that lacked a peer, or a SIGTERM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureClass:
    """The meaning of a worker's end."""

    cause: RestartCause
    reason: Reason
    evidence: Evidence
    action: FailureAction = FailureAction.RESTART_ALL
    """Action unless a rule of the user matches."""
    once: bool = False
    """Whether the action is taken once per job, and a second failure for the same reason fails the job."""


BY_KUBELET = "TerminationByKubelet"
"""Reason of a disruption by the kubelet. It names the component, not the cause.

The kubelet sets it when a node shuts down, when a critical pod needs the resources, and when a node runs out
of memory or disk. Only in the last case does the pod have the reason `Evicted`, and then the job itself may
be the cause.
"""
PREEMPTING_DISRUPTIONS = frozenset({"PreemptionByScheduler", "EvictionByEvictionAPI", BY_KUBELET})
LOSING_DISRUPTIONS = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})
UNKNOWN_ENDS = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons that the kubelet (code 137) and containerd (code 255) give, after they come back, for a container
that is gone or that ended unobserved: its node was restarted."""
ABORTED = 128 + signal.SIGABRT

_EVICTED = FailureClass(cause=RestartCause.INFRA, reason=Reason.EVICTED, evidence=Evidence.KILLED)
_PREEMPTED = FailureClass(cause=RestartCause.PREEMPTION, reason=Reason.PREEMPTED, evidence=Evidence.KILLED)
_NODE_LOST = FailureClass(cause=RestartCause.INFRA, reason=Reason.NODE_LOST, evidence=Evidence.KILLED)
_POD_REASONS = {"Evicted": _EVICTED, "Preempting": _PREEMPTED, "NodeLost": _NODE_LOST}
# UnexpectedAdmissionError, NodeAffinity, OutOfcpu, Terminated (node shutdown): the node rejected or dropped
# the pod before or besides the program, so the program is not to blame.
_OTHER_POD_REASON = FailureClass(
    cause=RestartCause.INFRA, reason=Reason.POD_REJECTED, evidence=Evidence.KILLED
)
_LOST = FailureClass(cause=RestartCause.INFRA, reason=Reason.POD_LOST, evidence=Evidence.KILLED)
_OOM = FailureClass(cause=RestartCause.APP, reason=Reason.OUT_OF_MEMORY, evidence=Evidence.KILLED)
# A rank that ran out of device memory affects its peers only by vanishing: no lost peer ends like this.
_OUT_OF_DEVICE_MEMORY = replace(_OOM, evidence=Evidence.SELF_INFLICTED)
_KILLED = FailureClass(cause=RestartCause.APP, reason=Reason.KILLED, evidence=Evidence.KILLED)
# NCCL's watchdog aborts a rank whose peer vanished, so an abort is no surer evidence than a plain failure.
# The launcher classifies ranks in the same way (`launch.container_exit`).
_ABORTED = replace(_KILLED, evidence=Evidence.UNCLEAR)
_RENDEZVOUS = FailureClass(cause=RestartCause.INFRA, reason=Reason.RENDEZVOUS_TIMEOUT, evidence=Evidence.ECHO)
_STORAGE = FailureClass(cause=RestartCause.INFRA, reason=Reason.STORAGE_FAILED, evidence=Evidence.KILLED)
_SPILL = FailureClass(
    cause=RestartCause.INFRA,
    reason=Reason.SPILL_INTEGRITY,
    action=FailureAction.REPLACE_NODE_AND_RESTART,
    evidence=Evidence.SELF_INFLICTED,
    once=True,
)
_PERMANENT = FailureClass(
    cause=RestartCause.APP,
    reason=Reason.PERMANENT_FAILURE,
    action=FailureAction.FAIL_JOB,
    evidence=Evidence.SELF_INFLICTED,
)
_PLAIN = FailureClass(cause=RestartCause.APP, reason=Reason.RANK_FAILED, evidence=Evidence.UNCLEAR)
_INIT_FAILED = FailureClass(
    cause=RestartCause.APP, reason=Reason.INIT_CONTAINER_FAILED, evidence=Evidence.SELF_INFLICTED
)
HUNG = FailureClass(cause=RestartCause.APP, reason=Reason.HANG, evidence=Evidence.SELF_INFLICTED)
"""Class of a hung worker. `classify` does not return it, because a hung worker has not ended."""
NOT_STARTED = FailureClass(
    cause=RestartCause.INFRA, reason=Reason.START_DEADLINE_EXCEEDED, evidence=Evidence.KILLED
)
"""Class of a worker that never started. `classify` does not return it, because such a worker has not
ended."""
_TERMINATED = FailureClass(cause=RestartCause.APP, reason=Reason.KILLED, evidence=Evidence.ECHO)


def classify(
    exit_code: int | None,
    *,
    exit_reason: str | None = None,
    pod_reason: str | None = None,
    disruption: str | None = None,
    exception: str | None = None,
    node_lost: bool = False,
    by_init_container: bool = False,
    deleted: bool = False,
) -> FailureClass:
    """Return the meaning of one worker's end. Do not call it for codes 0 and 75, which are no failures.

    The first match decides: a code that the user must act on, then what the cluster did to the pod, then the
    code. For codes about files the cluster comes first, because a volume goes away with its node.

    The facts are those of `PodView`. `exception`: type and text of the exception that ended the rank, as its
    program reported them. `node_lost`: the pod's node does not answer, was deleted or is out of service.
    `by_init_container`: the container that ended is an init container, to which the table of exit codes does
    not apply. `deleted`: another client than this operator requested the pod's deletion, or the pod does not
    exist.
    """
    by_cluster = _by_cluster(pod_reason, disruption, exit_reason, node_lost=node_lost, deleted=deleted)
    gone = exit_code is None or (deleted and signal_of(exit_code) is not None)
    if by_init_container:
        return by_cluster or (_OOM if exit_reason == "OOMKilled" else _LOST if gone else _INIT_FAILED)
    retry = meaning_of(exit_code).retry if exit_code is not None else None
    if by_cluster is not None and exit_code in ABOUT_FILES:
        return by_cluster
    if retry is RetryClass.NEVER:
        return _PERMANENT
    if retry is RetryClass.ANOTHER_NODE_ONCE:
        return _SPILL
    if by_cluster is not None:
        return by_cluster
    if exit_reason == "OOMKilled":
        return _OOM
    if retry is RetryClass.INFRASTRUCTURE:
        return _STORAGE if exit_code == ExitCode.STORAGE_FAILED else _RENDEZVOUS
    if exit_code is None or gone:
        return _LOST
    if exit_code == ExitCode.TERMINATED:
        return _TERMINATED
    if exit_code == ABORTED:
        return _ABORTED
    if signal_of(exit_code) is not None:
        return _KILLED
    return _OUT_OF_DEVICE_MEMORY if (exception or "").startswith(_MEMORY_ERRORS) else _PLAIN


def blames_a_peer(exception: str | None) -> bool:
    """Return whether a rank's exception says that it lost a peer, in the words of our engine, gloo, NCCL or
    sockets."""
    return exception is not None and _LOST_A_PEER.search(exception) is not None


def _by_cluster(
    pod_reason: str | None,
    disruption: str | None,
    exit_reason: str | None,
    *,
    node_lost: bool,
    deleted: bool,
) -> FailureClass | None:
    """Return the class of what was done to the pod or its node, whatever its program reported; None if
    nothing was."""
    if node_lost or disruption in LOSING_DISRUPTIONS:
        return _NODE_LOST
    if disruption == BY_KUBELET and pod_reason == "Evicted":
        return _EVICTED
    if disruption in PREEMPTING_DISRUPTIONS:
        return _PREEMPTED
    if pod_reason is not None:
        return _POD_REASONS.get(pod_reason, _OTHER_POD_REASON)
    # The kubelet may report the same reason for a pod that was deleted.
    return _NODE_LOST if exit_reason in UNKNOWN_ENDS and not deleted else None


ABOUT_FILES = frozenset({ExitCode.BAD_DATA, ExitCode.CHECKPOINT_UNUSABLE})
"""Exit codes that a lost volume causes as well as a wrong path."""

_MEMORY_ERRORS = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "OutOfMemoryError", "MemoryError")
"""Names of exceptions of a rank that ran out of memory, on the device or on the host."""

_LOST_A_PEER = re.compile(
    r"another rank ended|(closed|reset) by peer|broken pipe|remote process exit|ncclRemoteError",
    re.IGNORECASE,
)
