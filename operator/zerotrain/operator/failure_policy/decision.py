"""The decision after a failure: the user's rules on it, and whether another attempt may start, after how many
seconds.

The first rule that matches a failure gives the action. Restarts are counted per cause, against budgets.
Restarts that gained no step are counted as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, compress

from zerotrain.operator.api import RestartCause
from zerotrain.operator.api.failures import FailureAction, FailurePolicy, FailureReason, FailureRule, compiled
from zerotrain.operator.api.status import Restart
from zerotrain.operator.constants import Reason

from .classification import FailureClass


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The decision on another attempt: whether it starts, after which hold-off, and by which action."""

    restart: bool
    hold_off_s: float = 0.0
    reason: Reason | None = None
    """Reason why the job fails; None with a restart."""
    message: str = ""
    action: FailureAction = FailureAction.RESTART_ALL
    rule: int | None = None
    """Index of the rule in failurePolicy.rules that gave the action; None for the built-in one."""

    @property
    def charged(self) -> bool:
        """Whether the restart counts against a budget."""
        return self.action is not FailureAction.RESTART_ALL_IGNORE_BUDGET


_ALIASES = {FailureReason.OOM_KILLED: FailureReason.OUT_OF_MEMORY}
"""Aliases of reasons that rules may use."""


def matching_rule(
    rules: Sequence[FailureRule],
    *,
    reason: Reason,
    exit_code: int | None,
    ranks: frozenset[int],
    texts: Sequence[str],
) -> int | None:
    """Return the index of the first rule that matches a failure; None leaves it to the built-in action.

    `ranks` is the rank that failed, or all ranks of the worker if it is not known. `texts` are messages of
    the program and of the cluster, each of bounded length.
    """
    for index, rule in enumerate(rules):
        # Every condition of a rule must hold; one match in a list is enough for that list.
        if (
            (not rule.on_exit_codes or exit_code in rule.on_exit_codes)
            and (
                not rule.on_reasons or reason in {_ALIASES.get(item, item).value for item in rule.on_reasons}
            )
            and (not rule.on_ranks or not ranks.isdisjoint(rule.on_ranks))
            and (not rule.on_message_patterns or _any_pattern_matches(rule.on_message_patterns, texts))
        ):
            return index
    return None


def action_of(failure_class: FailureClass, rules: Sequence[FailureRule], rule: int | None) -> FailureAction:
    """Return the action of the rule with the index `rule`, or the built-in one of the class."""
    return failure_class.action if rule is None else rules[rule].action


def _any_pattern_matches(patterns: Sequence[str], texts: Sequence[str]) -> bool:
    return any(compiled(pattern).found_in(text) for pattern in patterns for text in texts)


FIRST_HOLD_OFF_S = 5.0
MAX_HOLD_OFF_S = 300.0
QUIET_S = 3600.0
"""Seconds after which an attempt does not count as a failed start, even if the window is shorter."""


def decide(
    failure_class: FailureClass,
    history: Sequence[Restart],
    policy: FailurePolicy,
    *,
    step: int,
    now: datetime,
    rule: int | None = None,
) -> Decision:
    """Decide between another attempt and the end of the job.

    `history` is oldest first and does not contain this failure. `rule` is the index in `policy.rules` of the
    rule that matches, if one does. The checks run in this order: the action of the rule, or the built-in
    action if no rule matched; the budget of the cause, unless the action is exempt from it; the limit on
    restarts without progress, from which no action is exempt.
    """
    action = action_of(failure_class, policy.rules, rule)
    refusal = (
        _refused_by_action(failure_class, history, action, rule)
        or _exhausted(failure_class.cause, history, policy, action=action, step=step, now=now)
        or _without_progress(failure_class.cause, history, policy, step=step, now=now)
    )
    if refusal is not None:
        return replace(refusal, rule=rule)
    wait_s = hold_off_s(history, policy, step=step, now=now, reason=failure_class.reason)
    return Decision(restart=True, hold_off_s=wait_s, action=action, rule=rule)


def _refused_by_action(
    failure_class: FailureClass,
    history: Sequence[Restart],
    action: FailureAction,
    rule: int | None,
) -> Decision | None:
    if action is FailureAction.FAIL_JOB:
        if rule is None:
            return _end(Reason.PERMANENT_FAILURE, "another attempt cannot help", action)
        return _end(Reason.FAILED_BY_RULE, f"failurePolicy.rules[{rule}] requires FailJob", action)
    if rule is None and failure_class.once and any(item.reason == failure_class.reason for item in history):
        return _end(Reason.PERMANENT_FAILURE, f"{failure_class.reason} happened a second time", action)
    return None


