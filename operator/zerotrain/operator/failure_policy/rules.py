"""The user's failure rules. The first rule that matches a failure decides."""

from __future__ import annotations

from collections.abc import Sequence

from zerotrain.operator.api.failures import FailureAction, FailureReason, FailureRule, compiled
from zerotrain.operator.constants import Reason

from .classification import FailureClass, RetryDecision

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
    return _BUILT_IN[failure_class.retry] if rule is None else rules[rule].action


_BUILT_IN = {
    RetryDecision.RESTART: FailureAction.RESTART_ALL,
    RetryDecision.RESTART_ONCE: FailureAction.REPLACE_NODE_AND_RESTART,
    RetryDecision.FAIL: FailureAction.FAIL_JOB,
}


def _any_pattern_matches(patterns: Sequence[str], texts: Sequence[str]) -> bool:
    return any(compiled(pattern).found_in(text) for pattern in patterns for text in texts)
