"""A rank's metrics: the trainer reports events, and this module turns them into the families of the
catalogue.

One thread reports; any thread may collect.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import Histogram

from zerotrain.contract.metrics import RANK_METRICS
from zerotrain.runtime.metrics.families import Families
from zerotrain.runtime.metrics.spikes import SpikeDetector, SpikeRule

COMPUTE_PHASES = frozenset({"forward", "backward", "optimizer"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RankIdentity:
    """Properties that are fixed for the life of a rank's process."""

    job: str
    rank: int
    attempt: int
    world_size: int = 1
    local_rank: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    """Further low-cardinality labels of zerotrain_rank_info (device, dtype, ZeRO stage, version)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """One finished optimizer step, or several, as this rank measured it."""

    step: int
    """Number of steps done after this one, those of earlier attempts included."""
    seconds: float
    loss: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    learning_rate: float | None = None
    tokens: int = 0
    """Tokens of this rank."""
    samples: int = 0
    skipped: int = 0
    """Number of steps whose update was skipped (overflow)."""
    replayed: bool = False
    """Whether an earlier attempt had reached this step already: the time is not productive."""
    wait_seconds: float = 0.0
    """Part of `seconds` in which the rank only waited for collectives."""
    background_seconds: float = 0.0
    """Time of updates that ran beside the forward pass."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    step_flops: float | None = None
    """Floating-point operations of one step on this rank; None where they are not known."""
    mfu: float | None = None
    """Part of the device's peak that these are in `seconds`; None where the peak is not known."""
    steps: int = 1
    """Steps that ended since the last sample, `step` the last of them. Tokens and samples are those of all
    steps, times are the mean of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSample:
    """Totals since the engine was made."""

    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by transfer direction."""
    wait_seconds: float = 0.0
    pass_seconds: float = 0.0
    pass_bytes: int = 0
    io_errors: int = 0
    auth_failures: int = 0


