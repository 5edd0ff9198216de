"""Metrics of the launcher about its ranks and its container.

They exist for a program that reports nothing, too. `runtime.launch.rank_table` builds them.
"""

from __future__ import annotations

from zerotrain.contract.progress import Phase

from .spec import MetricSpec, Rows, Source

_rank = Rows(source=Source.LAUNCHER)
_worker = Rows(source=Source.WORKER)

LAUNCHER_METRICS: tuple[MetricSpec, ...] = (
    _rank.gauge("zerotrain_rank_up", "1 while the rank's process runs."),
    _rank.gauge(
        "zerotrain_rank_last_report_timestamp_seconds",
        "Unix time of the rank's last message to its launcher; 0 for a program that never reports.",
    ),
    _rank.gauge(
        "zerotrain_rank_phase",
        "1 for what the rank does now; 0 for all phases until it reports.",
        phase=tuple(str(phase) for phase in Phase),
    ),
    _rank.gauge(
        "zerotrain_attempt_start_timestamp_seconds", "Unix time at which this attempt's launcher began."
    ),
    _rank.gauge("zerotrain_world_size", "Ranks that this attempt must have."),
)
"""Metrics per rank."""

WORKER_METRICS: tuple[MetricSpec, ...] = (
    _worker.gauge(
        "zerotrain_host_memory_used_bytes",
        "Working set of the worker's container: its memory without what the kernel can drop.",
    ),
    _worker.gauge(
        "zerotrain_host_memory_limit_bytes",
        "Memory limit of the worker's container; the host's memory where it has none.",
    ),
)
"""Metrics per container, whose index is the label `worker`."""
