"""May there be another attempt, and after how long? Counts restarts per cause, and those that led nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from zerotrain.operator.api import RestartCause
from zerotrain.operator.api.failures import FailureAction
from zerotrain.operator.constants import Reason

from .judgements import Judgement, Verdict
from .rules import Ruling


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRestart:
    """One restart of the job's history."""

    time: datetime
    cause: RestartCause
    reason: str
    step: int
    """Newest step known when the attempt ended."""
    charged: bool = True
    """False for a restart that a rule took out of the budgets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """`spec.failurePolicy`, as far as counting goes."""

    max_restarts: int
    window_s: int
    max_infra_restarts: int = 20
    max_idle_restarts: int = 20
    """Restarts in a row that gained no step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Whether there is another attempt, after how long, and what else has to happen."""

    restart: bool
    hold_off_s: float = 0.0
    reason: Reason | None = None
    """Why the job fails; None with a restart."""
    message: str = ""
    action: FailureAction = FailureAction.RESTART_ALL

    @property
    def charged(self) -> bool:
        """Whether the restart counts against a budget."""
        return self.action is not FailureAction.RESTART_ALL_IGNORE_BUDGET


FIRST_HOLD_OFF_S = 5.0
MAX_HOLD_OFF_S = 300.0
QUIET_S = 3600.0
"""An attempt that lasted so long was no failed start, whatever the window."""


def decide(
    judgement: Judgement,
    history: Sequence[PastRestart],
    budget: Budget,
    *,
    step: int,
    now: datetime,
    ruling: Ruling | None = None,
) -> Decision:
    """Another attempt, or the end of the job. `history` is oldest first and does not hold this failure.

    In this order: the rule's action, or the built-in one where no rule matched; the budget of the cause,
    unless the action leaves it alone; the restarts that led nowhere, which no action leaves alone.
    """
    action = ruling.action if ruling is not None else _BUILT_IN[judgement.verdict]
    refusal = (
        _refused_by_action(judgement, history, action, ruling)
        or _exhausted(judgement.cause, history, budget, action=action, step=step, now=now)
        or _led_nowhere(judgement.cause, history, budget, step=step, now=now)
    )
    if refusal is not None:
        return refusal
    wait_s = hold_off_s(history, budget, step=step, now=now, reason=judgement.reason)
    return Decision(restart=True, hold_off_s=wait_s, action=action)


_BUILT_IN = {
    Verdict.RESTART: FailureAction.RESTART_ALL,
    Verdict.RESTART_ONCE: FailureAction.REPLACE_NODE_AND_RESTART,
    Verdict.FAIL: FailureAction.FAIL_JOB,
}


def _refused_by_action(
    judgement: Judgement, history: Sequence[PastRestart], action: FailureAction, ruling: Ruling | None
) -> Decision | None:
    if action is FailureAction.FAIL_JOB:
        if ruling is None:
            return _end(Reason.PERMANENT_FAILURE, "another attempt cannot help", action)
        return _end(Reason.FAILED_BY_RULE, f"failurePolicy.rules[{ruling.index}] says FailJob", action)
    once = ruling is None and judgement.verdict is Verdict.RESTART_ONCE
    if once and any(item.reason == judgement.reason for item in history):
        return _end(Reason.PERMANENT_FAILURE, f"{judgement.reason} happened a second time", action)
    return None


def _exhausted(
    cause: RestartCause,
    history: Sequence[PastRestart],
    budget: Budget,
    *,
    action: FailureAction,
    step: int,
    now: datetime,
) -> Decision | None:
    limit = limit_of(cause, budget)
    if limit is None or action is FailureAction.RESTART_ALL_IGNORE_BUDGET:
        return None
    used = restarts_charged(history, cause, budget, step=step, now=now)
    if used < limit:
        return None
    field = "maxRestarts" if cause is RestartCause.APP else "maxInfrastructureRestarts"
    message = (
        f"{used} restarts by {cause} within {budget.window_s} s, {limit} are allowed "
        f"(older ones count until a step is gained); raise failurePolicy.{field} or look at status.failures"
    )
    return _end(Reason.RESTARTS_EXHAUSTED, message, action)


def _led_nowhere(
    cause: RestartCause, history: Sequence[PastRestart], budget: Budget, *, step: int, now: datetime
) -> Decision | None:
    """Being preempted is no fault of the job, so preemptions neither end it here nor count."""
    idle = idle_restarts(history, budget, step=step, now=now)
    if cause is RestartCause.PREEMPTION or idle < budget.max_idle_restarts:
        return None
    message = (
        f"{idle} restarts in a row gained no step beyond {_furthest(history, step)}, "
        f"{budget.max_idle_restarts} are allowed; look at status.failures, or raise "
        "failurePolicy.maxRestartsWithoutProgress"
    )
    return _end(Reason.NO_STEP_GAINED, message, FailureAction.FAIL_JOB)


def _end(reason: Reason, message: str, action: FailureAction) -> Decision:
    return Decision(restart=False, reason=reason, message=message, action=action)


def limit_of(cause: RestartCause, budget: Budget) -> int | None:
    """Restarts allowed in the window; None is without limit: being preempted is no fault of the job."""
    if cause is RestartCause.PREEMPTION:
        return None
    return budget.max_infra_restarts if cause is RestartCause.INFRA else budget.max_restarts


def restarts_charged(
    history: Sequence[PastRestart], cause: RestartCause, budget: Budget, *, step: int, now: datetime
) -> int:
    """How many restarts by `cause` count against its limit; `step` is the newest step known."""
    counted = still_counts(history, budget, step=step, now=now)
    return sum(
        1
        for item, counts in zip(history, counted, strict=True)
        if counts and item.charged and item.cause is cause
    )


def still_counts(
    history: Sequence[PastRestart], budget: Budget, *, step: int, now: datetime
) -> tuple[bool, ...]:
    """For each restart, oldest first: whether it is in the window, or no step was gained since.

    The second part ends a job whose hold-offs spread its restarts wider than the window. A program that
    reports no steps is judged by its pace: a restart followed by a long quiet time is not held against it.
    """
    idle = _idle(history, budget, step=step, now=now)
    return tuple(
        led_nowhere or (now - item.time).total_seconds() < budget.window_s
        for item, led_nowhere in zip(history, idle, strict=True)
    )


def idle_restarts(history: Sequence[PastRestart], budget: Budget, *, step: int, now: datetime) -> int:
    """Restarts since the last one that gained a step; preemptions are passed over."""
    idle = _idle(history, budget, step=step, now=now)
    return sum(
        1
        for item, led_nowhere in zip(history, idle, strict=True)
        if led_nowhere and item.cause is not RestartCause.PREEMPTION
    )


def hold_off_s(
    history: Sequence[PastRestart], budget: Budget, *, step: int, now: datetime, reason: str = ""
) -> float:
    """0 for the first restart and after an attempt that gained a step; doubles from 5 s to 300 s otherwise.

    A job that gets ahead between failures is restarted at once, one that only fails does not burn the
    cluster's time. Hangs are held off by their number whatever was gained between them: an alarm that is
    wrong must come ever more rarely.
    """
    repeats = sum(_idle(history, budget, step=step, now=now))
    if reason == Reason.HANG:
        repeats = max(repeats, 1 + sum(1 for item in history if item.reason == Reason.HANG))
    return 0.0 if repeats == 0 else min(FIRST_HOLD_OFF_S * 2.0 ** (repeats - 1), MAX_HOLD_OFF_S)


def _idle(history: Sequence[PastRestart], budget: Budget, *, step: int, now: datetime) -> tuple[bool, ...]:
    """For each restart, oldest first: whether neither it nor any later one got beyond the furthest step.

    Measured against the furthest step of all, not the last one: a job that fails around step 50 again and
    again gains nothing by ending at 48 after 47.
    """
    reached = [item.step for item in history] + [step]
    furthest, gained = 0, list[bool]()
    for earlier, later_step in pairwise(reached):
        furthest = max(furthest, earlier)
        gained.append(later_step > furthest)
    stepless = not any(reached)
    idle, found, later = True, list[bool](), now
    for item, got_ahead in zip(reversed(history), reversed(gained), strict=True):
        quiet = (later - item.time).total_seconds() >= max(budget.window_s, QUIET_S)
        idle = idle and not got_ahead and not (stepless and quiet)
        found.append(idle)
        later = item.time
    return tuple(reversed(found))


def _furthest(history: Sequence[PastRestart], step: int) -> int:
    return max([step, *(item.step for item in history)])
