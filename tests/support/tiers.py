"""The tiers of the tests: the tier that a file names, and the files that an expression of `pytest -m` skips.

A tier says what a test needs, the cheapest first. Every test has exactly one, as a pytest marker. The marker
of a whole file stands at its top: `pytestmark = pytest.mark.unit`.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

TIERS = ("unit", "ranks", "cluster", "node", "tools")
SLOW = "slow"
MAX_SLOW_SHARE = 0.03
"""Largest share of slow tests among all tests."""
A_ROW = "a row of this test"
"""The cheaper sibling that a slow row of a parametrized test names."""

TIER_OF_FIXTURE = {
    "control_plane": "cluster",
    "devcluster": "cluster",
    "simulated_cluster": "cluster",
    "node_tools": "node",
    "node_cluster": "node",
    "helm": "tools",
    "kueue": "tools",
    "prometheus": "tools",
    "promtool": "tools",
    "alertmanager": "tools",
    "amtool": "tools",
}
"""The cheapest tier of a test that uses the fixture, by fixture."""

HOW = (
    "Write `pytestmark = pytest.mark.TIER` below the imports of the file, or mark each of its tests; TIER is "
    f"the cheapest of {', '.join(TIERS)} that has what the test needs (CONTRIBUTING.md)"
)


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test for which `problems` reports nothing."""
    return next(mark.name for mark in item.iter_markers() if mark.name in TIERS)


def problems(items: Iterable[pytest.Item]) -> list[str]:
    """Return errors in the tiers of these tests: one line for each file and fault, with the remedy."""
    found: dict[str, str] = {}
    for item in items:
        file = item.nodeid.split("::")[0]
        marks = {mark.name: mark for mark in item.iter_markers()}
        named = [tier for tier in TIERS if tier in marks]
        fault = fault_of(named, getattr(item, "fixturenames", ()))
        if fault is None and SLOW in marks:
            cheaper = marks[SLOW].kwargs.get("cheaper")
            if cheaper == A_ROW:
                cheaper = f"{file}::{item.name.partition('[')[0]}"
            fault = fault_of_slow(named[0], cheaper, item.config.rootpath)
        if fault is not None:
            found.setdefault(f"{file}: {fault}", item.name)
    return [f"{fault} (first seen at {name})" for fault, name in found.items()]


def fault_of(named: list[str], fixtures: Iterable[str]) -> str | None:
    """Return the error of a test that names these tiers and uses these fixtures, or None."""
    if not named:
        return f"a test names no tier. {HOW}"
    if len(named) > 1:
        return f"a test names the tiers {' and '.join(named)}; it has one. {HOW}"
    for fixture in fixtures:
        needed = TIER_OF_FIXTURE.get(fixture, TIERS[0])
        if TIERS.index(needed) > TIERS.index(named[0]):
            return f"a test of tier {named[0]} uses the fixture {fixture}, which needs tier {needed}. {HOW}"
    return None


def fault_of_slow(tier: str, cheaper: object, root: Path) -> str | None:
    """Return the error of a slow test of this tier that names that cheaper test, or None."""
    if tier == "unit":
        return "a slow test is a unit test; mark it `ranks`: a unit test takes a second at most"
    if not isinstance(cheaper, str) or not has_quick_test(root, cheaper):
        return (
            f"a slow test names as its cheaper sibling {cheaper!r}, which is no test here. Write "
            '`@pytest.mark.slow(cheaper="tests/FOLDER/test_file.py::test_name")`: a test that is not slow, '
            "and checks the same property"
        )
    return None


def with_slow_rows(rows: Iterable[Any], *, quick: Collection[Any]) -> list[Any]:
    """Return the rows of a table for `pytest.mark.parametrize`; all but the quick ones are slow.

    It is for rows that check one property, of which the quick ones are the most telling. Raises ValueError
    without a quick row, and for one that the table lacks.
    """
    table = list(rows)
    if not quick or any(row not in table for row in quick):
        raise ValueError(f"the quick rows are rows of the table and at least one; got {quick!r}")
    mark = pytest.mark.slow(cheaper=A_ROW)
    return [
        row if row in quick else pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=mark)
        for row in table
    ]


def has_quick_test(root: Path, name: str) -> bool:
    """Return whether a file has this test and does not mark it as slow."""
    path, _, test = name.partition("::")
    file = root / path
    found = ast.walk(ast.parse(file.read_text())) if file.is_file() else ()
    tests = [each for each in found if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    marks = [ast.unparse(mark) for each in tests if each.name == test for mark in each.decorator_list]
    is_slow = any(mark.startswith(f"pytest.mark.{SLOW}") for mark in marks)
    return any(each.name == test for each in tests) and not is_slow


def too_many_slow(items: Sequence[pytest.Item]) -> list[str]:
    """Return an error if the share of slow tests is too large."""
    slow = sum(item.get_closest_marker(SLOW) is not None for item in items)
    most = int(MAX_SLOW_SHARE * len(items))
    if slow <= most:
        return []
    return [f"{slow} of {len(items)} tests are slow; at most {most} may be. Make some of them cheaper"]


def markers_of(source: str) -> frozenset[str]:
    """Return the names of all markers in a file's text."""
    slow = {SLOW} if with_slow_rows.__name__ in source else set()
    return frozenset(re.findall(r"\bpytest\.mark\.(\w+)", source)) | slow


def leaves_out(expression: str, markers: frozenset[str]) -> bool:
    """Return whether `pytest -m expression` selects none of the tests of a file that has these markers.

    A test has exactly one tier and any of the file's other markers. An expression that contains more than
    names excludes nothing here: pytest evaluates it again.
    """
    tiers = [tier for tier in TIERS if tier in markers]
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        others = sorted((names & markers).difference(TIERS))
        choices = itertools.product((False, True), repeat=len(others))
        cases = [{tier} | set(itertools.compress(others, choice)) for choice in choices for tier in tiers]
        return bool(cases) and not any(_holds(tree, case) for case in cases)
    except (SyntaxError, ValueError):
        return False


def _holds(tree: ast.expr, markers: set[str]) -> bool:
    """Evaluate the expression for a test with these markers. Raises ValueError if it is more than names."""
    match tree:
        case ast.Name(id=name):
            return name in markers
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _holds(operand, markers)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_holds(value, markers) for value in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_holds(value, markers) for value in values)
    raise ValueError(ast.unparse(tree))


def dearest_in(file: Path) -> str:
    """Return the most expensive tier that a test file names."""
    return max(TIERS[:1] + tuple(markers_of(file.read_text()).intersection(TIERS)), key=TIERS.index)


def is_left_out(file: Path, expression: str) -> bool:
    """Return `leaves_out` for a test file, which is read and not imported."""
    return bool(expression) and leaves_out(expression, markers_of(file.read_text()))
