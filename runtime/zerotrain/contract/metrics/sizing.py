"""How many samples a worker serves, by the catalogues: for limits and the size of a Prometheus."""

from __future__ import annotations

from .launcher import LAUNCHER_METRICS, WORKER_METRICS
from .ranks import RANK_METRICS
from .spec import Kind, MetricSpec

OPEN_LABEL_VALUES = 4
"""Rows of a label whose values are not known beforehand."""

OWN_SAMPLES = 200
"""Room for what each rank's program adds by itself."""


def most_samples(spec: MetricSpec) -> int:
    """Of one family in one rank or worker."""
    if spec.kind is Kind.INFO:
        return 1
    return _rows(spec) * (len(spec.buckets) + 3 if spec.kind is Kind.HISTOGRAM else 1)


def bucket_samples(spec: MetricSpec) -> int:
    """Of those, the buckets of a histogram, +Inf included."""
    return _rows(spec) * (len(spec.buckets) + 1) if spec.kind is Kind.HISTOGRAM else 0


def samples_of_a_rank() -> int:
    """At most, without what the program adds: its own families and its launcher's."""
    return sum(most_samples(spec) for spec in (*RANK_METRICS, *LAUNCHER_METRICS))


def buckets_of_a_rank() -> int:
    """Those of `samples_of_a_rank` that `podMonitor.buckets: firstRank` drops of every rank but 0."""
    return sum(bucket_samples(spec) for spec in (*RANK_METRICS, *LAUNCHER_METRICS))


def samples_of_a_pod(ranks: int, *, own: int = OWN_SAMPLES) -> int:
    """At most, with `own` samples that each rank's program adds."""
    return ranks * (samples_of_a_rank() + own) + sum(map(most_samples, WORKER_METRICS))


def _rows(spec: MetricSpec) -> int:
    rows = 1
    for values in spec.labels.values():
        rows *= len(values) or OPEN_LABEL_VALUES
    return rows
