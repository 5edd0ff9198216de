"""A scrape with more samples than the limit brings nothing at all: what workers serve stays well below it."""

from __future__ import annotations

from pathlib import Path

import yaml  # type: ignore[import-untyped]

from deploy.monitoring.config import worker_limits
from zerotrain.contract.metrics import LAUNCHER_METRICS, RANK_METRICS, WORKER_METRICS, Kind, MetricSpec
from zerotrain.runtime.metrics import RankIdentity, WorkerMetrics
from zerotrain.runtime.metrics.snapshot import MAX_SAMPLES, snapshot

CHART = Path(__file__).resolve().parents[2] / "charts" / "zerotrain"
MOST_RANKS = 32
"""In one pod: two for each GPU of the largest machines, or so many on CPUs."""
OWN = 200
"""Samples that each rank's program adds by itself."""


def at_most(spec: MetricSpec) -> int:
    """Samples of one family in one rank: four rows where a label's values are not known beforehand."""
    if spec.kind is Kind.INFO:
        return 1
    rows = 1
    for values in spec.labels.values():
        rows *= len(values) or 4
    return rows * (len(spec.buckets) + 3 if spec.kind is Kind.HISTOGRAM else 1)


def of_a_pod(ranks: int) -> int:
    families = snapshot(WorkerMetrics(RankIdentity(job="gpt", rank=0, attempt=1)).registry)
    served = sum(len(family["samples"]) for family in families)
    rare = sum(at_most(spec) for spec in RANK_METRICS if spec.only)
    launcher = sum(at_most(spec) for spec in LAUNCHER_METRICS)
    return ranks * (served + rare + launcher + OWN) + sum(at_most(spec) for spec in WORKER_METRICS)


def test_the_ranks_of_a_large_machine_fit_in_one_scrape() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    limit = values["podMonitor"]["sampleLimit"]
    assert worker_limits()["sample_limit"] == limit
    assert of_a_pod(1) > 300
    assert of_a_pod(MOST_RANKS) < limit <= MAX_SAMPLES
