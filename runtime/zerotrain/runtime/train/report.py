"""Reports of a rank to the outside: the log line, the progress record and the metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch

from zerotrain.contract.progress import CheckpointProgress, Phase, Progress, RejectedCheckpoint
from zerotrain.contract.train_spec import CheckpointPolicy
from zerotrain.contract.worker_environment import LaunchSpec, RankEnv
from zerotrain.runtime.channel import RankChannel
from zerotrain.runtime.checkpoint import LoadResult, SaveResult
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.facade.memory import peak_memory_bytes, resident_peak_bytes
from zerotrain.runtime.metrics import RankIdentity, StepSample, WorkerMetrics
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.trackers.monitor import step_values
from zerotrain.runtime.train import measuring
from zerotrain.runtime.train.compute_work import ComputeWork
from zerotrain.runtime.train.history import HistoryWriter, event, step_point
from zerotrain.runtime.train.stragglers import OwnTimes
from zerotrain.runtime.zero.ledger import MemoryKind

METRICS_INTERVAL_S = 5.0
"""Seconds between two snapshots to the launcher, each of which costs a millisecond; scrapes are less
frequent."""

EVALUATED_INTERVAL_S = 1.0
"""Seconds between two records of an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The optimizer steps that ended since the last report: one in the trainer, any number in a user's own
    program."""

    result: StepResult
    """Result of the last of these steps; `result.seconds` is the mean of all."""
    loss: float
    """Mean over the micro-batches: of all ranks in the trainer, of this rank in a user's own program."""
    seconds: float
    """Mean duration of one step."""
    data_seconds: float | None
    """Part of `seconds` spent on getting batches; None where it was not measured."""
    tokens: int
    """Tokens of all ranks and steps; 0 where they are not counted."""
    samples: int
    """Samples of this rank in all steps."""
    skipped: int = 0
    """Steps whose update was skipped."""
    steps: int = 1
    agrees: bool | None = None
    """Whether this rank's digest equals rank 0's; None where none was taken."""


