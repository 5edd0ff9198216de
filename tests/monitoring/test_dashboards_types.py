"""The dashboards match Grafana's own types: no key is misspelt, no value has a wrong type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.dashboards.boards import BOARDS
from deploy.dashboards.render import board_json
from tests.support.grafana import all_panels, compile_boards

pytestmark = pytest.mark.ranks


Board = dict[str, Any]


def boards() -> dict[str, Board]:
    return {board.name: board_json(board) for board in BOARDS}


def panel(board: Board, kind: str) -> Any:
    return next(item for item in all_panels(board) if item["type"] == kind)


def test_grafanas_types_accept_every_board(tmp_path: Path) -> None:
    assert compile_boards(boards(), tmp_path) == []


PLANTED: dict[str, tuple[Callable[[Board], object], str]] = {
    "misspelt key of the board": (lambda b: b.update(schemaVersionn=39), "schemaVersionn"),
    "misspelt key of a panel": (lambda b: panel(b, "stat").update(descripton="x"), "descripton"),
    "panel without a description": (lambda b: panel(b, "stat").pop("description"), "description"),
    "height as a text": (lambda b: panel(b, "stat")["gridPos"].update(h="x"), "'string'"),
    "unknown enum value": (
        lambda b: panel(b, "timeseries")["options"]["tooltip"].update(mode="all"),
        '"all"',
    ),
    "option of another plugin": (
        lambda b: panel(b, "timeseries")["options"].update(graphMode="area"),
        "graphMode",
    ),
    "misspelt field option": (
        lambda b: panel(b, "timeseries")["fieldConfig"]["defaults"]["custom"].update(lineWidht=1),
        "lineWidht",
    ),
    "misspelt query key": (lambda b: panel(b, "table")["targets"][0].update(exprs="up"), "exprs"),
    "variable of an unknown kind": (lambda b: b["templating"]["list"][0].update(type="qery"), "qery"),
    "annotation without a colour": (lambda b: b["annotations"]["list"][1].pop("iconColor"), "iconColor"),
    "unknown plugin": (lambda b: panel(b, "stat").update(type="timeseris"), "timeseris"),
}


def test_every_planted_mistake_is_named(tmp_path: Path) -> None:
    """One compilation covers all of them: each mistake must be reported in its own file."""
    broken = {}
    for number, (mutate, _) in enumerate(PLANTED.values()):
        broken[f"planted-{number}"] = copy.deepcopy(boards()["job-overview"])
        mutate(broken[f"planted-{number}"])
    complaints = compile_boards(broken, tmp_path)
    for number, (mistake, (_, word)) in enumerate(PLANTED.items()):
        mine = [line for line in complaints if line.startswith(f"planted-{number}.ts")]
        assert any(word in line for line in mine), (mistake, mine)
