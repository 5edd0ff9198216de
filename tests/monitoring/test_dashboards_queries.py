"""Every query of every dashboard parses and selects only series and labels that some component exports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from deploy.dashboards.boards import BOARDS
from deploy.dashboards.model import Dashboard
from deploy.dashboards.selectors import expand
from deploy.dashboards.variables import ANNOTATIONS, VARIABLES
from tests.support.metric_names import exported
from tests.support.promql import Asked, ask

pytestmark = pytest.mark.unit


ROOT = Path(__file__).resolve().parents[2]
COUNTERS = ROOT / "charts" / "zerotrain" / "files" / "dcgm" / "counters.csv"
ALERT_LABELS = frozenset({"alertname", "alertstate", "severity", "namespace", "job_name", "rank"})
DCGM_LABELS = frozenset(
    {"gpu", "UUID", "device", "modelName", "Hostname", "exported_namespace", "exported_pod"}
)
"""Labels that dcgm-exporter adds, with its pod's labels renamed by the scrape (honorLabels: false)."""


def queries(board: Dashboard) -> Iterator[tuple[str, str]]:
    """Yield the place of each query and its PromQL as Grafana would send it."""
    for panel in board.panels():
        for query in panel.queries:
            yield f"{board.name}: {panel.title}", filled(expand(query.expr))
    for annotation in ANNOTATIONS[board.scope]:
        yield f"{board.name}: annotation {annotation.name}", filled(expand(annotation.expr))
    for variable in VARIABLES[board.scope]:
        yield f"{board.name}: variable {variable.name}", filled(variable.series)


def filled(expr: str) -> str:
    """Return the expression with the variables replaced as Grafana does it."""
    found = expr.replace("$__rate_interval", "1m")
    found = re.sub(r"\$(namespace|job|rank|operator)\b", "x", found)
    assert not re.search(r"\$[a-zA-Z_{]", found), found  # `$1` belongs to label_replace
    return found


def known() -> dict[str, frozenset[str]]:
    """Return every series that a query may select, with its labels."""
    return {
        **exported(),
        **dict.fromkeys(dcgm_counters(), DCGM_LABELS),
        "ALERTS": ALERT_LABELS,
    }


def dcgm_counters() -> set[str]:
    """Return the counters of dcgm-exporter as the chart configures it."""
    lines = COUNTERS.read_text().splitlines()
    return {line.split(",")[0].strip() for line in lines if line.startswith("DCGM_")}


def mistakes(where: str, expr: str) -> list[str]:
    """Return the problems of one query."""
    names = known()
    found = []
    for asked in ask(expr):
        for name in asked.names:
            if name not in names:
                found.append(f"{where}: nobody exports {name}")
            elif unknown := asked.labels - names[name] - {"__name__"}:
                found.append(f"{where}: {name} has no label {', '.join(sorted(unknown))}")
    return found


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_series_has_an_exporter_and_every_matcher_a_label(board: Dashboard) -> None:
    assert [line for where, expr in queries(board) for line in mistakes(where, expr)] == []


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_legends_name_labels_that_the_answer_has(board: Dashboard) -> None:
    """A legend of a label that the aggregation dropped would show an empty name."""
    for panel in board.panels():
        for query in panel.queries:
            labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            if grouped := _grouping(query.expr):
                assert labels <= grouped, (board.name, panel.title, labels, grouped)


def test_planted_mistakes_are_named() -> None:
    assert mistakes("x", "rate(zerotrain_steps_total[1m])") == ["x: nobody exports zerotrain_steps_total"]
    assert mistakes("x", 'zerotrain_loss{ranks="0"}') == ["x: zerotrain_loss has no label ranks"]
    assert mistakes("x", 'zerotrain_collective_duration_seconds_bucket{op="a", le="1"}') == []
    assert mistakes("x", "DCGM_FI_PROF_NVLINK_BYTES") == ["x: nobody exports DCGM_FI_PROF_NVLINK_BYTES"]
    with pytest.raises(ValueError):
        ask("rate(zerotrain_step)")
    with pytest.raises(ValueError):
        ask("sum(rate(zerotrain_tokens_total[1m])")


def test_a_selector_by_name_counts_as_its_names() -> None:
    assert ask('{__name__=~"up|zerotrain_loss", job="x"}') == [
        Asked(names=frozenset({"up", "zerotrain_loss"}), labels=frozenset({"__name__", "job"}))
    ]


def test_rules_record_nothing_that_a_board_would_need() -> None:
    """The boards work without the rules: only ALERTS comes from them."""
    recorded = {
        rule["record"]
        for path in (ROOT / "dashboards" / "rules").glob("*.yaml")
        for group in YAML(typ="safe", pure=True).load(path)["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    assert recorded, "there are recording rules"
    used = {name for board in BOARDS for _, expr in queries(board) for a in ask(expr) for name in a.names}
    assert not used & recorded


def _grouping(expr: str) -> set[str] | None:
    """Return the labels of the outermost `agg by (...)`, if the whole expression is one; else None."""
    found = re.match(r"\s*(?:1000 \* )?(?:sum|max|min|avg|count) by \(([\w, ]+)\)", expr)
    return {label.strip() for label in found[1].split(",")} if found else None