def _exhausted(
    cause: RestartCause,
    history: Sequence[Restart],
    policy: FailurePolicy,
    *,
    action: FailureAction,
    step: int,
    now: datetime,
) -> Decision | None:
    limit = limit_of(cause, policy)
    if limit is None or action is FailureAction.RESTART_ALL_IGNORE_BUDGET:
        return None
    used = restarts_charged(history, cause, policy, step=step, now=now)
    if used < limit:
        return None
    field = "maxRestarts" if cause is RestartCause.APP else "maxInfrastructureRestarts"
    message = (
        f"{used} restarts by {cause} within {policy.window_seconds} s, {limit} are allowed "
        f"(older ones count until a step is gained); raise failurePolicy.{field} or check status.failures"
    )
    return _end(Reason.RESTARTS_EXHAUSTED, message, action)


def _without_progress(
    cause: RestartCause, history: Sequence[Restart], policy: FailurePolicy, *, step: int, now: datetime
) -> Decision | None:
    """Return the end of the job if too many restarts in a row gained no step; None otherwise.

    A preemption is not the job's fault, so preemptions neither end the job here nor count.
    """
    idle = idle_restarts(history, policy, step=step, now=now)
    if cause is RestartCause.PREEMPTION or idle < policy.max_restarts_without_progress:
        return None
    message = (
        f"{idle} restarts in a row gained no step beyond {_furthest(history, step)}, "
        f"{policy.max_restarts_without_progress} are allowed; check status.failures, or raise "
        "failurePolicy.maxRestartsWithoutProgress"
    )
    return _end(Reason.NO_PROGRESS, message, FailureAction.FAIL_JOB)


def _end(reason: Reason, message: str, action: FailureAction) -> Decision:
    return Decision(restart=False, reason=reason, message=message, action=action)


def limit_of(cause: RestartCause, policy: FailurePolicy) -> int | None:
    """Return how many restarts by `cause` the window allows.

    None means no limit: a preemption is not the job's fault.
    """
    if cause is RestartCause.PREEMPTION:
        return None
    return policy.max_infrastructure_restarts if cause is RestartCause.INFRA else policy.max_restarts


def restarts_charged(
    history: Sequence[Restart], cause: RestartCause, policy: FailurePolicy, *, step: int, now: datetime
) -> int:
    """Return how many restarts by `cause` count against its limit; `step` is the newest step known."""
    counted = compress(history, still_counts(history, policy, step=step, now=now))
    return sum(1 for item in counted if item.charged and item.cause is cause)


def still_counts(
    history: Sequence[Restart], policy: FailurePolicy, *, step: int, now: datetime
) -> tuple[bool, ...]:
    """Return, for each restart (oldest first), whether it is in the window or no step was gained since.

    The second condition ends a job whose hold-offs spread its restarts wider than the window. A program that
    reports no steps is judged by its pace: a restart that was followed by a long quiet time does not count.
    """
    idle = _idle(history, policy, step=step, now=now)
    return tuple(
        is_idle or (now - item.time).total_seconds() < policy.window_seconds
        for item, is_idle in zip(history, idle, strict=True)
    )


def idle_restarts(history: Sequence[Restart], policy: FailurePolicy, *, step: int, now: datetime) -> int:
    """Return the number of restarts since the last one that gained a step; preemptions are not counted."""
    idle = compress(history, _idle(history, policy, step=step, now=now))
    return sum(1 for item in idle if item.cause is not RestartCause.PREEMPTION)


def hold_off_s(
    history: Sequence[Restart], policy: FailurePolicy, *, step: int, now: datetime, reason: str = ""
) -> float:
    """Return the seconds to wait before the next attempt.

    The hold-off is 0 for the first restart and after an attempt that gained a step. Otherwise it doubles from
    5 s to 300 s. A job that makes progress between failures restarts at once; a job that only fails does not
    waste the cluster's time. After a hang the hold-off grows with the number of hangs, whatever was gained
    between them: a false alarm must become rarer each time.
    """
    repeats = sum(_idle(history, policy, step=step, now=now))
    if reason == Reason.HANG:
        repeats = max(repeats, 1 + sum(1 for item in history if item.reason == Reason.HANG))
    return 0.0 if repeats == 0 else min(FIRST_HOLD_OFF_S * 2.0 ** (repeats - 1), MAX_HOLD_OFF_S)


def _idle(history: Sequence[Restart], policy: FailurePolicy, *, step: int, now: datetime) -> tuple[bool, ...]:
    """Return, for each restart (oldest first), whether neither it nor any later one gained a step.

    A step is gained if it is beyond the furthest step of all earlier attempts, not only beyond the last one:
    a job that fails around step 50 again and again gains nothing by ending at step 48 after step 47.
    """
    reached = [item.step for item in history] + [step]
    furthest = accumulate(reached[:-1], max)
    gained = [after > before for before, after in zip(furthest, reached[1:], strict=True)]
    stepless = not any(reached)
    idle, found, later = True, list[bool](), now
    for item, gained_step in zip(reversed(history), reversed(gained), strict=True):
        quiet = (later - item.time).total_seconds() >= max(policy.window_seconds, QUIET_S)
        idle = idle and not gained_step and not (stepless and quiet)
        found.append(idle)
        later = item.time
    return tuple(reversed(found))


def _furthest(history: Sequence[Restart], step: int) -> int:
    return max([step, *(item.step for item in history)])
