"""The series of one catalogue, kept as plain numbers: `WorkerMetrics` and the launcher's board write to them.

Writing costs some tens of microseconds per training step (tests/benchmarks/bench_metrics.py), as no number
has a lock of its own: one thread writes, and `lock` keeps related numbers consistent. `collect` returns
prometheus_client's own families, so that its registries, encoders and tests accept them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from threading import Lock
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

from zerotrain.contract.metrics import MetricKind, MetricSpec

Labels = dict[str, str]


class Counter:
    """A sum that only grows."""

    __slots__ = ("_exemplar", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._exemplar: Exemplar | None = None

    def inc(self, amount: float = 1.0, *, step: int | None = None) -> None:
        """Add `amount`; `step` becomes the exemplar."""
        self.value += amount
        if step is not None:
            self._exemplar = Exemplar({"step": str(step)}, amount, time.time())

    def raise_to(self, total: float) -> None:
        """Set a total that is summed elsewhere; a smaller total comes from a new source that began at 0, and
        changes nothing."""
        self.value = max(self.value, total)

    def samples(self, name: str, labels: Labels) -> list[Sample]:
        return [Sample(name, labels, self.value, None, self._exemplar)]


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = float(value)

    def samples(self, name: str, labels: Labels) -> list[Sample]:
        return [Sample(name, labels, self.value)]


class Histogram:
    """Counts by upper bound, and the sum."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_labels", "_sum")

    def __init__(self, bounds: tuple[float, ...], labels: Labels) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: list[tuple[int, float, float] | None] = [None] * (len(bounds) + 1)
        self._sum = 0.0
        # Made once: a snapshot every few seconds needs all of them.
        self._labels = [{**labels, "le": _go(bound)} for bound in (*bounds, float("inf"))]

    def observe(self, value: float, step: int | None = None, *, times: int = 1) -> None:
        """Count `value` `times` times; `step` becomes the bucket's exemplar."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += times
        self._sum += value * times
        if step is not None:
            self._exemplars[bucket] = (step, value, time.time())

    def observe_all(self, values: Iterable[float]) -> None:
        """Count many values at once, without exemplars."""
        bounds, counts, total = self._bounds, self._counts, self._sum
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self._sum = total

    def samples(self, name: str, labels: Labels) -> list[Sample]:
        found, count = [], 0
        for number, kept, names in zip(list(self._counts), self._exemplars, self._labels, strict=True):
            count += number
            exemplar = None if kept is None else Exemplar({"step": str(kept[0])}, kept[1], kept[2])
            found.append(Sample(f"{name}_bucket", names, float(count), None, exemplar))
        return [
            *found,
            Sample(f"{name}_count", labels, float(count)),
            Sample(f"{name}_sum", labels, self._sum),
        ]


class Info:
    """Facts as labels of a series that is always 1."""

    __slots__ = ("_facts",)

    def __init__(self) -> None:
        self._facts: Labels | None = None

    def set(self, facts: Mapping[str, str]) -> None:
        self._facts = dict(facts)

    def samples(self, name: str, labels: Labels) -> list[Sample]:
        return [] if self._facts is None else [Sample(name, {**labels, **self._facts}, 1.0)]


Series = Counter | Gauge | Histogram | Info
S = TypeVar("S", Counter, Gauge, Histogram, Info)


class Families(Collector):
    """All series of a catalogue under the same first labels. Every known label set exists at 0 from the
    start; those of a family that exists only in some workers (`MetricSpec.only`) exist from their first
    use."""

    def __init__(self, catalogue: Iterable[MetricSpec], common: Mapping[str, str]) -> None:
        self._common = dict(common)
        self._specs = {spec.name: spec for spec in catalogue}
        self.lock = Lock()
        """Lock held while the families are collected, and by a writer for numbers that must be seen
        together."""
        self._series: dict[tuple[str, ...], Series] = {}
        self._labels: dict[tuple[str, ...], Labels] = {}
        for spec in self._specs.values():
            if not spec.only:
                # An info's labels are its facts.
                known = product(*spec.labels.values()) if spec.kind is not MetricKind.INFO else [()]
                for values in known:
                    self._make(spec, values)

    def registry(self) -> CollectorRegistry:
        """Return a registry that holds these families alone."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def counter(self, name: str, *labels: str) -> Counter:
        series = self._series.get((name, *labels))
        return series if type(series) is Counter else self._find(Counter, (name, *labels))

    def gauge(self, name: str, *labels: str) -> Gauge:
        series = self._series.get((name, *labels))
        return series if type(series) is Gauge else self._find(Gauge, (name, *labels))

    def histogram(self, name: str, *labels: str) -> Histogram:
        series = self._series.get((name, *labels))
        return series if type(series) is Histogram else self._find(Histogram, (name, *labels))

    def info(self, name: str) -> Info:
        return self._find(Info, (name,))

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        with self.lock:
            for key, series in self._series.items():
                name = key[0]
                family = families.get(name)
                if family is None:
                    family = families[name] = _family(self._specs[name])
                family.samples += series.samples(name, self._labels[key])
        return iter(families.values())

    def _find(self, kind: type[S], key: tuple[str, ...]) -> S:
        """Make a series on its first use, or raise the error for a wrong name or type."""
        series = self._series.get(key)
        if series is None:
            spec = self._specs[key[0]]
            if not spec.only:
                raise KeyError(f"{key[0]} has no labels {key[1:]} in the catalogue")
            with self.lock:
                series = self._make(spec, key[1:])
        if not isinstance(series, kind):
            raise TypeError(f"{key[0]} is a {type(series).__name__} in the catalogue, not a {kind.__name__}")
        return series

    def _make(self, spec: MetricSpec, values: tuple[str, ...]) -> Series:
        key = (spec.name, *values)
        names = () if spec.kind is MetricKind.INFO else spec.labels
        labels = {**self._common, **dict(zip(names, values, strict=True))}
        self._labels[key] = labels
        self._series[key] = series = _series(spec, labels)
        return series


def _go(bound: float) -> str:
    """Return the bound in prometheus_client's notation."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


def _series(spec: MetricSpec, labels: Labels) -> Series:
    match spec.kind:
        case MetricKind.COUNTER:
            return Counter()
        case MetricKind.GAUGE:
            return Gauge()
        case MetricKind.HISTOGRAM:
            return Histogram(spec.buckets, labels)
        case MetricKind.INFO:
            return Info()


def _family(spec: MetricSpec) -> Metric:
    """Return an empty family; in OpenMetrics its name lacks the suffix of its samples."""
    name = spec.name.removesuffix("_total").removesuffix("_info")
    return Metric(name, spec.help, spec.kind.value)
