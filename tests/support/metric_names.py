"""Every name that a query may use, with its labels: what rules, dashboards and documentation are held to."""

from __future__ import annotations

from zerotrain.contract.metrics import ALL_METRICS, Source

TARGET_LABELS = frozenset({"namespace", "pod", "node", "container", "instance", "job", "endpoint"})
"""What a scrape adds to the series of a worker or of the operator."""

PROCESS = (
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
)
"""Of the operator's process, by prometheus_client."""


def exported() -> dict[str, frozenset[str]]:
    """Sample name (`_bucket`, `_sum`, `_count`, `_total`, `_info` included) -> labels, of worker, launcher
    and operator. `up` and the target's labels come from the scrape."""
    names = {
        sample: frozenset(labels) | TARGET_LABELS for spec in ALL_METRICS for sample, labels in spec.samples()
    }
    return names | dict.fromkeys((*PROCESS, "up"), TARGET_LABELS)


def of_source(source: Source) -> frozenset[str]:
    """The families of one exporter."""
    return frozenset(spec.name for spec in ALL_METRICS if spec.source is source)
