"""The catalogue of metrics: names and labels follow the conventions, and the page is generated from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.metric_names import TARGET_LABELS, exported
from zerotrain.contract.metrics import ALL_METRICS, MetricKind, Source, explain, find, nearest
from zerotrain.contract.metrics.document import document
from zerotrain.contract.metrics.operator import JOB_PHASES, PLANNED_TIERS, RESTART_CAUSES
from zerotrain.operator.api.memory_plan import MemoryPlan
from zerotrain.operator.api.status import Phase, Restarts

FILE = Path(__file__).parents[2] / "docs" / "metrics.md"
UNBOUNDED = {"step", "uid", "job_uid", "tensor", "message", "path", "pod", "node"}


@pytest.mark.ranks
def test_the_page_is_up_to_date() -> None:
    command = "python -m zerotrain.contract.metrics.document"
    done = subprocess.run([sys.executable, *command.split()[1:]], capture_output=True, text=True, check=True)
    assert done.stdout == document()
    assert FILE.read_text(encoding="utf-8") == document(), f"regenerate it: {command} > docs/metrics.md"


@pytest.mark.unit
def test_every_family_has_its_row() -> None:
    rows = re.findall(r"^\| `(zerotrain_[a-z0-9_]+)`\*? \|", document(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(spec.name for spec in ALL_METRICS)


@pytest.mark.unit
@pytest.mark.parametrize("spec", ALL_METRICS, ids=lambda spec: spec.name)
def test_names_follow_the_conventions(spec) -> None:  # type: ignore[no-untyped-def]
    assert re.fullmatch(r"zerotrain_[a-z][a-z0-9_]*", spec.name)
    assert spec.help.endswith(".")
    assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER)
    assert spec.name.endswith("_info") == (spec.kind is MetricKind.INFO)
    assert spec.name.endswith("_seconds") or spec.kind is not MetricKind.HISTOGRAM
    assert not (UNBOUNDED | TARGET_LABELS - {"namespace"}) & set(spec.labels)
    assert list(spec.buckets) == sorted(set(spec.buckets))
    if spec.source in (Source.OPERATOR, Source.JOB):
        prefix = "zerotrain_operator_" if spec.source is Source.OPERATOR else "zerotrain_job_"
        assert spec.name.startswith(prefix)


@pytest.mark.unit
def test_no_name_stands_twice() -> None:
    names = [name for spec in ALL_METRICS for name, _ in spec.samples()]
    assert len(names) == len(set(names))
    assert set(names) < set(exported())
    assert "le" in exported()["zerotrain_step_duration_seconds_bucket"]


@pytest.mark.unit
def test_values_are_those_of_the_status() -> None:
    assert set(JOB_PHASES) == {str(phase) for phase in Phase}
    assert set(RESTART_CAUSES) <= set(Restarts.model_fields)
    assert {f"{tier}_bytes" for tier in PLANNED_TIERS} <= set(MemoryPlan.model_fields)


@pytest.mark.unit
def test_metrics_are_explained() -> None:
    found = find("zerotrain_step_duration_seconds_bucket")
    assert found is not None
    assert found.name in explain(found.name)
    assert "histogram_quantile" in explain(found.name)
    assert "only where the rank spills" in explain("zerotrain_spill_info")
    assert "zerotrain_grad_norm" in nearest("grad_norm")
    with pytest.raises(KeyError, match="zerotrain_step_duration_seconds"):
        explain("zerotrain_step_duration")
