"""The dashboards as files: equal to their description, laid out without overlaps, tied to the alerts."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from deploy.dashboards.__main__ import FOLDER, differences, files
from deploy.dashboards.boards import BOARDS
from deploy.dashboards.links import runbook_url
from deploy.dashboards.model import Dashboard, Level, Panel, PanelKind, Unit
from deploy.dashboards.render import board_json
from tests.support.grafana import all_panels
from tests.support.promql import numbers

pytestmark = pytest.mark.unit


RULES = FOLDER / "rules"
EACH_BOARD = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)


def alerts() -> dict[str, list[dict[str, Any]]]:
    """Return the rules of each alert, by its name without the prefix."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RULES.glob("*.yaml")):
        for group in YAML(typ="safe", pure=True).load(path)["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    found.setdefault(rule["alert"].removeprefix("ZeroTrain"), []).append(rule)
    return found


def overlaps(board: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs of panels that overlap."""
    places = [(panel["title"], panel["gridPos"]) for panel in board["panels"]]
    return [
        (first, second)
        for (first, a), (second, b) in combinations(places, 2)
        if a["x"] < b["x"] + b["w"]
        and b["x"] < a["x"] + a["w"]
        and a["y"] < b["y"] + b["h"]
        and b["y"] < a["y"] + a["h"]
    ]


def test_the_files_equal_the_description(tmp_path: Path) -> None:
    assert differences(FOLDER) == [], "run: python -m deploy.dashboards"
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    assert differences(tmp_path) == []
    (tmp_path / "fleet.json").write_text("{}")
    (tmp_path / "extra.json").write_text("{}")
    (tmp_path / "ranks.json").unlink()
    assert sorted(differences(tmp_path)) == [
        "extra.json: nothing describes it",
        "fleet.json: differs",
        "ranks.json: not there",
    ]


def test_names_are_distinguished() -> None:
    assert len({board.uid for board in BOARDS}) == len(BOARDS) == 7
    assert all(len(board.uid) <= 40 for board in BOARDS), "Grafana's limit"
    assert len({board.title for board in BOARDS}) == len(BOARDS)


@EACH_BOARD
def test_panels_have_their_own_ids_and_places(board: Dashboard) -> None:
    found = board_json(board)
    ids = [panel["id"] for panel in all_panels(found)]
    assert len(set(ids)) == len(ids)
    assert overlaps(found) == []
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in all_panels(found))
    titles = [panel.title for panel in board.panels()]
    assert len(set(titles)) == len(titles)


def test_an_overlap_is_seen() -> None:
    found = json.loads(json.dumps(board_json(BOARDS[0])))
    found["panels"][1]["gridPos"]["w"] += 1
    assert overlaps(found)


@EACH_BOARD
def test_every_panel_explains_itself_and_asks_something(board: Dashboard) -> None:
    for panel in board.panels():
        words = panel.description.split()
        assert len(words) >= 4, (board.name, panel.title)
        assert panel.description.rstrip().endswith("."), (board.name, panel.title)
        assert panel.queries, (board.name, panel.title)
        if panel.kind is PanelKind.TABLE:
            assert panel.columns, (board.name, panel.title)
        else:
            assert all(query.legend for query in panel.queries), (board.name, panel.title)


UNIT_OF_SUFFIX = {
    "_bytes": {Unit.BYTES},
    "_timestamp_seconds": {Unit.SECONDS, Unit.AGO},
    "_per_second": {Unit.BYTES_PER_SECOND},
}


@EACH_BOARD
def test_one_quantity_has_one_unit(board: Dashboard) -> None:
    """A panel of plain gauges shows the unit that the name of the series says."""
    for panel in board.panels():
        for query in panel.queries:
            if "/" in query.expr or "rate(" in query.expr or panel.kind is PanelKind.TABLE or panel.states:
                continue
            for suffix, units in UNIT_OF_SUFFIX.items():
                if f"{suffix}{{" in query.expr:
                    assert panel.unit in units, (board.name, panel.title, panel.unit)
                    break


@EACH_BOARD
def test_every_alert_of_a_panel_exists_and_links_to_its_runbook(board: Dashboard) -> None:
    known = alerts()
    for panel in board.panels():
        named = {*panel.alerts, *(item.alert for item in panel.thresholds if item.alert)}
        for name in named:
            assert name in known, (board.name, panel.title, name)
            urls = {rule["annotations"]["runbook_url"] for rule in known[name]}
            assert urls == {runbook_url(name)}, (name, urls)


def unlike_its_alert(panel: Panel, known: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the thresholds whose number is in no rule of their alert."""
    return [
        f"{panel.title}: {item.value} is not in the expression of ZeroTrain{item.alert}"
        for item in panel.thresholds
        if item.alert and not any(item.value in numbers(rule["expr"]) for rule in known[item.alert])
    ]


@EACH_BOARD
def test_thresholds_are_those_of_the_alerts(board: Dashboard) -> None:
    known = alerts()
    assert [line for panel in board.panels() for line in unlike_its_alert(panel, known)] == []


def test_a_threshold_that_differs_is_seen() -> None:
    panel = next(
        panel for board in BOARDS for panel in board.panels() if any(item.alert for item in panel.thresholds)
    )
    known = {item.alert: [{"expr": "up > 12345"}] for item in panel.thresholds if item.alert}
    assert unlike_its_alert(panel, known)


def test_every_alert_is_explained_by_some_panel() -> None:
    shown = {name for board in BOARDS for panel in board.panels() for name in panel.alerts}
    assert alerts().keys() <= shown, alerts().keys() - shown


@EACH_BOARD
def test_links_lead_to_boards_that_exist(board: Dashboard) -> None:
    known = {other.uid for other in BOARDS}
    text = json.dumps(board_json(board))
    assert all(part.split("?")[0] in known for part in text.split('"/d/')[1:])
    tags = {tag for other in BOARDS for tag in board_json(other)["tags"]}
    for link in board_json(board)["links"]:
        assert set(link["tags"]) <= tags
    assert board_json(board)["links"], "no board is a dead end"


def test_colours_mean_the_same_everywhere() -> None:
    for board in BOARDS:
        for panel in board.panels():
            for item in panel.thresholds:
                assert item.level in {Level.GOOD, Level.WARNING, Level.CRITICAL}, (board.name, panel.title)
