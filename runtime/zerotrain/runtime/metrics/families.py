"""Builds prometheus_client's objects from a catalogue and hands out the series of one rank, typed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.metrics import MetricWrapperBase

from zerotrain.runtime.metrics.catalogue import COMMON_LABELS, Kind, MetricSpec

M = TypeVar("M", bound=MetricWrapperBase)


class Families:
    """The families of one catalogue in one registry, seen by one rank."""

    def __init__(self, catalogue: Iterable[MetricSpec], *, job: str, rank: int) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._common = (job, str(rank))
        self._families: dict[str, MetricWrapperBase] = {}
        for spec in catalogue:
            self._families[spec.name] = _family(spec, self.registry)
            if spec.kind is Kind.INFO:
                continue  # it is always 1, so it exists only where there is something to say
            for values in product(*spec.labels.values()):
                self._families[spec.name].labels(*self._common, *values)

    def counter(self, name: str, *labels: str) -> Counter:
        return self._series(Counter, name, labels)

    def gauge(self, name: str, *labels: str) -> Gauge:
        return self._series(Gauge, name, labels)

    def histogram(self, name: str, *labels: str) -> Histogram:
        return self._series(Histogram, name, labels)

    def info(self, name: str) -> Info:
        return self._series(Info, name, ())

    def _series(self, kind: type[M], name: str, labels: tuple[str, ...]) -> M:
        family = self._families[name]
        if not isinstance(family, kind):
            raise TypeError(f"{name} is a {type(family).__name__} in the catalogue, not a {kind.__name__}")
        return family.labels(*self._common, *labels)


def _family(spec: MetricSpec, registry: CollectorRegistry) -> MetricWrapperBase:
    labels = (*COMMON_LABELS, *spec.labels)
    match spec.kind:
        case Kind.COUNTER:
            return Counter(spec.name, spec.help, labels, registry=registry)
        case Kind.GAUGE:
            return Gauge(spec.name, spec.help, labels, registry=registry)
        case Kind.HISTOGRAM:
            return Histogram(spec.name, spec.help, labels, registry=registry, buckets=spec.buckets)
        case Kind.INFO:
            return Info(spec.name.removesuffix("_info"), spec.help, labels, registry=registry)
