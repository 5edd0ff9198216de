"""What a PromQL expression asks for, by a real parser: the series' names and the labels of its matchers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One selector."""

    names: frozenset[str]
    labels: frozenset[str]


def ask(expr: str) -> list[Asked]:
    """Every selector of the expression. Raises ValueError where it does not parse or its types are wrong."""
    return [_asked(node) for node in _nodes(promql_parser.parse(expr)) if _is_selector(node)]


def numbers(expr: str) -> set[float]:
    """Every number literal."""
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
    """The node and all below it, whatever their kind."""
    if node is None or isinstance(node, str | int | float | bool):
        return
    if isinstance(node, list | tuple):
        for item in node:
            yield from _nodes(item)
        return
    yield node
    for name in ("expr", "lhs", "rhs", "args", "param", "vector_selector", "vs"):
        yield from _nodes(getattr(node, name, None))