@dataclass
class _Interval:
    """Sums since the last log line."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    """Operations of all ranks."""

    def add(self, report: StepReport, flops: float) -> None:
        self.steps += report.steps
        self.seconds += report.seconds * report.steps
        self.tokens += report.tokens
        self.flops += flops


@dataclass
class Reporter:
    """Publishes the reports of one rank; only rank 0 prints step lines."""

    launch: LaunchSpec
    rank: RankEnv
    channel: RankChannel
    metrics: WorkerMetrics
    progress: Progress
    log_every_steps: int = 10
    policy: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    history: HistoryWriter | None = None
    """Set on rank 0, once the engine is ready."""
    is_quiet: bool = False
    """Whether to leave the log to the user's program."""
    _interval: _Interval = field(default_factory=_Interval)
    reached: int = 0
    """Last step of earlier attempts; steps up to it are replayed."""
    engine: Engine | None = None
    """Set once the engine exists."""
    work: ComputeWork = field(default_factory=ComputeWork)
    """Set with the engine."""
    _metrics_at: float = 0.0
    _num_evaluated: int = 0
    _own_times: OwnTimes = field(init=False)

    def __post_init__(self) -> None:
        self._own_times = OwnTimes(self.launch.world_size)

    @classmethod
    def start(cls, launch: LaunchSpec, rank: RankEnv, channel: RankChannel) -> Reporter:
        """Return a reporter that has reported this rank as alive; `set_plan` follows when the job is read."""
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
        """Print a line of the log, on rank 0."""
        if self.rank.rank == 0 and not self.is_quiet:
            print(text, flush=True)

    def phase(self, phase: Phase) -> None:
        """Tell the launcher the present phase of this rank; hang limits depend on it."""
        self._publish(phase=phase)

    def set_plan(self, *, steps: int) -> None:
        """Publish the planned number of steps."""
        self.metrics.set("zerotrain_total_steps", steps)
        self._publish(total_steps=steps)

    def evaluated(self) -> None:
        """Publish that an evaluation goes on, now and then: a record for every pass would be many."""
        self._num_evaluated += 1
        if time.time() - self.progress.heartbeat_at >= EVALUATED_INTERVAL_S:
            self._publish(evaluated=self._num_evaluated)

    def ready(self, engine: Engine) -> None:
        """Publish the facts that are known once the engine exists."""
        self.engine, self.work = engine, ComputeWork.of(engine)
        engine.monitor.is_fed = True
        self.channel.attach_wait(lambda: engine.comm.waiting_seconds)
        self.metrics.add_facts(**measuring.facts_of(engine))
        measuring.set_plan_of_memory(self.metrics, engine)
        measuring.set_spill(self.metrics, engine)
        measuring.set_kernels(self.metrics, engine)
        self._publish()

    def resumed(self, result: LoadResult, *, seconds: float) -> None:
        """Publish that the run goes on from a checkpoint: this attempt does, unless it has taken steps
        before."""
        self.metrics.observe_resume(step=result.step, seconds=seconds, at=result.time)
        self.say(
            f"resumed from step {result.step}: {result.path} "
            f"(written by {result.world_size} ranks, read by {self.launch.world_size} in {seconds:.2f} s)"
        )
        if self.progress.step_at:  # it went back; the newest checkpoint stays the same
            self._publish(step=result.step)
        else:
            self._publish(
                step=result.step,
                resumed_from=result.step,
                resumed_job=result.job_uid,
                checkpoint=durable(result),
            )

    def rejected(self, checkpoints: tuple[RejectedCheckpoint, ...]) -> None:
        """Publish the damaged checkpoints that were skipped."""
        for item in checkpoints:
            self.say(f"checkpoint passed over: {item.path}: {item.reason}")
        self.metrics.set("zerotrain_checkpoint_rejected", len(checkpoints))
        self._publish(rejected_checkpoints=checkpoints)

    def saved(self, result: SaveResult) -> None:
        """Publish that a checkpoint is durable."""
        self.metrics.observe_checkpoint(step=result.step, seconds=result.seconds, num_bytes=result.num_bytes)
        removed = f", removed {len(result.removed)} older" if result.removed else ""
        self.say(
            f"checkpoint of step {result.step} is durable: {result.path} ({result.seconds:.2f} s{removed})"
        )
        if self.history is not None:
            self.history.add(
                event(
                    "checkpoint",
                    step=result.step,
                    seconds=result.seconds,
                    num_bytes=result.num_bytes,
                    text=result.path.name,
                )
            )
        self._publish(checkpoint=durable(result))

    def stood_still(self, seconds: float) -> None:
        """Record the time that training waited for a checkpoint."""
        if self.engine is not None:
            self.metrics.observe_stall(step=self.engine.global_steps, seconds=seconds)

    def step(self, report: StepReport, *, engine: Engine) -> None:
        """Publish a finished step: metrics and progress always, a log line once per interval."""
        result, self.engine = report.result, engine
        flops = self.work.flops(tokens=report.tokens, samples=report.samples)
        self._interval.add(report, flops)
        self._observe(report, engine, flops)
        peak = peak_memory_bytes()
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
            tokens_per_second=rate if interval.tokens else None,
            step_seconds=interval.seconds / interval.steps,
            step_flops=interval.flops / interval.steps if interval.flops else None,
            mfu=self.work.utilisation(interval.flops, interval.seconds),
            memory_peak_bytes=peak,
            host_peak_bytes=resident_peak_bytes(),
            spill_peak_bytes=engine.memory.peak_bytes(MemoryKind.SPILL),
            straggler=self._own_times.slowest,
        )
        engine.monitor.put(result.step, self._tracked(report, flops=flops))
        if self.history is not None:
            phases = measuring.phases_of(result.seconds, report.data_seconds)
            point = step_point(
                result,
                mean_loss=report.loss,
                seconds=report.seconds,
                tokens=report.tokens,
                phases=phases,
                engine=engine,
                progress=self.progress,
            )
            peak_flops = (self.work.peak or 0.0) * report.seconds * report.steps if flops else 0.0
            self.history.add(replace(point, flops=flops, peak_flops=peak_flops))
        # Not only at the multiples themselves: a program may report at 15, 25, 35.
        passed = result.step // self.log_every_steps - (result.step - report.steps) // self.log_every_steps
        if passed or result.step == self.progress.total_steps:
            self.say(step_line(self.progress, result))
            self._interval = _Interval()
            interval_s = expected_interval(self.policy, self.progress.step_seconds or 0.0)
            self.metrics.set("zerotrain_checkpoint_interval_seconds", interval_s)

    def _tracked(self, report: StepReport, *, flops: float) -> dict[str, float | None]:
        """Return the numbers of a step for trackers; None where one is not known."""
        seconds = report.seconds * report.steps
        return {
            **step_values(report.result),
            "train/loss": report.loss,
            "train/step_seconds": report.seconds,
            "train/samples_per_second": report.samples * self.work.world_size / seconds if seconds else None,
            "train/tokens_per_second": report.tokens / seconds if seconds and report.tokens else None,
            "train/mfu": self.work.utilisation(flops, seconds),
            "train/memory_peak_bytes": self.progress.memory_peak_bytes,
            "train/restarts": self.launch.attempt - 1,
        }

    def _observe(self, report: StepReport, engine: Engine, flops: float) -> None:
        """Record the step in the metrics; `flops` are those of all ranks and steps."""
        result, metrics = report.result, self.metrics
        metrics.observe_step(
            StepSample(
                step=result.step,
                seconds=report.seconds,
                loss=report.loss,
                grad_norm=result.grad_norm,
                loss_scale=result.loss_scale,
                learning_rate=result.lr,
                tokens=report.tokens // self.launch.world_size,
                samples=report.samples,
                skipped=report.skipped,
                replayed=result.step <= self.reached,
                wait_seconds=measuring.wait_of(result),
                background_seconds=result.seconds.get("optimizer_background", 0.0),
                phase_seconds=measuring.phases_of(result.seconds, report.data_seconds),
                step_flops=flops / report.steps / engine.world_size if flops else None,
                mfu=self.work.utilisation(flops, report.seconds * report.steps),
                steps=report.steps,
            )
        )
        if report.agrees is not None:
            metrics.observe_digest(step=result.step, is_equal=report.agrees)

    def failed(self) -> None:
        """Send the last numbers of a run that ends with an error."""
        if self.engine is not None:
            measuring.set_offload(self.metrics, self.engine)
            measuring.drain_collectives(self.metrics, self.engine)
            self.engine.monitor.close()
        self.channel.publish_metrics()

    def done(self) -> None:
        """Publish that the run is done."""
        self._metrics_at = 0.0  # send the last snapshot whatever the interval
        self._publish(phase=Phase.DONE)

    def _publish(self, **changes: object) -> None:
        self.progress = replace(self.progress, heartbeat_at=time.time(), **changes)  # type: ignore[arg-type]
        self.channel.publish(self.progress)
        now = time.monotonic()
        if now - self._metrics_at >= METRICS_INTERVAL_S:
            self._metrics_at = now
            if self.engine is not None and not self.engine.core.is_closed:
                measuring.measure(self.metrics, self.engine)
            self.channel.publish_metrics()


