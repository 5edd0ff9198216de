"""Every metric that a rank exports: name, kind, help, label values that exist from the start.

One table, so that dashboards, alert rules and documentation can be checked against it. Each series has
the labels `job_name` and `rank`; `namespace`, `pod` and `node` are the scrape target's, so that no
tenant can forge another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

COMMON_LABELS = ("job_name", "rank")

PHASES = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
MEMORY_TIERS = ("gpu", "cpu", "pinned", "nvme")
MEMORY_PHASES = ("init", "forward", "backward", "optimizer", "checkpoint")
TRANSFER_DIRECTIONS = ("h2d", "d2h", "spill_read", "spill_write")
CHECKPOINT_OPERATIONS = ("save", "load")

STEP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
COLLECTIVE_BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
    30.0,
)
CHECKPOINT_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Kind(Enum):
    """Prometheus' type of the family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSpec:
    """One family."""

    name: str
    """As it is written in the exposition: counters with `_total`, info with `_info`."""
    kind: Kind
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label beside the common ones -> values born at 0 (`increase()` misses a series born at 1)."""
    buckets: tuple[float, ...] = STEP_BUCKETS_S


def _counter(name: str, text: str, **labels: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(name=name, kind=Kind.COUNTER, help=text, labels=labels)


def _gauge(name: str, text: str, **labels: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(name=name, kind=Kind.GAUGE, help=text, labels=labels)


def _seconds(name: str, text: str, buckets: tuple[float, ...], **labels: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(name=name, kind=Kind.HISTOGRAM, help=text, labels=labels, buckets=buckets)


CATALOGUE: tuple[MetricSpec, ...] = (
    _seconds(
        "zerotrain_step_duration_seconds", "Wall time of one optimizer step, data to update.", STEP_BUCKETS_S
    ),
    _seconds(
        "zerotrain_phase_duration_seconds",
        "Wall time that one step spent in a phase.",
        STEP_BUCKETS_S,
        phase=PHASES,
    ),
    _seconds(
        "zerotrain_collective_duration_seconds",
        "Time from the start of one collective operation to its completion.",
        COLLECTIVE_BUCKETS_S,
        op=COLLECTIVES,
    ),
    _seconds(
        "zerotrain_optimizer_step_duration_seconds",
        "Time of one parameter update, gradient clipping included.",
        STEP_BUCKETS_S,
    ),
    _seconds(
        "zerotrain_checkpoint_duration_seconds",
        "Time from the start of a checkpoint to its durable commit, or of loading one.",
        CHECKPOINT_BUCKETS_S,
        operation=CHECKPOINT_OPERATIONS,
    ),
    _gauge("zerotrain_loss", "Training loss of the last step; NaN before the first."),
    _gauge(
        "zerotrain_grad_norm", "Global gradient norm of the last step before clipping; NaN before the first."
    ),
    _gauge("zerotrain_loss_scale", "Factor that the loss is multiplied by; 1 without fp16."),
    _gauge("zerotrain_learning_rate", "Learning rate of the last step."),
    _gauge("zerotrain_step", "Optimizer steps done, earlier attempts included."),
    _gauge("zerotrain_total_steps", "Optimizer steps the job asks for."),
    _gauge(
        "zerotrain_last_step_timestamp_seconds",
        "Unix time of the last finished step; of the start of the process before the first.",
    ),
    _gauge(
        "zerotrain_last_checkpoint_timestamp_seconds",
        "Unix time of the newest durable checkpoint; of the start of the process while there is none.",
    ),
    _gauge("zerotrain_last_checkpoint_step", "Step of the newest durable checkpoint."),
    _gauge(
        "zerotrain_checkpoint_interval_seconds",
        "Expected time between two checkpoints, from the job's policy and the step time; 0 when unknown.",
    ),
    _gauge(
        "zerotrain_memory_peak_bytes",
        "Peak of memory in use within a phase of the last step.",
        tier=MEMORY_TIERS,
        phase=MEMORY_PHASES,
    ),
    _counter("zerotrain_tokens_total", "Tokens trained on by this rank in this process."),
    _counter("zerotrain_samples_total", "Samples trained on by this rank in this process."),
    _counter("zerotrain_skipped_steps_total", "Steps whose update was left out because of an overflow."),
    _counter("zerotrain_nonfinite_steps_total", "Steps whose loss or gradient norm was NaN or infinite."),
    _counter(
        "zerotrain_grad_norm_spikes_total", "Steps whose gradient norm was far above the recent median."
    ),
    _counter("zerotrain_loss_spikes_total", "Steps whose loss was far above the recent median."),
    _counter("zerotrain_compute_seconds_total", "Time in forward, backward and optimizer."),
    _counter(
        "zerotrain_productive_seconds_total",
        "Time of steps that moved the model to a step never reached before.",
    ),
    _counter("zerotrain_data_wait_seconds_total", "Time spent waiting for the next batch."),
    _counter(
        "zerotrain_collective_bytes_total", "Payload of finished collective operations.", op=COLLECTIVES
    ),
    _counter(
        "zerotrain_transfer_bytes_total",
        "Bytes moved between memory tiers by offloading; h2d and d2h by the byte formulas.",
        direction=TRANSFER_DIRECTIONS,
    ),
    _counter(
        "zerotrain_spill_wait_seconds_total",
        "Time in which an update had nothing to do but wait for the spill's drive.",
    ),
    _counter(
        "zerotrain_optimizer_exposed_seconds_total",
        "Time that training stood still for parameter updates.",
    ),
    _counter(
        "zerotrain_optimizer_background_seconds_total",
        "Time of parameter updates that ran beside the next forward pass.",
    ),
    _counter("zerotrain_checkpoint_bytes_total", "Bytes that this rank wrote into checkpoints."),
    _counter("zerotrain_checkpoint_failures_total", "Checkpoints that could not be made durable."),
    MetricSpec(
        name="zerotrain_spill_info",
        kind=Kind.INFO,
        help="1 where a rank spills, with the I/O engine, whether I/O is direct, the encryption, what "
        "encrypts, and why not a better one.",
    ),
    MetricSpec(
        name="zerotrain_rank_info",
        kind=Kind.INFO,
        help="1, with what is fixed for the life of the rank's process.",
    ),
)

LAUNCHER_CATALOGUE: tuple[MetricSpec, ...] = (
    _gauge("zerotrain_rank_up", "1 while the rank's process runs."),
    _gauge(
        "zerotrain_rank_last_report_timestamp_seconds",
        "Unix time of the rank's last message to its launcher; 0 for a program that never reports.",
    ),
)
"""What the launcher itself knows of each rank, also of a program that reports nothing."""
