"""A board as the JSON that Grafana imports, laid out on its grid of 24 columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from deploy.dashboards.links import board_links, tags
from deploy.dashboards.model import Dashboard, Panel, Row, Scope
from deploy.dashboards.panels import Json, panel_json
from deploy.dashboards.variables import annotation_list, templating

COLUMNS = 24
SCHEMA_VERSION = 39
"""Schema version of Grafana 11; newer versions migrate it when they load it."""


def board_json(board: Dashboard) -> Json:
    """Return the content of the whole file."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": " ".join(board.description.split()),
        "tags": tags(board),
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "fiscalYearStartMonth": 0,
        "weekStart": "",
        "liveNow": False,
        "time": {"from": "now-24h" if board.scope is Scope.FLEET else "now-3h", "to": "now"},
        "timepicker": {},
        "templating": templating(board.scope),
        "annotations": annotation_list(board.scope),
        "links": board_links(board),
        "panels": _panels(board.rows),
    }


def _panels(rows: tuple[Row, ...]) -> list[Json]:
    ids = count(1)
    found: list[Json] = []
    y = 0
    for row in rows:
        heading: Json = {
            "id": next(ids),
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        placed: list[Json] = [
            {"id": next(ids), "gridPos": place, **panel_json(panel)}
            for panel, place in _places(row.panels, y + 1)
        ]
        y = max(item["gridPos"]["y"] + item["gridPos"]["h"] for item in placed)
        found += [heading, *placed]
    return found


def _places(panels: tuple[Panel, ...], top: int) -> Iterator[tuple[Panel, Json]]:
    """Yield the panels with their positions, from left to right.

    A panel that does not fit opens a new line below the tallest panel of the current one.
    """
    x, y, tallest = 0, top, 0
    for panel in panels:
        if x + panel.width > COLUMNS:
            x, y, tallest = 0, y + tallest, 0
        yield panel, {"x": x, "y": y, "w": panel.width, "h": panel.height}
        x, tallest = x + panel.width, max(tallest, panel.height)
