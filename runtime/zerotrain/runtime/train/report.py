"""What the outside sees of a rank: the log line, the progress record and the metrics."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from zerotrain.contract.launch import LaunchSpec, RankEnv
from zerotrain.contract.progress import CheckpointProgress, Phase, Progress, RejectedCheckpoint
from zerotrain.contract.train_spec import CheckpointPolicy, TrainSpec
from zerotrain.runtime.channel import RankChannel
from zerotrain.runtime.checkpoint import LoadResult, SaveResult
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.facade.memory import OffloadTotals
from zerotrain.runtime.metrics import RankIdentity, StepSample, WorkerMetrics
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.train.straggling import OwnTimes
from zerotrain.runtime.zero.ledger import Kind, Tier

METRICS_INTERVAL_S = 2.0
"""Seconds between two snapshots to the launcher; a scrape is rarer than that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One finished optimizer step."""

    result: StepResult
    loss: float
    """Mean over all ranks and micro-batches."""
    seconds: float
    data_seconds: float
    """Part of it spent on getting batches."""
    tokens: int
    """Of all ranks."""
    samples: int
    """Of this rank."""


@dataclass
class _Interval:
    """Sums since the last log line."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0

    def add(self, report: StepReport) -> None:
        self.steps += 1
        self.seconds += report.seconds
        self.tokens += report.tokens


@dataclass
class Reporter:
    """Publishes for one rank; only rank 0 prints step lines, because the loss is the same on all."""

    launch: LaunchSpec
    rank: RankEnv
    channel: RankChannel
    metrics: WorkerMetrics
    progress: Progress
    log_every_steps: int = 10
    policy: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    _interval: _Interval = field(default_factory=_Interval)
    _offloaded: OffloadTotals = field(default_factory=OffloadTotals)
    _metrics_at: float = 0.0
    _own_times: OwnTimes = field(init=False)

    def __post_init__(self) -> None:
        self._own_times = OwnTimes(self.launch.world_size)

    @classmethod
    def start(cls, launch: LaunchSpec, rank: RankEnv, channel: RankChannel) -> Reporter:
        """Say that this rank lives; `set_plan` follows when the job is read."""
        identity = RankIdentity(
            job=launch.job,
            rank=rank.rank,
            attempt=launch.attempt,
            world_size=launch.world_size,
            local_rank=rank.local_rank,
            facts={"device": "cuda" if torch.cuda.is_available() else "cpu"},
        )
        metrics = WorkerMetrics(identity)
        channel.attach_metrics(metrics.registry)
        reporter = cls(
            launch=launch,
            rank=rank,
            channel=channel,
            metrics=metrics,
            progress=Progress(rank=rank.rank, attempt=launch.attempt),
        )
        reporter._publish()
        return reporter

    def say(self, text: str) -> None:
        """A line of the log, on rank 0."""
        if self.rank.rank == 0:
            print(text, flush=True)

    def phase(self, phase: Phase) -> None:
        """Tell the launcher what this rank does now; hang limits depend on it."""
        self._publish(phase=phase)

    def set_plan(self, spec: TrainSpec) -> None:
        """What the job asks for."""
        self.log_every_steps = spec.log_every_steps
        self.policy = spec.checkpoint
        self.metrics.set_plan(total_steps=spec.steps)
        self._publish(total_steps=spec.steps)

    def resumed(self, result: LoadResult, *, seconds: float, last: CheckpointProgress) -> None:
        """This attempt goes on from a checkpoint."""
        self.metrics.observe_resume(step=result.step, seconds=seconds, at=result.time)
        self.say(
            f"resumed from step {result.step}: {result.path} "
            f"(written by {result.world_size} ranks, read by {self.launch.world_size} in {seconds:.2f} s)"
        )
        self._publish(step=result.step, resumed_from=result.step, checkpoint=last)

    def rejected(self, checkpoints: tuple[RejectedCheckpoint, ...]) -> None:
        """Damaged checkpoints were passed over."""
        for item in checkpoints:
            self.say(f"checkpoint passed over: {item.path}: {item.reason}")
        self._publish(rejected_checkpoints=checkpoints)

    def saved(self, result: SaveResult, last: CheckpointProgress) -> None:
        """A checkpoint is durable."""
        self.metrics.observe_checkpoint(step=result.step, seconds=result.seconds, num_bytes=result.num_bytes)
        removed = f", removed {len(result.removed)} older" if result.removed else ""
        self.say(
            f"checkpoint of step {result.step} is durable: {result.path} ({result.seconds:.2f} s{removed})"
        )
        self._publish(checkpoint=last)

    def step(self, report: StepReport, *, engine: Engine) -> None:
        """A step is done: metrics always, progress always, a log line at every interval."""
        result = report.result
        self._interval.add(report)
        self.metrics.observe_step(
            StepSample(
                step=result.step,
                seconds=report.seconds,
                loss=report.loss,
                grad_norm=result.grad_norm,
                loss_scale=result.loss_scale,
                learning_rate=result.lr,
                tokens=report.tokens // self.launch.world_size,
                samples=report.samples,
                skipped=result.skipped,
                phase_seconds=_phases(result.seconds, report.data_seconds),
            )
        )
        self._observe_offload(result, engine)
        while engine.comm.timings:
            sample = engine.comm.timings.popleft()
            self.metrics.observe_collective(sample.op, sample.seconds, sample.num_bytes)
        peak = peak_memory_bytes()
        self.metrics.set_memory_peak("gpu" if torch.cuda.is_available() else "cpu", "optimizer", peak)
        if self.rank.rank == 0:
            self._own_times.add(result)
        interval = self._interval
        rate = interval.tokens / interval.seconds if interval.seconds else 0.0
        self._publish(
            phase=Phase.STEP,
            step=result.step,
            step_at=time.time(),
            loss=report.loss,
            grad_norm=result.grad_norm,
            tokens_per_second=rate,
            step_seconds=interval.seconds / interval.steps,
            memory_peak_bytes=peak,
            host_peak_bytes=resident_peak_bytes(),
            spill_peak_bytes=engine.memory.peak_bytes(Kind.SPILL),
            straggler=self._own_times.slowest,
        )
        if result.step % self.log_every_steps == 0 or result.step == self.progress.total_steps:
            self.say(step_line(self.progress, result))
            self._interval = _Interval()
            self.metrics.set_plan(
                total_steps=self.progress.total_steps,
                checkpoint_interval_seconds=expected_interval(self.policy, self.progress.step_seconds or 0.0),
            )

    def _observe_offload(self, result: StepResult, engine: Engine) -> None:
        """What the step added, and the tiers' peaks so far."""
        zero = engine.config.zero
        if zero.offload_optimizer is None and zero.offload_param is None:
            return
        before, now = self._offloaded, engine.offload_totals()
        self._offloaded = now
        self.metrics.observe_offload(
            moved={
                "h2d": now.h2d_bytes - before.h2d_bytes,
                "d2h": now.d2h_bytes - before.d2h_bytes,
                "spill_read": now.spill_read_bytes - before.spill_read_bytes,
                "spill_write": now.spill_written_bytes - before.spill_written_bytes,
            },
            spill_wait_seconds=now.spill_wait_seconds - before.spill_wait_seconds,
            optimizer={
                "exposed": result.seconds.get("optimizer", 0.0),
                "background": result.seconds.get("optimizer_background", 0.0),
            },
        )
        tiers = {"pinned": Tier.HOST} if torch.cuda.is_available() else {}
        for name, tier in {**tiers, "nvme": Tier.DISK}.items():
            peak = sum(engine.memory.peak_bytes(kind) for kind in Kind if kind.tier is tier)
            self.metrics.set_memory_peak(name, "optimizer", peak)

    def done(self) -> None:
        """Nothing more will come."""
        self._publish(phase=Phase.DONE)
        self.channel.publish_metrics()

    def _publish(self, **changes: object) -> None:
        self.progress = replace(self.progress, heartbeat_at=time.time(), **changes)  # type: ignore[arg-type]
        self.channel.publish(self.progress)
        now = time.monotonic()
        if now - self._metrics_at >= METRICS_INTERVAL_S:
            self._metrics_at = now
            self.channel.publish_metrics()


