"""The launcher's collector: the newest snapshot of every rank of the pod as one valid exposition."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class MergedCollector(Collector):
    """One family per name over all ranks. May be updated and collected from different threads."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._by_rank: dict[int, list[Metric]] = {}

    def update(self, rank: int, families: list[Metric]) -> None:
        """Replace the earlier families of `rank`. `families` must not be changed afterwards."""
        with self._lock:
            self._by_rank[rank] = families

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            ranks = sorted(self._by_rank.items())
        merged: dict[str, Metric] = {}
        for rank, families in ranks:
            for family in families:
                target = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                # Two ranks that disagree on a type run different code; an exposition can hold only one.
                if target.type == family.type:
                    target.samples.extend(self._claim(family.samples, rank))
        return iter(merged.values())

    def _claim(self, samples: Iterable[Sample], rank: int) -> Iterator[Sample]:
        """Set the labels `job_name` and `rank` of samples: a program can neither forge nor omit them."""
        for sample in samples:
            yield sample._replace(labels={**sample.labels, "job_name": self._job, "rank": str(rank)})
