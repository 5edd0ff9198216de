"""Metrics of the operator itself, in a registry of their own so that tests can have several operators.

The rows are in `zerotrain.contract.metrics.operator`. States (queue, watches, jobs by phase) are read at a
scrape, not when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.registry import Collector

from zerotrain.contract.metrics import OPERATOR_METRICS
from zerotrain.contract.metrics.operator import JOB_PHASES, VERBS, WATCHES

USUAL_CODES = ("0", "200", "201", "403", "404", "409", "410", "422", "429", "500", "503")
"""Status codes whose series exist from the first request of a verb and resource on: an alert's `increase()`
misses the first increment of a series that is born with it."""

_SPECS = {spec.name: spec for spec in OPERATOR_METRICS}


class Telemetry:
    """Metrics that /metrics of the operator exports."""

    def __init__(self) -> None:
        # The text format would export creation times as families of their own; nothing reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._counter("zerotrain_operator_api_requests_total")
        self._known_requests: dict[tuple[str, str], dict[int, Counter]] = {}
        self._request_seconds = self._histogram("zerotrain_operator_api_request_duration_seconds")
        self._seconds_of = {verb: self._request_seconds.labels(verb) for verb in VERBS}
        self.reconcile_seconds = self._histogram("zerotrain_operator_reconcile_duration_seconds")
        self.reconcile_errors = self._counter("zerotrain_operator_reconcile_errors_total")
        self.queue_depth = self._gauge("zerotrain_operator_queue_depth")
        self.queue_oldest_age_seconds = self._gauge("zerotrain_operator_queue_oldest_age_seconds")
        self._jobs = self._gauge("zerotrain_operator_jobs")
        self.leader = self._gauge("zerotrain_operator_leader")
        self.loop_lag_seconds = self._gauge("zerotrain_operator_loop_lag_seconds")
        self._watch_age_seconds = self._gauge("zerotrain_operator_watch_age_seconds")
        self._unreadable = self._gauge("zerotrain_operator_unreadable")
        self._unresponsive = self._gauge("zerotrain_operator_unresponsive_jobs")
        self.unwritten_jobs = self._gauge("zerotrain_operator_unwritten_jobs")
        self.count_jobs({})
        self.set_watch_ages(dict.fromkeys(WATCHES, 0.0))
        self._info = Info(
            "zerotrain_operator", _SPECS["zerotrain_operator_info"].help, registry=self.registry
        )
        self._info.info({"version": _version()})

    def request(self, verb: str, resource: str, code: int, seconds: float | None = None) -> None:
        """Count a request that was answered with `code` (0: no answer) after `seconds`; None for a watch,
        which goes on."""
        known = self._known_requests.get((verb, resource))
        if known is None:
            known = self._known_requests[verb, resource] = {
                int(usual): self._requests.labels(verb, resource, usual) for usual in USUAL_CODES
            }
        if code not in known:
            known[code] = self._requests.labels(verb, resource, str(code))
        known[code].inc()
        if seconds is not None:
            self._seconds_of[verb].observe(seconds)

    def count_jobs(self, by_phase: Mapping[str, int]) -> None:
        for phase in (*JOB_PHASES, *(name for name in by_phase if name not in JOB_PHASES)):
            self._jobs.labels(phase).set(by_phase.get(phase, 0))

    def set_watch_ages(self, by_resource: Mapping[str, float]) -> None:
        for resource, seconds in by_resource.items():
            self._watch_age_seconds.labels(resource).set(seconds)

    def set_unreadable(self, refused: Mapping[tuple[str, str], bool]) -> None:
        """Set whether reading is refused, by resource and namespace, which is empty for the whole cluster."""
        for place, is_refused in refused.items():
            self._unreadable.labels(*place).set(is_refused)

    def count_unresponsive(self, count: Callable[[], int]) -> None:
        """Export the result of `count`, which is called at every scrape, from any thread."""
        self._unresponsive.set_function(count)

    def watch_jobs(self, collector: Collector) -> None:
        """Export the jobs' series as well."""
        self.registry.register(collector)

    def _counter(self, name: str) -> Counter:
        spec = _SPECS[name]
        return Counter(name, spec.help, tuple(spec.labels), registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        spec = _SPECS[name]
        return Gauge(name, spec.help, tuple(spec.labels), registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        spec = _SPECS[name]
        return Histogram(name, spec.help, tuple(spec.labels), buckets=spec.buckets, registry=self.registry)


def _version() -> str:
    try:
        return version("zerotrain")
    except PackageNotFoundError:  # run from a source tree
        return ""
