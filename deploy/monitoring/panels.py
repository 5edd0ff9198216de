"""Evaluation of the queries of every dashboard panel, with Grafana's variables filled in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deploy.dashboards.model import Dashboard, Panel
from deploy.dashboards.selectors import expand
from deploy.monitoring.client import PrometheusClient

FILLED_BY_ANY_JOB: Mapping[str, frozenset[str]] = {
    "fleet": frozenset({"Running", "Jobs", "Restarts by cause"}),
    "job-overview": frozenset({"Phase", "Ranks up", "Loss", "Step time", "Tokens per second"}),
    "ranks": frozenset({"Ranks up", "Own work per step, by rank", "Where the ranks are"}),
    "memory": frozenset({"Process memory by rank", "Host memory of the fullest workers"}),
    "communication": frozenset({"All-gather latency", "Payload"}),
    "checkpoints": frozenset({"Goodput over time", "Age of the newest checkpoint"}),
    "operator": frozenset({"Leaders", "Duration of a pass", "Requests by verb"}),
}
"""Panels, by board, that have data once a job makes steps on any hardware; `check` requires them."""
_VARIABLE = re.compile(r"\$(namespace|job|rank|operator)\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Selections of a dashboard's viewer."""

    variables: Mapping[str, str]
    """Value of each variable; regular expressions if the board's variable takes several."""
    start: float
    end: float
    """Unix seconds of the range's end; `start` has the same unit."""
    rate_interval_s: int = 60
    step_s: float = 15.0

    def fill(self, expr: str) -> str:
        """Return the query as Grafana would send it."""
        found = expand(expr).replace("$__rate_interval", f"{self.rate_interval_s}s")
        return _VARIABLE.sub(lambda match: self.variables[match[1]], found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Result of one query of one panel."""

    board: str
    panel: str
    query: str
    num_series: int


def answers(client: PrometheusClient, board: Dashboard, view: View) -> Iterator[Answer]:
    """Yield the result of every query of the board, in order. Raises QueryError for a rejected one."""
    for panel in board.panels():
        for query in panel.queries:
            filled = view.fill(query.expr)
            yield Answer(
                board=board.name,
                panel=panel.title,
                query=filled,
                num_series=_count(client, panel, filled, view),
            )


def _count(client: PrometheusClient, panel: Panel, query: str, view: View) -> int:
    if panel.kind.is_instant:
        return len(client.instant(query, view.end))
    return len(client.over(query, start=view.start, end=view.end, step_s=view.step_s))