class WorkerMetrics:
    """The private registry of one rank. Every label set of the catalogue exists, at 0, from the start."""

    def __init__(self, identity: RankIdentity, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns Unix seconds."""
        self._families = Families(RANK_METRICS, {"job_name": identity.job, "rank": str(identity.rank)})
        self.registry = self._families.registry()
        self._clock = clock
        self._grad_norm_spikes = SpikeDetector(SpikeRule(factor=5.0))
        self._loss_spikes = SpikeDetector(SpikeRule(factor=1.5))
        self._has_stepped = False
        self._facts = {
            "attempt": str(identity.attempt),
            "world_size": str(identity.world_size),
            "local_rank": str(identity.local_rank),
            **identity.facts,
        }
        self._families.info("zerotrain_rank_info").info(self._facts)
        self._families.gauge("zerotrain_loss").set(math.nan)
        self._families.gauge("zerotrain_grad_norm").set(math.nan)
        self._families.gauge("zerotrain_loss_scale").set(1.0)
        self._born_at = clock()
        for name in ("zerotrain_last_step_timestamp_seconds", "zerotrain_last_checkpoint_timestamp_seconds"):
            self._families.gauge(name).set(self._born_at)

    def add_facts(self, **facts: str) -> None:
        """Add labels of zerotrain_rank_info that are known once the engine exists."""
        self._facts.update(facts)
        self._families.info("zerotrain_rank_info").info(self._facts)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge of the catalogue from which no other series is derived."""
        self._families.gauge(name, *labels).set(value)

    def observe_step(self, sample: StepSample) -> None:
        """Record finished optimizer steps; the step number becomes the exemplar of the series that count
        them."""
        with self._families.lock:
            self._observe_step(sample)

    def _observe_step(self, sample: StepSample) -> None:
        families, step, phases, steps = self._families, sample.step, sample.phase_seconds, sample.steps
        _observe(families.histogram("zerotrain_step_duration_seconds"), sample.seconds, step, times=steps)
        for phase, seconds in phases.items():
            _observe(
                families.histogram("zerotrain_phase_duration_seconds", phase), seconds, step, times=steps
            )
            if phase in COMPUTE_PHASES:
                families.counter("zerotrain_compute_seconds_total").inc(seconds * steps)
        if "optimizer" in phases:
            exposed = phases["optimizer"]
            _observe(
                families.histogram("zerotrain_optimizer_step_duration_seconds"), exposed, step, times=steps
            )
            families.counter("zerotrain_optimizer_exposed_seconds_total").inc(exposed * steps)
        background = sample.background_seconds * steps
        families.counter("zerotrain_optimizer_background_seconds_total").inc(background)
        families.counter("zerotrain_data_wait_seconds_total").inc(phases.get("data", 0.0) * steps)
        # Waits between two steps are reported with the later one, and may be longer than that step took.
        waited = min(sample.wait_seconds, sample.seconds)
        families.counter("zerotrain_collective_wait_seconds_total").inc(waited * steps)
        families.counter("zerotrain_step_own_seconds_total").inc((sample.seconds - waited) * steps)
        families.counter("zerotrain_tokens_total").inc(sample.tokens)
        families.counter("zerotrain_samples_total").inc(sample.samples)
        if not self._has_stepped:
            self._has_stepped = True
            startup = self._clock() - self._born_at - sample.seconds * steps
            families.counter("zerotrain_lost_seconds_total", "startup").inc(max(startup, 0.0))
        _account(families, sample)
        self._observe_numbers(sample)
        families.gauge("zerotrain_step").set(step)
        families.gauge("zerotrain_last_step_timestamp_seconds").set(self._clock())

    def observe_collectives(self, op: str, seconds: Iterable[float], num_bytes: int = 0) -> None:
        """Record finished collectives; `num_bytes` is the number of bytes that this rank sent in all of
        them."""
        with self._families.lock:
            histogram = self._families.histogram("zerotrain_collective_duration_seconds", op)
            for each in seconds:
                histogram.observe(each)
            self._families.counter("zerotrain_collective_bytes_total", op).inc(num_bytes)

    def observe_digest(self, *, step: int, is_equal: bool) -> None:
        """Record a comparison of the replicated state: whether this rank's digest equals rank 0's."""
        self._families.counter("zerotrain_state_digest_checks_total").inc()
        if not is_equal:
            self._families.counter("zerotrain_state_digest_mismatch_total").inc(1, _exemplar(step))

    def observe_checkpoint(self, *, step: int, seconds: float, num_bytes: int = 0) -> None:
        """Record that a checkpoint of `step` is durable."""
        _observe(self._families.histogram("zerotrain_checkpoint_duration_seconds", "save"), seconds, step)
        self._families.counter("zerotrain_checkpoint_bytes_total").inc(num_bytes)
        self._families.gauge("zerotrain_checkpoint_size_bytes").set(num_bytes)
        self.set_last_checkpoint(step=step, at=self._clock())

    def observe_stall(self, *, step: int, seconds: float) -> None:
        """Record the time that training waited for a checkpoint."""
        _observe(self._families.histogram("zerotrain_phase_duration_seconds", "checkpoint"), seconds, step)
        self._families.counter("zerotrain_lost_seconds_total", "checkpoint").inc(seconds)

    def observe_resume(self, *, step: int, seconds: float, at: float) -> None:
        """Record that the checkpoint of `step`, committed at Unix time `at`, was loaded."""
        _observe(self._families.histogram("zerotrain_checkpoint_duration_seconds", "load"), seconds, step)
        self.set_last_checkpoint(step=step, at=at)
        self._families.gauge("zerotrain_step").set(step)

    def checkpoint_failed(self) -> None:
        self._families.counter("zerotrain_checkpoint_failures_total").inc()

    def set_last_checkpoint(self, *, step: int, at: float) -> None:
        """Set the last checkpoint; `at` is the Unix time of the commit."""
        self._families.gauge("zerotrain_last_checkpoint_timestamp_seconds").set(at)
        self._families.gauge("zerotrain_last_checkpoint_step").set(step)

    def set_dropped_points(self, total: int) -> None:
        """Set how many points trackers did not take so far."""
        self._families.raise_to(total, "zerotrain_tracker_dropped_points_total")

    def set_spill(self, *, engine: str, direct: bool, encryption: str, backend: str, reason: str) -> None:
        """Record how this rank spills; `encryption` is AEAD or None, `reason` says why a faster way is not
        used."""
        labels = {
            "engine": engine,
            "direct": str(direct).lower(),
            "encryption": encryption,
            "backend": backend,
            "reason": reason,
        }
        self._families.info("zerotrain_spill_info").info(labels)

    def set_offload(self, sample: OffloadSample) -> None:
        """Set the totals of offloading so far."""
        for direction, num_bytes in sample.moved_bytes.items():
            self._families.raise_to(num_bytes, "zerotrain_transfer_bytes_total", direction)
        self._families.raise_to(sample.wait_seconds, "zerotrain_spill_wait_seconds_total")
        self._families.raise_to(sample.pass_seconds, "zerotrain_spill_pass_seconds_total")
        self._families.raise_to(sample.pass_bytes, "zerotrain_spill_pass_bytes_total")
        self._families.raise_to(sample.io_errors, "zerotrain_spill_io_errors_total")
        self._families.raise_to(sample.auth_failures, "zerotrain_spill_auth_failures_total")

    def _observe_numbers(self, sample: StepSample) -> None:
        finite = True
        # fp16 finds its loss scale through overflows: a step skipped for one is not the model's fault.
        is_overflow = sample.skipped > 0 and sample.loss_scale not in (None, 1.0)
        for name, value, spikes in (
            ("zerotrain_loss", sample.loss, self._loss_spikes),
            ("zerotrain_grad_norm", sample.grad_norm, self._grad_norm_spikes),
        ):
            if value is None:
                continue
            self._families.gauge(name).set(value)
            finite = finite and (math.isfinite(value) or (is_overflow and name == "zerotrain_grad_norm"))
            if spikes.observe(value):
                self._families.counter(f"{name}_spikes_total").inc(1, _exemplar(sample.step))
        if not finite:
            self._families.counter("zerotrain_nonfinite_steps_total").inc(1, _exemplar(sample.step))
        if sample.loss_scale is not None:
            self._families.gauge("zerotrain_loss_scale").set(sample.loss_scale)
        for name, value in (
            ("zerotrain_learning_rate", sample.learning_rate),
            ("zerotrain_step_flops", sample.step_flops),
            ("zerotrain_mfu_ratio", sample.mfu),
        ):
            if value is not None:
                self._families.gauge(name).set(value)


def _observe(histogram: Histogram, seconds: float, step: int, *, times: int = 1) -> None:
    """Count `seconds` `times` times; `step` becomes the exemplar."""
    exemplar = _exemplar(step)
    for _ in range(times):
        histogram.observe(seconds, exemplar)


def _exemplar(step: int) -> dict[str, str]:
    return {"step": str(step)}


def _account(families: Families, sample: StepSample) -> None:
    """Account the steps' time: as progress, or as one of the kinds of loss."""
    if sample.skipped:
        families.counter("zerotrain_skipped_steps_total").inc(sample.skipped, _exemplar(sample.step))
        families.counter("zerotrain_lost_seconds_total", "skipped").inc(sample.seconds * sample.skipped)
    seconds = sample.seconds * (sample.steps - sample.skipped)
    if sample.replayed:
        families.counter("zerotrain_lost_seconds_total", "replayed").inc(seconds)
    else:
        families.counter("zerotrain_productive_seconds_total").inc(seconds)
