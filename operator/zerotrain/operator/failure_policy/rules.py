"""The user's failure rules. The first rule that matches a failure decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotrain.operator.api.failures import FailureAction, FailureReason, FailureRule
from zerotrain.operator.api.patterns import compiled
from zerotrain.operator.constants import Reason

_ALIASES = {FailureReason.OOM_KILLED: FailureReason.OUT_OF_MEMORY}
"""Aliases of reasons that rules may use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureFacts:
    """The facts about a failure that rules match on."""

    reason: Reason
    exit_code: int | None = None
    ranks: frozenset[int] = frozenset()
    """The rank that failed; all ranks of the worker if the rank is not known."""
    texts: tuple[str, ...] = ()
    """Messages of the program and of the cluster, each of bounded length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleMatch:
    """The decision of a rule on a failure."""

    index: int
    """Index of the rule in failurePolicy.rules."""
    action: FailureAction


def rule_match_of(rules: Sequence[FailureRule], facts: FailureFacts) -> RuleMatch | None:
    """Return the match of the first rule that matches; None leaves the failure to the built-in table."""
    for index, rule in enumerate(rules):
        if _matches(rule, facts):
            return RuleMatch(index=index, action=rule.action)
    return None


def _matches(rule: FailureRule, facts: FailureFacts) -> bool:
    """Return whether every condition of the rule holds; one match in a list is enough for that list."""
    return (
        (not rule.on_exit_codes or facts.exit_code in rule.on_exit_codes)
        and (
            not rule.on_reasons
            or facts.reason in {_ALIASES.get(item, item).value for item in rule.on_reasons}
        )
        and (not rule.on_ranks or not facts.ranks.isdisjoint(rule.on_ranks))
        and (not rule.on_message_patterns or _any_pattern_matches(rule.on_message_patterns, facts.texts))
    )


def _any_pattern_matches(patterns: Sequence[str], texts: Sequence[str]) -> bool:
    return any(compiled(pattern).found_in(text) for pattern in patterns for text in texts)
