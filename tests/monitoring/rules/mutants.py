"""Mutants of the rules, each of which some case must notice.

Every `for`, number, window, comparison and alternative of a matcher is changed, one at a time, in alerts and
in the recording rules that they use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from tests.monitoring.rules.rulebook import Rule, with_rule

_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*")"""
    r"""|(?P<window>\[[^\]]+\])"""
    r"""|(?P<name>[a-zA-Z_][a-zA-Z0-9_:]*)"""
    r"""|(?P<number>\d+(?:\.\d+)?)"""
    r"""|(?P<compare>==|!=|>=|<=|>|<)(?!~)"""
    r"""|(?P<match>=~|!~|=|!=)"""
)
_WINDOW = re.compile(r"\[[^\]]+\]")
_DURATION = re.compile(r"(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_FLIPPED = {"==": "!=", "!=": "==", ">": "<", "<": ">", ">=": "<", "<=": ">"}
_FOR_FACTORS = (0.5, 2.0)
_SHIFTS = (0.88, 1.12)
_WINDOW_FACTORS = (0.5, 2.0)
_BEYOND_ANY = "1e18"
"""Replacement for the 0 in a guard against division by 0: more than anything in a case."""


class Kind(Enum):
    """Kind of element that was changed."""

    FOR = "for"
    NUMBER = "number"
    COMPARISON = "compare"
    WINDOW = "window"
    ALTERNATIVE = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """All rules, one of them mutated."""

    kind: Kind
    index: int
    """Index of the changed rule."""
    change: str
    rules: Sequence[Rule]

    @property
    def rule(self) -> Rule:
        return self.rules[self.index]

    def __str__(self) -> str:
        return f"{self.rule.name} ({self.rule.severity or 'recorded'}): {self.change}"


def mutants(rules: Sequence[Rule]) -> Iterator[Mutant]:
    """Yield the rules with one mutation at a time."""
    for index, rule in enumerate(rules):
        if rule.wait is not None:
            for factor in _FOR_FACTORS:
                wait = f"{round(seconds(rule.wait) * factor)}s"
                changed = with_rule(rules, index, wait=wait)
                yield Mutant(kind=Kind.FOR, index=index, change=f"for: {rule.wait} -> {wait}", rules=changed)
        for kind, change, expr in (*_windows(rule.expr), *_expressions(rule.expr)):
            yield Mutant(kind=kind, index=index, change=change, rules=with_rule(rules, index, expr=expr))


def _expressions(expr: str) -> Iterator[tuple[Kind, str, str]]:
    for token in _TOKEN.finditer(expr):
        kind, text = token.lastgroup, token.group()
        for replacement in _replacements(expr, token, str(kind), text):
            line = expr.count("\n", 0, token.start()) + 1
            changed = expr[: token.start()] + replacement + expr[token.end() :]
            yield Kind(kind), f"line {line}: {text} -> {replacement}", changed


def _replacements(expr: str, token: re.Match[str], kind: str, text: str) -> Iterator[str]:
    before, after = expr[: token.start()].rstrip(), expr[token.end() :].lstrip()
    match kind:
        case "number":
            yield from _numbers(before, after, text)
        case "compare":
            # Raising a guard against a division by 0 already tests the flipped comparison.
            if not (text == ">" and after.startswith("0)")):
                yield _FLIPPED[text]
        case "text":
            if before.endswith("=~"):
                yield from _alternatives(text)


def _numbers(before: str, after: str, text: str) -> Iterator[str]:
    value = float(text)
    if value == 0:
        if before.endswith("*"):
            yield "1"  # `x * 0`: only the labels are wanted
        elif after.startswith(")"):
            yield _BEYOND_ANY
        else:
            yield from ("-1", "1.5")
    elif value == 1 and before.endswith("=="):
        yield from ("0", "2")
    elif value.is_integer() and value < 10:
        yield from (str(round(value) - 1), str(round(value) + 1))
    else:
        yield from (f"{value * factor:g}" for factor in _SHIFTS)


def _windows(expr: str) -> Iterator[tuple[Kind, str, str]]:
    """Yield each window of the expression at other lengths; equal windows change together, as both sides of a
    ratio do.
    """
    for text in dict.fromkeys(_WINDOW.findall(expr)):
        window, *step = text[1:-1].split(":")
        for factor in _WINDOW_FACTORS:
            resized = "[" + ":".join((f"{round(seconds(window) * factor)}s", *step)) + "]"
            yield Kind.WINDOW, f"{text} -> {resized}", expr.replace(text, resized)


def _alternatives(text: str) -> Iterator[str]:
    words = text[1:-1].split("|")
    if len(words) > 1:
        for word in words:
            yield '"' + "|".join(other for other in words if other != word) + '"'


def seconds(duration: str) -> int:
    """Return the seconds of a duration such as `1h30m`."""
    return sum(int(count) * _SECONDS[unit] for count, unit in _DURATION.findall(duration))
