"""Every test names one tier, and files of which `-m` selects nothing are left out without being imported."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from tests.support.tiers import (
    A_ROW,
    TIERS,
    fault_of,
    fault_of_slow,
    leaves_out,
    markers_of,
    problems,
    with_slow_rows,
)

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent
FILES = sorted(ROOT.glob("tests/**/test_*.py"))
SLOW_FILE = "tests/operator/reconcile/test_hang_simulation_slow.py"
SIBLING = f"{SLOW_FILE}::test_days_of_slow_but_healthy_steps_give_no_alarm"
SLOW = f"{SLOW_FILE}::test_many_days_of_slow_but_healthy_steps_give_no_alarm"


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda path: path.name)
def test_every_file_names_its_tier(folder: Path) -> None:
    files = [file for file in FILES if file.parent == folder]
    assert [str(file.relative_to(ROOT)) for file in files if not names_tiers(file.read_text())] == []


def names_tiers(source: str) -> bool:
    """Return whether each test function of the text has one tier: its own, or that of the whole file."""
    tree = ast.parse(source)
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    of_file = [tiers_in(node.value) for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    # Only definitions that pytest collects: walking through the bodies of all functions takes long.
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bodies = [tree.body, *(node.body for node in classes)]
    functions = [
        node for body in bodies for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    own = [
        [tier for mark in node.decorator_list for tier in tiers_in(mark)]
        for node in functions
        if node.name.startswith("test_")
    ]
    whole = of_file[0] if of_file else []
    return all(len(whole) + len(tiers) == 1 for tiers in own)


def tiers_in(node: ast.expr) -> list[str]:
    marks = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    return [mark.attr for mark in marks if ast.unparse(mark.value) == "pytest.mark" and mark.attr in TIERS]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("pytestmark = pytest.mark.unit\ndef test_a(): ...", True),
        ("pytestmark = [pytest.mark.node, pytest.mark.timeout(9)]\ndef test_a(): ...", True),
        ("@pytest.mark.ranks\ndef test_a(): ...", True),
        ("def test_a(): ...", False),
        ("@pytest.mark.ranks\ndef test_a(): ...\ndef test_b(): ...", False),
        ("pytestmark = pytest.mark.unit\n@pytest.mark.ranks\ndef test_a(): ...", False),
        ("pytestmark = [pytest.mark.cluster, pytest.mark.node]\ndef test_a(): ...", False),
    ],
)
def test_a_file_without_a_tier_is_seen(source: str, named: bool) -> None:
    assert names_tiers(source) is named


@pytest.mark.parametrize(
    ("named", "fixtures", "message"),
    [
        ([], (), "names no tier"),
        (["unit", "node"], (), "names the tiers unit and node"),
        (["unit"], ("control_plane",), "uses the fixture control_plane, which needs tier cluster"),
        (["cluster"], ("tmp_path", "helm"), "uses the fixture helm, which needs tier tools"),
    ],
)
def test_a_wrong_tier_is_named_with_the_way_out(
    named: list[str], fixtures: tuple[str, ...], message: str
) -> None:
    fault = fault_of(named, fixtures)
    assert fault is not None
    assert message in fault
    assert "Write `pytestmark = pytest.mark.TIER`" in fault


def test_a_tier_may_be_dearer_than_its_fixtures() -> None:
    assert fault_of(["tools"], ("control_plane",)) is None
    assert fault_of(["unit"], ("tmp_path",)) is None


def test_a_slow_test_has_a_quick_sibling() -> None:
    assert fault_of_slow("ranks", SIBLING, ROOT) is None
    for cheaper in (None, "tests/test_tiers.py::test_nowhere", "tests/nowhere.py::test_a", SLOW):
        assert "names as its cheaper sibling" in str(fault_of_slow("ranks", cheaper, ROOT))
    assert "a slow test is a unit test" in str(fault_of_slow("unit", SIBLING, ROOT))


def test_rows_of_a_table_are_slow_but_for_the_quick_ones() -> None:
    rows: list[Any] = with_slow_rows([(0, "a"), (1, "b"), (2, "c")], quick=[(1, "b")])
    assert rows[1] == (1, "b")
    assert [row.values for row in rows[::2]] == [(0, "a"), (2, "c")]
    assert {mark.kwargs["cheaper"] for row in rows[::2] for mark in row.marks} == {A_ROW}
    assert leaves_out("ranks and not slow", markers_of("pytest.mark.ranks; with_slow_rows")) is False
    assert leaves_out("slow", markers_of("pytest.mark.ranks; with_slow_rows")) is False
    for quick in ([], [3]):
        with pytest.raises(ValueError, match="the quick rows are rows of the table"):
            with_slow_rows([0, 1], quick=quick)


def test_this_session_checks_its_tests(request: pytest.FixtureRequest) -> None:
    """The session makes the same check in tests/conftest.py before it runs the tests."""
    assert problems(request.session.items) == []
    request.node.add_marker("cluster")
    try:
        (fault,) = problems([request.node])
    finally:
        request.node.own_markers = [mark for mark in request.node.own_markers if mark.name != "cluster"]
    assert fault.startswith("tests/test_tiers.py: a test names the tiers unit and cluster")


EXPRESSIONS = (
    *("unit", "not unit", "not tools and not slow", "unit and not slow", "unit or ranks", "slow", "not slow"),
    *(
        "not (unit or ranks)",
        "cluster and (slow or not timeout)",
        "ranks and not (slow or timeout)",
        "nowhere",
    ),
    *("not nowhere", "(unit)", "unit and unit", "node or (tools and slow) or not ranks"),
)
FILE_MARKERS = [
    frozenset((*tiers, *others))
    for count in (1, 2)
    for tiers in itertools.combinations(TIERS, count)
    for others in ((), ("slow",), ("slow", "timeout"), ("parametrize", "timeout"))
]


def named_by(markers: set[str]) -> Callable[..., bool]:
    return lambda name, /, **_: name in markers


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_file_is_left_out_exactly_if_none_of_its_tests_could_be_selected(expression: str) -> None:
    """The result is compared with pytest's own reading, test by test."""
    compiled = Expression.compile(expression)
    for markers in FILE_MARKERS:
        others = sorted(markers.difference(TIERS))
        tests = [
            {tier, *itertools.compress(others, chosen)}
            for tier in markers.intersection(TIERS)
            for chosen in itertools.product((False, True), repeat=len(others))
        ]
        selected = any(compiled.evaluate(named_by(test)) for test in tests)
        assert leaves_out(expression, markers) is not selected, (expression, markers)


@pytest.mark.parametrize("expression", ["slow(cheaper='x')", "unit and", "unit and timeout(9)", "a-b", ""])
def test_what_is_not_understood_leaves_nothing_out(expression: str) -> None:
    assert not leaves_out(expression, frozenset({"unit"}))


def test_a_file_without_a_tier_is_not_left_out() -> None:
    assert not leaves_out("unit", frozenset({"timeout"}))
