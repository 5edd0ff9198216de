"""A scrape with more samples than the limit is rejected: workers serve far fewer samples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from deploy.monitoring.config import worker_limits
from zerotrain.contract.metrics import LAUNCHER_METRICS, RANK_METRICS
from zerotrain.contract.metrics.document import SCRAPE_LIMIT, document
from zerotrain.contract.metrics.sizing import (
    buckets_of_a_rank,
    most_samples,
    samples_of_a_pod,
    samples_of_a_rank,
)
from zerotrain.runtime.metrics import RankIdentity, WorkerMetrics
from zerotrain.runtime.metrics.snapshot import MAX_SAMPLES, snapshot

pytestmark = pytest.mark.unit


ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "zerotrain"


def served() -> list[str]:
    """Return names of all samples of one rank of the trainer, without those that appear only at times."""
    families = snapshot(WorkerMetrics(RankIdentity(job="gpt", rank=0, attempt=1)).registry)
    return [sample[0] for family in families for sample in family["samples"]]


def test_the_catalogue_counts_what_a_rank_serves() -> None:
    rare = sum(most_samples(spec) for spec in RANK_METRICS if spec.only)
    launcher = sum(most_samples(spec) for spec in LAUNCHER_METRICS)
    assert samples_of_a_rank() == len(served()) + rare + launcher
    assert buckets_of_a_rank() == len([name for name in served() if name.endswith("_bucket")])


@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_the_ranks_of_a_large_machine_fit_in_one_scrape(ranks: int) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    limit = values["podMonitor"]["sampleLimit"]
    assert worker_limits()["sample_limit"] == limit == SCRAPE_LIMIT
    assert samples_of_a_pod(ranks) < limit <= MAX_SAMPLES


def test_the_formula_is_the_same_everywhere() -> None:
    note = (CHART / "values.yaml").read_text()
    for text in (document(), note):
        (found,) = re.findall(r"(\d+) \+ ranks per pod x \((\d+) \+", text)
        fixed, each = map(int, found)
        assert [fixed + ranks * each for ranks in (1, 8)] == [samples_of_a_pod(n, own=0) for n in (1, 8)]


def test_the_page_of_sizes_names_series_that_the_rules_record() -> None:
    rules = yaml.safe_load((ROOT / "dashboards" / "rules" / "recording.yaml").read_text())
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"]}
    named = set(re.findall(r"`(namespace_job_name\S+)`", document()))
    assert len(named) == 5
    assert named <= recorded
