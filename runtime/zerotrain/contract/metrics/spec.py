"""Definition of a metric as plain data: its name, kind, labels and meaning.

The exporters (`runtime.metrics`, `runtime.launch`, `operator.cluster.telemetry`) build their series from
these rows; `docs/metrics.md`, `zerotrain explain metric` and the checks of rules and dashboards read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

STEP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class MetricKind(Enum):
    """Prometheus' type of the family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Source(Enum):
    """Exporter of a family."""

    RANK = "rank"
    """Program of a rank, through its launcher."""
    LAUNCHER = "launcher"
    """Launcher, for each of its ranks, also if the program reports nothing."""
    WORKER = "worker"
    """Launcher, for its container."""
    OPERATOR = "operator"
    """Every replica of the operator."""
    JOB = "job"
    """Leading replica of the operator, for each job."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of all its series, beside the labels of the scrape's target (namespace, pod, node)."""
        return _LABELS[self]


_LABELS = {
    Source.RANK: ("job_name", "rank"),
    Source.LAUNCHER: ("job_name", "rank"),
    Source.WORKER: ("job_name", "worker"),
    Source.OPERATOR: (),
    Source.JOB: ("namespace", "job_name"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSpec:
    """One metric family."""

    name: str
    """Name as written in the exposition: counters with `_total`, info with `_info`."""
    kind: MetricKind
    help: str
    source: Source = Source.RANK
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values by label, for the labels beside the source's; empty if the values are not known beforehand."""
    buckets: tuple[float, ...] = STEP_BUCKETS_S
    only: str = ""
    """Condition for the family; empty means that it always exists.

    Every label set then starts at 0, as `increase()` misses a series that starts at 1.
    """
    exemplars: bool = False
    """Whether its samples carry the step as an exemplar, in the OpenMetrics format."""

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The source's labels and the family's own."""
        return (*self.source.labels, *self.labels)

    def samples(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield name and labels of every sample, as a query sees them."""
        if self.kind is MetricKind.HISTOGRAM:
            yield f"{self.name}_bucket", (*self.all_labels, "le")
            yield f"{self.name}_sum", self.all_labels
            yield f"{self.name}_count", self.all_labels
        else:
            yield self.name, self.all_labels


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Factory for rows of one source, so that a catalogue reads as a table."""

    source: Source
    only: str = ""

    def counter(
        self, name: str, text: str, *, exemplars: bool = False, **labels: tuple[str, ...]
    ) -> MetricSpec:
        return self._row(name, MetricKind.COUNTER, text, labels, exemplars=exemplars)

    def gauge(self, name: str, text: str, **labels: tuple[str, ...]) -> MetricSpec:
        return self._row(name, MetricKind.GAUGE, text, labels)

    def seconds(
        self,
        name: str,
        text: str,
        buckets: tuple[float, ...] = STEP_BUCKETS_S,
        *,
        exemplars: bool = False,
        **labels: tuple[str, ...],
    ) -> MetricSpec:
        """Return a histogram of durations."""
        return self._row(name, MetricKind.HISTOGRAM, text, labels, buckets=buckets, exemplars=exemplars)

    def info(self, name: str, text: str, *labels: str) -> MetricSpec:
        return self._row(name, MetricKind.INFO, text, dict.fromkeys(labels, ()))

    def _row(
        self,
        name: str,
        kind: MetricKind,
        text: str,
        labels: Mapping[str, tuple[str, ...]],
        *,
        buckets: tuple[float, ...] = STEP_BUCKETS_S,
        exemplars: bool = False,
    ) -> MetricSpec:
        return MetricSpec(
            name=name,
            kind=kind,
            help=text,
            source=self.source,
            labels=labels,
            buckets=buckets,
            only=self.only,
            exemplars=exemplars,
        )
