"""A rank's metrics: the trainer tells what happened, this turns it into the families of the catalogue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from zerotrain.runtime.metrics.catalogue import CATALOGUE
from zerotrain.runtime.metrics.families import Families
from zerotrain.runtime.metrics.spikes import SpikeDetector, SpikeRule

COMPUTE_PHASES = frozenset({"forward", "backward", "optimizer"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RankIdentity:
    """What is fixed for the life of a rank's process."""

    job: str
    rank: int
    attempt: int
    world_size: int = 1
    local_rank: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    """Further low-cardinality labels of zerotrain_rank_info (device, dtype, ZeRO stage, version)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """One finished optimizer step as this rank saw it."""

    step: int
    """Steps done after this one, earlier attempts included."""
    seconds: float
    loss: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    learning_rate: float | None = None
    tokens: int = 0
    """Of this rank."""
    samples: int = 0
    skipped: bool = False
    """The update was left out (overflow)."""
    replayed: bool = False
    """An earlier attempt had reached this step already: the time is not productive."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)


class WorkerMetrics:
    """The private registry of one rank. Every label set of the catalogue exists, at 0, from the start."""

    def __init__(self, identity: RankIdentity, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix seconds."""
        self._families = Families(CATALOGUE, job=identity.job, rank=identity.rank)
        self.registry = self._families.registry
        self._clock = clock
        self._grad_norm_spikes = SpikeDetector(SpikeRule(factor=5.0))
        self._loss_spikes = SpikeDetector(SpikeRule(factor=1.5))
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
        for name in ("zerotrain_last_step_timestamp_seconds", "zerotrain_last_checkpoint_timestamp_seconds"):
            self._families.gauge(name).set(clock())

    def add_facts(self, **facts: str) -> None:
        """Further labels of zerotrain_rank_info, known once the engine exists."""
        self._facts.update(facts)
        self._families.info("zerotrain_rank_info").info(self._facts)

    def observe_step(self, sample: StepSample) -> None:
        """One optimizer step is done; the step number becomes the histogram's exemplar."""
        exemplar = {"step": str(sample.step)}
        self._families.histogram("zerotrain_step_duration_seconds").observe(sample.seconds, exemplar)
        for phase, seconds in sample.phase_seconds.items():
            self._families.histogram("zerotrain_phase_duration_seconds", phase).observe(seconds)
            if phase in COMPUTE_PHASES:
                self._families.counter("zerotrain_compute_seconds_total").inc(seconds)
        if "optimizer" in sample.phase_seconds:
            self.observe_optimizer(sample.phase_seconds["optimizer"])
        if "data" in sample.phase_seconds:
            self._families.counter("zerotrain_data_wait_seconds_total").inc(sample.phase_seconds["data"])
        self._families.counter("zerotrain_tokens_total").inc(sample.tokens)
        self._families.counter("zerotrain_samples_total").inc(sample.samples)
        if sample.skipped:
            self._families.counter("zerotrain_skipped_steps_total").inc()
        elif not sample.replayed:
            self._families.counter("zerotrain_productive_seconds_total").inc(sample.seconds)
        self._observe_numbers(sample)
        self._families.gauge("zerotrain_step").set(sample.step)
        self._families.gauge("zerotrain_last_step_timestamp_seconds").set(self._clock())

    def observe_collective(self, op: str, seconds: float, num_bytes: int = 0) -> None:
        """One collective finished; `num_bytes` is its payload on this rank."""
        self._families.histogram("zerotrain_collective_duration_seconds", op).observe(seconds)
        self._families.counter("zerotrain_collective_bytes_total", op).inc(num_bytes)

    def observe_optimizer(self, seconds: float) -> None:
        """One parameter update; `observe_step` calls it when it is given a phase "optimizer"."""
        self._families.histogram("zerotrain_optimizer_step_duration_seconds").observe(seconds)

    def observe_checkpoint(self, *, step: int, seconds: float, num_bytes: int = 0) -> None:
        """A checkpoint of `step` is durable."""
        self._families.histogram("zerotrain_checkpoint_duration_seconds", "save").observe(seconds)
        self._families.counter("zerotrain_checkpoint_bytes_total").inc(num_bytes)
        self.set_last_checkpoint(step=step, at=self._clock())

    def observe_resume(self, *, step: int, seconds: float, at: float) -> None:
        """The checkpoint of `step`, committed at Unix time `at`, was loaded."""
        self._families.histogram("zerotrain_checkpoint_duration_seconds", "load").observe(seconds)
        self.set_last_checkpoint(step=step, at=at)
        self._families.gauge("zerotrain_step").set(step)

    def checkpoint_failed(self) -> None:
        self._families.counter("zerotrain_checkpoint_failures_total").inc()

    def set_last_checkpoint(self, *, step: int, at: float) -> None:
        """`at` is the Unix time of the commit."""
        self._families.gauge("zerotrain_last_checkpoint_timestamp_seconds").set(at)
        self._families.gauge("zerotrain_last_checkpoint_step").set(step)

    def set_plan(self, *, total_steps: int, checkpoint_interval_seconds: float | None = None) -> None:
        """What the job asks for; the interval is estimated when the policy counts steps."""
        self._families.gauge("zerotrain_total_steps").set(total_steps)
        if checkpoint_interval_seconds is not None:
            self._families.gauge("zerotrain_checkpoint_interval_seconds").set(checkpoint_interval_seconds)

    def set_spill(self, *, engine: str, direct: bool, encryption: str, backend: str, reason: str) -> None:
        """This rank spills; `encryption` is AEAD or None, `reason` says why not a faster way."""
        labels = {
            "engine": engine,
            "direct": str(direct).lower(),
            "encryption": encryption,
            "backend": backend,
            "reason": reason,
        }
        self._families.info("zerotrain_spill_info").info(labels)

    def observe_offload(
        self, *, moved: Mapping[str, int], spill_wait_seconds: float, optimizer: Mapping[str, float]
    ) -> None:
        """What one step added: bytes by transfer direction, and the update's `exposed` and `background`
        seconds."""
        for direction, num_bytes in moved.items():
            self._families.counter("zerotrain_transfer_bytes_total", direction).inc(num_bytes)
        self._families.counter("zerotrain_spill_wait_seconds_total").inc(spill_wait_seconds)
        for how, seconds in optimizer.items():
            self._families.counter(f"zerotrain_optimizer_{how}_seconds_total").inc(seconds)

    def set_memory_peak(self, tier: str, phase: str, num_bytes: int) -> None:
        """Peak of `tier` within `phase` of the last step."""
        self._families.gauge("zerotrain_memory_peak_bytes", tier, phase).set(num_bytes)

    def _observe_numbers(self, sample: StepSample) -> None:
        finite = True
        for name, value, spikes in (
            ("zerotrain_loss", sample.loss, self._loss_spikes),
            ("zerotrain_grad_norm", sample.grad_norm, self._grad_norm_spikes),
        ):
            if value is None:
                continue
            self._families.gauge(name).set(value)
            finite = finite and math.isfinite(value)
            if spikes.observe(value):
                self._families.counter(f"{name}_spikes_total").inc()
        if not finite:
            self._families.counter("zerotrain_nonfinite_steps_total").inc()
        if sample.loss_scale is not None:
            self._families.gauge("zerotrain_loss_scale").set(sample.loss_scale)
        if sample.learning_rate is not None:
            self._families.gauge("zerotrain_learning_rate").set(sample.learning_rate)
