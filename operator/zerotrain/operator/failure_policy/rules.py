"""The user's rules: which one, if any, speaks about a failure. The first that matches decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotrain.operator.api.failures import FailureAction, FailureReason, FailureRule
from zerotrain.operator.api.patterns import compiled
from zerotrain.operator.constants import Reason

_SHOWN = {FailureReason.OOM_KILLED: FailureReason.OUT_OF_MEMORY}
"""Names that rules may use for another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureFacts:
    """What rules look at."""

    reason: Reason
    exit_code: int | None = None
    ranks: frozenset[int] = frozenset()
    """The rank that failed; all ranks of the worker where nobody knows which."""
    texts: tuple[str, ...] = ()
    """What the program and the cluster said, each of bounded length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """What a rule says about a failure."""

    index: int
    """Of the rule in failurePolicy.rules."""
    action: FailureAction


def ruling_of(rules: Sequence[FailureRule], facts: FailureFacts) -> Ruling | None:
    """The first rule that matches; None leaves the failure to the built-in table."""
    for index, rule in enumerate(rules):
        if _matches(rule, facts):
            return Ruling(index=index, action=rule.action)
    return None


def _matches(rule: FailureRule, facts: FailureFacts) -> bool:
    """Everything that the rule names must hold; of each list one item is enough."""
    return (
        (not rule.on_exit_codes or facts.exit_code in rule.on_exit_codes)
        and (
            not rule.on_reasons or facts.reason in {_SHOWN.get(item, item).value for item in rule.on_reasons}
        )
        and (not rule.on_ranks or not facts.ranks.isdisjoint(rule.on_ranks))
        and (not rule.on_message_patterns or _speaks(rule.on_message_patterns, facts.texts))
    )


def _speaks(patterns: Sequence[str], texts: Sequence[str]) -> bool:
    return any(compiled(pattern).found_in(text) for pattern in patterns for text in texts)
