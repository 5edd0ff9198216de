"""The operator's own metrics, in a registry of their own so that tests can have several operators."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Telemetry:
    """What /metrics of the operator shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "zerotrain_operator_api_requests_total",
            "Requests to the API server by verb, resource and status code (0: no answer).",
            ("verb", "resource", "code"),
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "zerotrain_operator_reconcile_duration_seconds",
            "Duration of one pass over a job, its API requests included.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.reconcile_errors = Counter(
            "zerotrain_operator_reconcile_errors_total",
            "Passes that ended in an error and are repeated.",
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "zerotrain_operator_queue_depth", "Jobs that wait for a pass.", registry=self.registry
        )
        self.jobs = Gauge("zerotrain_operator_jobs", "Jobs by phase.", ("phase",), registry=self.registry)
        self.leader = Gauge(
            "zerotrain_operator_leader", "1 while this replica holds the lease.", registry=self.registry
        )
        self.loop_lag_seconds = Gauge(
            "zerotrain_operator_loop_lag_seconds",
            "How late the event loop woke up at the last check.",
            registry=self.registry,
        )
        self.watch_age_seconds = Gauge(
            "zerotrain_operator_watch_age_seconds",
            "Time since the pod watch last brought an event or bookmark.",
            registry=self.registry,
        )

    def request(self, verb: str, resource: str, code: int) -> None:
        self._requests.labels(verb, resource, str(code)).inc()

    def count_jobs(self, by_phase: dict[str, int]) -> None:
        self.jobs.clear()
        for phase, number in by_phase.items():
            self.jobs.labels(phase).set(number)
