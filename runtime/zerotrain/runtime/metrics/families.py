"""The metrics of one catalogue, as prometheus_client's: `WorkerMetrics` and the launcher write to them.

They live in a registry of their own, never in prometheus_client's default one, which is the program's. Where
the program sets PROMETHEUS_MULTIPROC_DIR, prometheus_client keeps all values of the process in its files
there, these too, and drops exemplars.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from threading import Lock
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from zerotrain.contract.metrics import MetricKind, MetricSpec

Series = Counter | Gauge | Histogram | Info
S = TypeVar("S", Counter, Gauge, Histogram, Info)


class Families(Collector):
    """All series of a catalogue under the same first labels. Every known label set exists at 0 from the
    start; those of a family that exists only in some workers (`MetricSpec.only`), and facts, exist from their
    first use."""

    def __init__(self, catalogue: Iterable[MetricSpec], common: Mapping[str, str]) -> None:
        self._common = tuple(common.values())
        self._specs = {spec.name: spec for spec in catalogue}
        self._metrics = {name: _metric(spec, tuple(common)) for name, spec in self._specs.items()}
        self.lock = Lock()
        """Lock held while the families are collected, and by a writer for numbers that must be seen
        together."""
        self._series: dict[tuple[str, ...], Series] = {}
        """Series by name and labels, as `labels()` of a metric takes longer than all the rest."""
        self._totals: dict[tuple[str, ...], float] = {}
        """Totals of `raise_to` so far, by name and labels."""
        for name, spec in self._specs.items():
            if not spec.only and spec.kind is not MetricKind.INFO:
                for values in product(*spec.labels.values()):
                    self._make(name, values)

    def registry(self) -> CollectorRegistry:
        """Return a registry that holds these families alone."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def counter(self, name: str, *labels: str) -> Counter:
        return self._find(Counter, name, labels)

    def gauge(self, name: str, *labels: str) -> Gauge:
        return self._find(Gauge, name, labels)

    def histogram(self, name: str, *labels: str) -> Histogram:
        return self._find(Histogram, name, labels)

    def info(self, name: str) -> Info:
        return self._find(Info, name, ())

    def raise_to(self, total: float, name: str, *labels: str) -> None:
        """Raise a counter to a total that is summed elsewhere; a smaller total comes from a new source that
        began at 0, and changes nothing."""
        known = self._totals.get((name, *labels), 0.0)
        self._totals[(name, *labels)] = most = max(known, total)
        self.counter(name, *labels).inc(most - known)

    def collect(self) -> Iterator[Metric]:
        """Return the families that have samples, without creation times: nothing reads them, and
        prometheus_client can leave them out only for the whole process, the program's metrics included."""
        with self.lock:
            families = [family for metric in self._metrics.values() for family in metric.collect()]
        for family in families:
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        return iter([family for family in families if family.samples])

    def _find(self, kind: type[S], name: str, labels: tuple[str, ...]) -> S:
        """Return a series, made on its first use. Raises KeyError for a name or labels that the catalogue
        lacks, TypeError for another kind."""
        series = self._series.get((name, *labels))
        if series is None:
            spec = self._specs[name]
            if not spec.only and spec.kind is not MetricKind.INFO:
                raise KeyError(f"{name} has no labels {labels} in the catalogue")
            series = self._make(name, labels)
        if not isinstance(series, kind):
            raise TypeError(f"{name} is a {type(series).__name__} in the catalogue, not a {kind.__name__}")
        return series

    def _make(self, name: str, labels: tuple[str, ...]) -> Series:
        series = self._metrics[name].labels(*self._common, *labels)
        self._series[(name, *labels)] = series
        return series


def _metric(spec: MetricSpec, common: tuple[str, ...]) -> Series:
    """Return a metric without any series, in no registry. The labels of an info beside the common ones are
    its facts."""
    labels = (*common, *spec.labels)
    match spec.kind:
        case MetricKind.COUNTER:
            return Counter(spec.name, spec.help, labels, registry=None)
        case MetricKind.GAUGE:
            return Gauge(spec.name, spec.help, labels, registry=None)
        case MetricKind.HISTOGRAM:
            return Histogram(spec.name, spec.help, labels, buckets=spec.buckets, registry=None)
        case MetricKind.INFO:
            return Info(spec.name.removesuffix("_info"), spec.help, common, registry=None)
