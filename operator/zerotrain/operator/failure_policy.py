"""Why did a worker end, who pays for it, and is there another attempt? Pure; reconcile asks, nobody else.

The table of exit codes is the contract's; this module adds what only the cluster knows: the pod's reason,
a disruption, a deletion by somebody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum, StrEnum

from zerotrain.contract.exit_codes import ExitCode, RetryClass, meaning_of
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
    deleted: bool = False
    """Somebody other than this operator asked for the pod's deletion, or the pod is just not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a worker's end means."""

    cause: RestartCause
    reason: Reason
    verdict: Verdict
    evidence: Evidence


PREEMPTING_DISRUPTIONS = frozenset({"PreemptionByScheduler", "EvictionByEvictionAPI", "TerminationByKubelet"})
LOSING_DISRUPTIONS = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})

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
_OOM = Judgement(
    cause=RestartCause.APP, reason=Reason.OUT_OF_MEMORY, verdict=Verdict.RESTART, evidence=Evidence.KILLED
)
_KILLED = Judgement(
    cause=RestartCause.APP, reason=Reason.KILLED, verdict=Verdict.RESTART, evidence=Evidence.KILLED
)
_RENDEZVOUS = Judgement(
    cause=RestartCause.INFRA,
    reason=Reason.RENDEZVOUS_TIMEOUT,
    verdict=Verdict.RESTART,
    evidence=Evidence.ECHO,
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
_TERMINATED = Judgement(
    cause=RestartCause.APP, reason=Reason.KILLED, verdict=Verdict.RESTART, evidence=Evidence.ECHO
)


def judge(end: WorkerEnd) -> Judgement:
    """The meaning of one worker's end. Not to be asked about codes 0 and 75, which are no failures.

    First match: a code that the user must answer; then what the cluster did to the pod; then the code.
    """
    retry = meaning_of(end.exit_code).retry if end.exit_code is not None else None
    if retry is RetryClass.NEVER:
        return _PERMANENT
    if retry is RetryClass.ANOTHER_NODE_ONCE:
        return _SPILL
    if end.disruption in LOSING_DISRUPTIONS:
        return _NODE_LOST
    if end.disruption in PREEMPTING_DISRUPTIONS:
        return _PREEMPTED
    if end.pod_reason is not None:
        return _POD_REASONS.get(end.pod_reason, _OTHER_POD_REASON)
    if end.exit_reason == "OOMKilled":
        return _OOM
    if retry is RetryClass.INFRASTRUCTURE:
        return _RENDEZVOUS
    if end.exit_code is None or (end.deleted and end.exit_code > 128):
        return _LOST
    if end.exit_code == ExitCode.TERMINATED:
        return _TERMINATED
    return _KILLED if end.exit_code > 128 else _PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRestart:
    """One restart of the job's history."""

    time: datetime
    cause: RestartCause
    reason: str
    step: int
    """Newest step known when the attempt ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """`spec.failurePolicy`, as far as counting goes."""

    max_restarts: int
    window_s: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Whether there is another attempt, and after how long."""

    restart: bool
    hold_off_s: float = 0.0
    reason: Reason | None = None
    """Why the job fails; None with a restart."""
    message: str = ""


MAX_INFRA_RESTARTS = 20
"""Infrastructure's own budget in the same window: a job that no node will run must end some day."""

FIRST_HOLD_OFF_S = 5.0
MAX_HOLD_OFF_S = 300.0
QUIET_S = 3600.0
"""An attempt that lasted so long was no failed start, whatever the window."""


def decide(
    judgement: Judgement, history: Sequence[PastRestart], budget: Budget, *, step: int, now: datetime
) -> Decision:
    """Another attempt, or the end of the job. `history` is oldest first and does not hold this failure."""
    if judgement.verdict is Verdict.FAIL:
        return Decision(restart=False, reason=Reason.PERMANENT_FAILURE, message="another attempt cannot help")
    if judgement.verdict is Verdict.RESTART_ONCE and any(h.reason == judgement.reason for h in history):
        return Decision(
            restart=False,
            reason=Reason.PERMANENT_FAILURE,
            message=f"{judgement.reason} happened a second time",
        )
    limit = limit_of(judgement.cause, budget)
    used = restarts_charged(history, judgement.cause, budget, step=step, now=now)
    if limit is not None and used >= limit:
        return Decision(
            restart=False,
            reason=Reason.RESTARTS_EXHAUSTED,
            message=(
                f"{used} restarts by {judgement.cause} within {budget.window_s} s, {limit} are allowed "
                "(older ones count until a step is gained); "
                "raise failurePolicy.maxRestarts or look at status.failures"
            ),
        )
    return Decision(restart=True, hold_off_s=hold_off_s(history, step=step))


def limit_of(cause: RestartCause, budget: Budget) -> int | None:
    """Restarts allowed in the window; None is without limit: being preempted is no fault of the job."""
    if cause is RestartCause.PREEMPTION:
        return None
    return MAX_INFRA_RESTARTS if cause is RestartCause.INFRA else budget.max_restarts


def restarts_charged(
    history: Sequence[PastRestart], cause: RestartCause, budget: Budget, *, step: int, now: datetime
) -> int:
    """How many restarts by `cause` count against its limit; `step` is the newest step known."""
    counted = still_counts(history, budget, step=step, now=now)
    return sum(1 for item, counts in zip(history, counted, strict=True) if counts and item.cause is cause)


def still_counts(
    history: Sequence[PastRestart], budget: Budget, *, step: int, now: datetime
) -> tuple[bool, ...]:
    """For each restart, oldest first: whether it is in the window, or no step was gained since.

    The second part ends a job whose hold-offs spread its restarts wider than the window. A program that
    reports no steps is judged by its pace: a restart followed by a long quiet time is not held against it.
    """
    counted, idle, later = list[bool](), True, now
    for item in reversed(history):
        quiet = (later - item.time).total_seconds() >= max(budget.window_s, QUIET_S)
        idle = idle and item.step >= step and (step > 0 or not quiet)
        counted.append(idle or (now - item.time).total_seconds() < budget.window_s)
        later = item.time
    return tuple(reversed(counted))


def hold_off_s(history: Sequence[PastRestart], *, step: int) -> float:
    """0 for the first restart and after an attempt that gained a step; doubles from 5 s to 300 s otherwise.

    A job that gets ahead between failures is restarted at once, one that only fails does not burn the
    cluster's time.
    """
    steps = [item.step for item in history] + [step]
    idle = 0
    for later, earlier in zip(reversed(steps), reversed(steps[:-1]), strict=False):
        if later > earlier:
            break
        idle += 1
    return 0.0 if idle == 0 else min(FIRST_HOLD_OFF_S * 2.0 ** (idle - 1), MAX_HOLD_OFF_S)
