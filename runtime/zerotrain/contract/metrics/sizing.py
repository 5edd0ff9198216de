"""Number of samples that a worker serves, by the catalogues, for limits and the size of a Prometheus."""

from __future__ import annotations

from .launcher import LAUNCHER_METRICS, WORKER_METRICS
from .operator import JOB_METRICS, JOB_PHASES
from .ranks import RANK_METRICS
from .spec import MetricKind, MetricSpec

OPEN_LABEL_VALUES = 4
"""Assumed rows of a label whose values are not known beforehand."""

OWN_SAMPLES = 200
"""Samples reserved for those that each rank's program adds by itself."""

MAX_EXPORTED_JOBS = 4000
"""Number of jobs with series of their own; further ones are counted by namespace and phase."""
MAX_EXPORTED_JOBS_OF_NAMESPACE = 1000
MAX_NAMED_NAMESPACES = 200
"""Number of namespaces that are named with their further jobs; the rest is counted together."""
MAX_FAILURE_KINDS = 8
"""Number of failure kinds of one job: the newest."""
OPERATOR_SCRAPE_LIMIT = 200_000
"""The chart's `serviceMonitor.sampleLimit`.

It is above all that the operator can serve, since a scrape beyond it is dropped whole.
"""
OWN_OPERATOR_SAMPLES = 20_000
"""Samples reserved for the operator and the Python process: far more than they have."""


def most_samples(spec: MetricSpec) -> int:
    """Return the largest number of samples of one family in one rank or worker."""
    if spec.kind is MetricKind.INFO:
        return 1
    return _rows(spec) * (len(spec.buckets) + 3 if spec.kind is MetricKind.HISTOGRAM else 1)


def bucket_samples(spec: MetricSpec) -> int:
    """Return the number of those samples that are buckets of a histogram, +Inf included."""
    return _rows(spec) * (len(spec.buckets) + 1) if spec.kind is MetricKind.HISTOGRAM else 0


def samples_of_a_rank() -> int:
    """Return the largest number of samples of a rank and its launcher, without the program's own."""
    return sum(most_samples(spec) for spec in (*RANK_METRICS, *LAUNCHER_METRICS))


def buckets_of_a_rank() -> int:
    """Return the samples that `podMonitor.buckets: firstRank` drops for every rank but 0."""
    return sum(bucket_samples(spec) for spec in (*RANK_METRICS, *LAUNCHER_METRICS))


def samples_of_a_pod(ranks: int, *, own: int = OWN_SAMPLES) -> int:
    """Return the largest number of samples of a pod, with `own` samples that each rank's program adds."""
    return ranks * (samples_of_a_rank() + own) + sum(map(most_samples, WORKER_METRICS))


def samples_of_a_job() -> int:
    """Return the largest number of samples that the operator exports for one job."""
    open_rows = {"zerotrain_job_failure_timestamp_seconds": MAX_FAILURE_KINDS}
    single = {"zerotrain_job_info", "zerotrain_job_phase", "zerotrain_job_straggler_ratio"}
    return sum(1 if spec.name in single else open_rows.get(spec.name, _rows(spec)) for spec in JOB_METRICS)


def samples_of_the_operator() -> int:
    """Return the largest number of samples of the operator, independent of the jobs."""
    left_out = (MAX_NAMED_NAMESPACES + 1) * (len(JOB_PHASES) + 1)
    return MAX_EXPORTED_JOBS * samples_of_a_job() + left_out + OWN_OPERATOR_SAMPLES


def _rows(spec: MetricSpec) -> int:
    rows = 1
    for values in spec.labels.values():
        rows *= len(values) or OPEN_LABEL_VALUES
    return rows
