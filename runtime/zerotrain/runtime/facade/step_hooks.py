"""Work around the steps of an engine: hooks, and log lines (`steps_per_print`, `wall_clock_breakdown`,
`memory_breakdown`)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from time import perf_counter

from torch.utils.hooks import RemovableHandle

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.facade.state import EngineState
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.torch_face import after_step, before_step
from zerotrain.runtime.step import StepPipeline, StepResult
from zerotrain.runtime.zero.sharded_model import ShardedModel

StepHook = Callable[[StepResult], None]

DEFAULT_INTERVAL = 10
"""Steps between lines where a breakdown is requested and `steps_per_print` is not set."""

PHASES = ("forward", "backward", "reduce", "optimizer", "gather")
"""Phases that do not overlap; the rest of a step is the caller's: data, logging."""


class StepHooks:
    """Hooks of optimizer and user before and after every step, and the log."""

    def __init__(
        self, state: EngineState, core: ShardedModel, optimizer: ZeroOptimizer, pipeline: StepPipeline
    ) -> None:
        self._state, self._core = state, core
        self._optimizer, self._pipeline = optimizer, pipeline
        self._before: OrderedDict[int, StepHook] = OrderedDict()
        self._after: OrderedDict[int, StepHook] = OrderedDict()
        self._log = StepLog(state.config)

    def register(self, hook: StepHook, *, before_update: bool) -> RemovableHandle:
        """Call `hook(result)` at every step boundary; see `Engine.register_step_hook`."""
        hooks = self._before if before_update else self._after
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def run_before(self) -> None:
        """Run the optimizer's and the user's hooks at the beginning of a boundary's step."""
        before_step(self._optimizer)
        if self._before:
            coming = StepResult(
                step=self._state.global_steps + 1,
                at_boundary=True,
                loss_scale=self._pipeline.scaler.scale,
                lr=self._optimizer.lr,
            )
            for hook in list(self._before.values()):
                hook(coming)

    def run_after(self, result: StepResult) -> None:
        """Count the samples of a step, print the lines that are due, and run the hooks."""
        after_step(self._optimizer)
        if self._core.writes.watch is not None:
            self._core.writes.watch.remember()
        samples = self._state.config.batch.train_batch_size
        self._state.global_samples += samples
        self._state.monitor.stepped(result, samples=samples)
        lines = self._log.add(
            result,
            samples=samples,
            skipped_steps=lambda: self._state.skipped_steps,
            phase_peaks=self._core.ledger.phase_peaks(),
        )
        if self._core.comm.rank == 0:
            for line in lines:
                print(line, flush=True)
        for hook in list(self._after.values()):
            hook(result)


class StepLog:
    """Collects the steps of an interval and writes its lines. Times are of this rank, means per step."""

    def __init__(self, config: EngineConfig) -> None:
        wants_breakdown = config.wall_clock_breakdown or config.memory_breakdown
        default = DEFAULT_INTERVAL if wants_breakdown else 0
        self._interval = default if config.steps_per_print is None else config.steps_per_print
        self._times = config.wall_clock_breakdown
        self._memory = config.memory_breakdown
        self._seconds: Counter[str] = Counter()
        self._num_steps = self._samples = 0
        self._began = perf_counter()

    def add(
        self,
        result: StepResult,
        *,
        samples: int,
        skipped_steps: Callable[[], int],
        phase_peaks: Mapping[str, int],
    ) -> list[str]:
        """Add a step of so many samples; return the lines to print now, if any. `skipped_steps` returns how
        many were skipped so far, and may wait for the device."""
        if not self._interval:
            return []
        self._num_steps += 1
        self._samples += samples
        self._seconds.update(result.seconds)
        if result.step % self._interval:
            return []
        lines = [self._step_line(result, skipped_steps())]
        if self._times:
            lines.append(self._times_line(result.step))
        if self._memory:
            peaks = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in phase_peaks.items())
            lines.append(f"zerotrain: step {result.step} memory, peak by phase: {peaks}")
        self._seconds.clear()
        self._num_steps = self._samples = 0
        self._began = perf_counter()
        return lines

    def _step_line(self, result: StepResult, skipped_steps: int) -> str:
        total = perf_counter() - self._began
        return (
            f"zerotrain: step {result.step} skipped {skipped_steps} lr {result.lr:.3e} "
            f"grad_norm {result.grad_norm:.4g} loss_scale {result.loss_scale:g} "
            f"step {_ms(total / self._num_steps)} samples/s {self._samples / total:.1f}"
        )

    def _times_line(self, step: int) -> str:
        mean = {name: total / self._num_steps for name, total in self._seconds.items()}
        phases = " | ".join(f"{name} {_ms(mean.get(name, 0.0))}" for name in PHASES)
        background = mean.get("optimizer_background", 0.0)
        background_text = f" | updates in the background {_ms(background)}" if background else ""
        return (
            f"zerotrain: step {step} times: {phases} | waited for collectives within them "
            f"{_ms(mean.get('wait', 0.0))}{background_text}"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