def durable(result: SaveResult | LoadResult) -> CheckpointProgress:
    """Return the progress record of a checkpoint that was committed or loaded."""
    if result.path is None:
        raise ValueError("no checkpoint was loaded, so none is known to be durable")
    return CheckpointProgress(step=result.step, path=str(result.path.absolute()), time=result.time)


def passed_over(result: LoadResult) -> tuple[RejectedCheckpoint, ...]:
    """Return the records of the damaged checkpoints that a load met."""
    return tuple(RejectedCheckpoint(path=str(path), reason=reason) for path, reason in result.rejected)


def step_line(progress: Progress, result: StepResult) -> str:
    """Return the log line of one interval; memory is this rank's peak."""
    skipped = " skipped" if result.skipped else ""
    return (
        f"step {progress.step}/{progress.total_steps} loss {progress.loss:.4f} "
        f"tokens/s {progress.tokens_per_second or 0:.0f} grad_norm {result.grad_norm:.3f} lr {result.lr:.3e} "
        f"step_s {progress.step_seconds:.3f} memory {progress.memory_peak_bytes / 2**20:.0f} MiB{skipped}"
    )


def expected_interval(policy: CheckpointPolicy, step_seconds: float) -> float:
    """Return the seconds between two checkpoints at this pace; 0 when the policy has none."""
    by_steps = policy.every_steps * step_seconds if policy.every_steps is not None else None
    known = [value for value in (by_steps, policy.every_seconds) if value is not None]
    return min(known, default=0.0)
