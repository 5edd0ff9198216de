"""All names that a query may use, with labels: the reference for rules, dashboards and documentation."""

from __future__ import annotations

from zerotrain.contract.metrics import ALL_METRICS, Source

TARGET_LABELS = frozenset({"namespace", "pod", "node", "container", "instance", "job", "endpoint"})
"""Labels that a scrape adds to the series of a worker or of the operator."""

PROCESS = (
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
)
"""Metrics of the operator's process, by prometheus_client."""


def exported() -> dict[str, frozenset[str]]:
    """Return labels by sample name, for worker, launcher and operator.

    The names include the suffixes `_bucket`, `_sum`, `_count`, `_total` and `_info`. `up` and the target's
    labels come from the scrape.
    """
    names = {
        sample: frozenset(labels) | TARGET_LABELS for spec in ALL_METRICS for sample, labels in spec.samples()
    }
    return names | dict.fromkeys((*PROCESS, "up"), TARGET_LABELS)


def of_source(source: Source) -> frozenset[str]:
    """Return the families of one exporter."""
    return frozenset(spec.name for spec in ALL_METRICS if spec.source is source)