def step_line(progress: Progress, result: StepResult) -> str:
    """The log line of one interval; memory is this rank's peak."""
    skipped = " skipped" if result.skipped else ""
    return (
        f"step {progress.step}/{progress.total_steps} loss {progress.loss:.4f} "
        f"tokens/s {progress.tokens_per_second:.0f} grad_norm {result.grad_norm:.3f} lr {result.lr:.3e} "
        f"step_s {progress.step_seconds:.3f} memory {progress.memory_peak_bytes / 2**20:.0f} MiB{skipped}"
    )


def expected_interval(policy: CheckpointPolicy, step_seconds: float) -> float:
    """Seconds between two checkpoints at this pace; 0 when the policy has none."""
    by_steps = policy.every_steps * step_seconds if policy.every_steps is not None else None
    known = [value for value in (by_steps, policy.every_seconds) if value is not None]
    return min(known, default=0.0)


def peak_memory_bytes() -> int:
    """Largest memory of this process so far: on the accelerator if there is one, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resident_peak_bytes()


def resident_peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _phases(seconds: Mapping[str, float], data_seconds: float) -> dict[str, float]:
    known = {name: seconds[name] for name in ("forward", "backward", "reduce") if name in seconds}
    optimizer = seconds.get("optimizer", 0.0) + seconds.get("gather", 0.0)
    return {"data": data_seconds, **known, "optimizer": optimizer}
