"""Names of series and labels of matchers in PromQL expressions, found by a real parser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The names and labels of one selector."""

    names: frozenset[str]
    labels: frozenset[str]


def ask(expr: str) -> list[Asked]:
    """Return every selector of the expression. Raises ValueError on a syntax or type error."""
    return [_asked(node) for node in _nodes(promql_parser.parse(expr)) if _is_selector(node)]


def numbers(expr: str) -> set[float]:
    """Return every number literal."""
    nodes = _nodes(promql_parser.parse(expr))
    return {float(node.val) for node in nodes if isinstance(node, promql_parser.NumberLiteral)}


def _is_selector(node: Any) -> bool:
    return isinstance(node, promql_parser.VectorSelector)


def _asked(selector: Any) -> Asked:
    matchers = list(selector.matchers.matchers)
    names = {selector.name} if selector.name else set()
    for matcher in matchers:
        if matcher.name == "__name__":
            names |= set(matcher.value.split("|"))
    return Asked(names=frozenset(names), labels=frozenset(matcher.name for matcher in matchers))


def _nodes(node: Any) -> Iterator[Any]:
    """Yield the node and all nodes below it."""
    if node is None or isinstance(node, str | int | float | bool):
        return
    if isinstance(node, list | tuple):
        for item in node:
            yield from _nodes(item)
        return
    yield node
    for name in ("expr", "lhs", "rhs", "args", "param", "vector_selector", "vs"):
        yield from _nodes(getattr(node, name, None))
