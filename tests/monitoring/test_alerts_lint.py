"""Every alert is complete: texts, runbook, labels, and metrics that some component exports."""

from __future__ import annotations

import re
from collections.abc import Sequence

import promql_parser
import pytest

from tests.monitoring.rules.rulebook import REPOSITORY, RULES, Rule, closure, load
from tests.support.metric_names import exported

pytestmark = pytest.mark.unit


RULEBOOK = load()
ALERTS = tuple(rule for rule in RULEBOOK if rule.alerting)
RECORDED = frozenset(rule.name for rule in RULEBOOK if not rule.alerting)
RUNBOOKS = REPOSITORY / "docs" / "runbooks"
RUNBOOK_BASE = "https://zerotrain.dev/docs/runbooks"
SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]
DCGM = frozenset(
    {
        "DCGM_FI_DEV_XID_ERRORS",
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
        "DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
    }
)
"""Metrics that dcgm-exporter exports with the counters that the chart ships."""

OPERATOR = frozenset(
    {
        "ZeroTrainOperatorDown",
        "ZeroTrainOperatorReconcileErrors",
        "ZeroTrainOperatorNoLeader",
        "ZeroTrainOperatorStatusRefused",
        "ZeroTrainOperatorsOverlap",
        "ZeroTrainWorkersUnreachable",
    }
)
"""Alerts that are not about a job."""

ASKED_FOR = """\
JobStalled MetricsAbsent RankMissing RestartLoop JobPending JobFailed StepTimeRegression ThroughputLow
GoodputBudgetBurn Straggler AllGatherP99 ReduceScatterP99 NonFinite GradNormSpike LossScaleCollapse LossSpike
OptimizerShareHigh DataStarved CheckpointStale CheckpointFailed CheckpointVerifyFailed SpillFillingUp
SpillIOErrors SpillAuthFailure SpillNotEncrypted SpillBandwidthBelowCalibration ReplicaDivergence
HostMemoryNearLimit GpuMemoryHeadroomLow GpuFault GpuThrottled OperatorDown OperatorReconcileErrors
OperatorNoLeader OperatorsOverlap OperatorStatusRefused WorkersUnreachable"""


def problems(rule: Rule) -> list[str]:
    """Return the problems of an alert's texts and labels."""
    found = []
    if rule.severity not in ("critical", "warning"):
        found.append(f"severity {rule.severity!r} is neither critical nor warning")
    found += [f"no {name}" for name in ("summary", "description") if not rule.annotations.get(name)]
    url = f"{RUNBOOK_BASE}/{rule.name}.md"
    if rule.annotations.get("runbook_url") != url:
        found.append(f"runbook_url is not {url}")
    text = " ".join(rule.annotations.values())
    if rule.name not in OPERATOR:
        found += [
            f"the texts do not name the {label}"
            for label in ("namespace", "job_name")
            if f"$labels.{label}" not in text
        ]
    if len(rule.annotations.get("summary", "")) > 160:
        found.append("the summary is too long for a message's headline")
    return found


def names_in(expr: str) -> set[str]:
    """Return the metrics that an expression selects."""
    found: set[str] = set()

    def walk(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name, f"a selector without a name in {expr}"
            found.add(node.name)
        for part in ("lhs", "rhs", "expr", "param", "vector_selector"):
            child = getattr(node, part, None)
            if child is not None:
                walk(child)
        for child in getattr(node, "args", None) or ():
            walk(child)

    walk(promql_parser.parse(expr))
    return found


def unknown_metrics(rules: Sequence[Rule]) -> dict[str, set[str]]:
    known = set(exported()) | RECORDED | DCGM
    return {rule.name: missing for rule in rules if (missing := names_in(rule.expr) - known)}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule.name}-{rule.severity}")
def test_alert_names_what_and_where(rule: Rule) -> None:
    assert problems(rule) == []


def test_every_alert_that_was_asked_for_exists() -> None:
    assert sorted({rule.name for rule in ALERTS}) == sorted(f"ZeroTrain{name}" for name in ASKED_FOR.split())


def test_every_metric_is_exported_or_recorded() -> None:
    assert unknown_metrics(RULEBOOK) == {}


def test_an_unknown_metric_and_a_bare_alert_are_found() -> None:
    bare = Rule(
        name="X", expr="sum(rate(zerotrain_no_such_total[5m])) > 1", alerting=True, labels={}, annotations={}
    )
    assert unknown_metrics([bare]) == {"X": {"zerotrain_no_such_total"}}
    assert len(problems(bare)) == 6


def test_recorded_names_are_used_or_promised() -> None:
    """A recording rule costs memory in every Prometheus, so each must have a use."""
    promised = {name for name in RECORDED if name.startswith("deepspeed:")}
    used = {rule.name for alert in ALERTS for rule in closure(RULEBOOK, alert.name)}
    dashboards = "".join(path.read_text() for path in RULES.parent.glob("*.json"))
    idle = {name for name in RECORDED - promised - used if name not in dashboards}
    assert idle <= {"namespace_job_name:zerotrain_tokens:rate5m"}


@pytest.mark.parametrize("name", sorted({rule.name for rule in ALERTS}))
def test_runbook_has_its_sections(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    for section in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        assert len(section.split()) >= 8, "a section that says nothing"
    diagnosis = text.split("## Diagnosis")[1].split("## Mitigation")[0]
    assert "```" in diagnosis, "Diagnosis holds no command"


def test_no_runbook_is_left_over() -> None:
    assert {path.stem for path in RUNBOOKS.glob("ZeroTrain*.md")} == {rule.name for rule in ALERTS}
