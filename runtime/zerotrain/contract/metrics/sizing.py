"""How many samples a worker serves, by the catalogues: for limits and the size of a Prometheus."""

from __future__ import annotations

from .launcher import LAUNCHER_METRICS, WORKER_METRICS
from .operator import JOB_METRICS, JOB_PHASES
from .ranks import RANK_METRICS
from .spec import Kind, MetricSpec

OPEN_LABEL_VALUES = 4
"""Rows of a label whose values are not known beforehand."""

OWN_SAMPLES = 200
"""Room for what each rank's program adds by itself."""

MAX_EXPORTED_JOBS = 4000
"""Jobs with series of their own; further ones are counted by namespace and phase."""
MAX_EXPORTED_JOBS_OF_NAMESPACE = 1000
MAX_NAMED_NAMESPACES = 200
"""Namespaces that are named with what they have beyond that; further ones are counted together."""
MAX_FAILURE_KINDS = 8
"""Of one job: the newest."""
OPERATOR_SCRAPE_LIMIT = 200_000
"""The chart's `serviceMonitor.sampleLimit`: above all that the operator can serve, since a scrape beyond it
is dropped whole."""
OWN_OPERATOR_SAMPLES = 20_000
"""Room for what the operator tells of itself and the Python process: far more than it has."""


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


def samples_of_a_job() -> int:
    """At most: of what the operator exports of one job."""
    open_rows = {"zerotrain_job_failure_timestamp_seconds": MAX_FAILURE_KINDS}
    single = {"zerotrain_job_info", "zerotrain_job_phase", "zerotrain_job_straggler_ratio"}
    return sum(1 if spec.name in single else open_rows.get(spec.name, _rows(spec)) for spec in JOB_METRICS)


def samples_of_the_operator() -> int:
    """At most, whatever jobs there are."""
    left_out = (MAX_NAMED_NAMESPACES + 1) * (len(JOB_PHASES) + 1)
    return MAX_EXPORTED_JOBS * samples_of_a_job() + left_out + OWN_OPERATOR_SAMPLES


def _rows(spec: MetricSpec) -> int:
    rows = 1
    for values in spec.labels.values():
        rows *= len(values) or OPEN_LABEL_VALUES
    return rows
