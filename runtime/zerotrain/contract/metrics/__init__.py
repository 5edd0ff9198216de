"""Every metric that zerotrain exports, as data for exporters and for users.

`find` and `explain` serve `zerotrain explain metric`; `document` writes `docs/metrics.md`.
"""

from __future__ import annotations

import difflib

from .launcher import LAUNCHER_METRICS, WORKER_METRICS
from .operator import JOB_METRICS, OPERATOR_METRICS
from .ranks import RANK_METRICS
from .spec import MetricKind, MetricSpec, Rows, Source

ALL_METRICS: tuple[MetricSpec, ...] = (
    *RANK_METRICS,
    *LAUNCHER_METRICS,
    *WORKER_METRICS,
    *OPERATOR_METRICS,
    *JOB_METRICS,
)

WHO = {
    Source.RANK: "each rank, at its launcher's /metrics",
    Source.LAUNCHER: "the launcher, of each rank, also of a program that reports nothing",
    Source.WORKER: "the launcher, of its container",
    Source.OPERATOR: "each replica of the operator",
    Source.JOB: "the operator's leading replica, of each job",
}

_BY_NAME = {spec.name: spec for spec in ALL_METRICS}
_BY_SAMPLE = _BY_NAME | {name: spec for spec in ALL_METRICS for name, _ in spec.samples()}


def find(name: str) -> MetricSpec | None:
    """Return the family by its name or by that of a sample (`..._bucket`)."""
    return _BY_SAMPLE.get(name)


def nearest(name: str) -> list[str]:
    """Return similar known names, best first."""
    given = name if name.startswith("zerotrain_") else f"zerotrain_{name}"
    parts = [known for known in _BY_NAME if given.removeprefix("zerotrain_") in known]
    return list(dict.fromkeys([*difflib.get_close_matches(given, _BY_NAME, n=3), *parts]))[:5]


def explain(name: str) -> str:
    """Return a metric's explanation in a few lines. Raises KeyError with the nearest names."""
    spec = find(name)
    if spec is None:
        near = nearest(name)
        hint = f"near it: {', '.join(near)}" if near else "docs/metrics.md lists them all"
        raise KeyError(f"no metric is named {name}; {hint}")
    lines = [f"{spec.name} ({spec.kind.value})", f"  {spec.help}", f"  exported by {WHO[spec.source]}"]
    if spec.only:
        lines.append(f"  only where {spec.only}")
    for label in spec.all_labels:
        values = spec.labels.get(label, ())
        lines.append(f"  label {label}{': ' + ', '.join(values) if values else ''}")
    if spec.kind is MetricKind.HISTOGRAM:
        lines.append(f"  buckets: {', '.join(f'{bound:g}' for bound in spec.buckets)} s")
    if spec.exemplars:
        lines.append("  exemplar: the step, in the OpenMetrics format")
    lines.append(f"  query: {example(spec)}")
    return "\n".join(lines)


def example(spec: MetricSpec) -> str:
    """Return a query that shows the metric for one job."""
    chosen = '{job_name="JOB"}' if "job_name" in spec.all_labels else ""
    if spec.kind is MetricKind.HISTOGRAM:
        rate = f"sum by (le) (rate({spec.name}_bucket{chosen}[5m]))"
        return f"histogram_quantile(0.99, {rate})"
    if spec.kind is MetricKind.COUNTER:
        return f"rate({spec.name}{chosen}[5m])"
    if spec.name.endswith("_timestamp_seconds"):
        return f"time() - {spec.name}{chosen}"
    return f"{spec.name}{chosen}"


__all__ = [
    "ALL_METRICS",
    "JOB_METRICS",
    "LAUNCHER_METRICS",
    "OPERATOR_METRICS",
    "RANK_METRICS",
    "WHO",
    "WORKER_METRICS",
    "MetricKind",
    "MetricSpec",
    "Rows",
    "Source",
    "example",
    "explain",
    "find",
    "nearest",
]
