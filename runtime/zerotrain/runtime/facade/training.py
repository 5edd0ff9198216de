"""The training loop's part of an engine: forward and backward passes and the step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zerotrain.runtime.clock import StepClock
from zerotrain.runtime.facade.accumulation import Accumulation
from zerotrain.runtime.facade.arguments import OWN_LOSS, OWN_SCHEDULE, refuse_unless_default
from zerotrain.runtime.facade.checkpoints import EngineCheckpoints
from zerotrain.runtime.facade.entries import Entries
from zerotrain.runtime.facade.evaluation import check_trains
from zerotrain.runtime.facade.feeding import Feeding
from zerotrain.runtime.facade.state import EngineState
from zerotrain.runtime.facade.step_hooks import StepHooks
from zerotrain.runtime.notices import log_once
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.schedule import LrSchedule, Schedule
from zerotrain.runtime.refreeze import Relayout
from zerotrain.runtime.step import StepOutcome, StepPipeline, StepResult
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.sharded_model import ShardedModel, has_lost_spill
from zerotrain.runtime.zero.transforms import outside_inference_mode


@dataclass(kw_only=True)
class TrainingLoop:
    """Passes and steps of one engine, from the parts that they go through."""

    state: EngineState
    core: ShardedModel
    optimizer: ZeroOptimizer
    schedule: Schedule
    pipeline: StepPipeline
    clock: StepClock
    relayout: Relayout
    entries: Entries
    accumulation: Accumulation
    feeding: Feeding
    hooks: StepHooks
    checkpoints: EngineCheckpoints
    steps_schedule: bool = True
    """Whether `step` advances the schedule; else the script does."""
    _has_scaled: bool = False
    """Whether `scale` was called since the last step."""

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward pass."""
        self.core.check_open("a forward pass")
        self.state.observer.called(args, kwargs)
        began = self.clock.now()
        self.core.ledger.enter("forward")
        self.feeding.look_at_batch(args, kwargs)
        if self.core.model._compiled_call_impl is not None and not self.core.knows_compiler:
            raise RuntimeError(
                "the model was compiled after initialize(), whose hooks torch.compile cannot trace; set "
                "compile.enabled of the configuration, or call torch.compile (or module.compile()) on the "
                "model or its blocks before initialize()"
            )
        try:
            with self._autocast():
                output = self.core.model(*args, **kwargs)
        except BaseException as error:
            self.core.comm.note_error(error)
            raise
        self._settle_device()
        self.clock.add("forward", since=began)
        return output

    def backward(
        self, loss: torch.Tensor, *, retain_graph: bool, is_divided: bool, release_loss: bool
    ) -> torch.Tensor:
        """Accumulate the gradients of a loss, which `is_divided` by the accumulation steps; see
        `Engine.backward`."""
        refuse_unless_default("backward()", "release_loss", release_loss, False, OWN_LOSS)
        self.core.check_open("backward()")
        check_trains(self.core, "backward()")
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"loss must be a tensor with one element; got {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(
                f"loss must hold one element; got shape {tuple(loss.shape)}: reduce it, e.g. loss.mean()"
            )
        self.feeding.check_batch(loss)
        began = self.clock.now()
        self.core.ledger.enter("backward")
        begins = not self.core.has_gradients
        self.core.begin_backward()
        try:
            scaled = self._scaled(loss, is_divided=is_divided, begins=begins)
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException as error:
            self.entries.explain_backward(error)
            self.core.comm.note_error(error)
            self.core.is_torn = True
            if not has_lost_spill(self.core):  # else this rank stops here, and the others learn of it
                self.core.finish_backward()
            raise
        self.core.finish_backward()
        self._settle_device()
        self.clock.add("backward", since=began)
        weight = 1.0 / self.state.accumulation_steps if is_divided else 1.0
        self.state.observer.loss(loss.detach(), weight=weight)
        self.state.monitor.loss(loss.detach(), weight=weight)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call `backward()` on; see `Engine.scale`."""
        self._has_scaled = True
        loss = self.feeding.weighted(loss)
        scaler = self.pipeline.scaler
        return loss.float() * scaler.scale if scaler.is_active else loss  # in fp16 the product could overflow

    def check_scaled(self) -> None:
        """Raise RuntimeError where the caller's own `backward()` needs a scaled loss and got another; say
        once that it is not divided by the accumulation steps."""
        self.pipeline.division.settle(self.core.gradients.values())
        steps = self.state.accumulation_steps
        if steps > 1 and self.state.config.managed_gradient_accumulation and self.core.comm.rank == 0:
            log_once(
                f"gradient_accumulation_steps {steps}: backward() of a tensor divides nothing by it, "
                "engine.backward(loss) does; call that, or divide the loss in the script"
            )
        if self.pipeline.scaler.is_active and not self._has_scaled:
            raise RuntimeError(
                "fp16 gradients need a scaled loss: call engine.backward(loss), or scale(loss).backward() of "
                "the engine or of the sharded optimizer, instead of loss.backward()"
            )
        if self.feeding.batch_weight != 1.0 and not self._has_scaled:
            raise RuntimeError(
                'with uneven_inputs "join" losses are weighted: call engine.backward(loss), or '
                "scale(loss).backward() of the engine or of the sharded optimizer, instead of loss.backward()"
            )

    def before_pass(self) -> None:
        """Begin a forward pass with gradients; see `EngineCallbacks.before_pass`."""
        if self.core.model.training:  # else it may be an evaluation
            self.state.observer.training_pass()
        self.relayout.before_pass()

    def _settle_device(self) -> None:
        """Wait for the device at the end of a phase, with `wall_clock_breakdown` on CUDA."""
        device = self.core.comm.device
        if self.state.config.wall_clock_breakdown and device.type == "cuda":
            torch.cuda.synchronize(device)

    def _autocast(self) -> AbstractContextManager[object]:
        name = self.state.config.precision.autocast_dtype
        return torch.autocast(self.core.comm.device.type, TORCH_DTYPES[name]) if name else nullcontext()

    def _scaled(self, loss: torch.Tensor, *, is_divided: bool, begins: bool) -> torch.Tensor:
        """Return the loss that backward starts from: divided by the accumulation steps, times the fp16 loss
        scale."""
        steps = self.state.accumulation_steps if is_divided else None
        return self.pipeline.division.divide(self.scale(loss), steps, begins=begins)

    def zero_grad(self) -> None:
        """Drop the gradients since the last step boundary; see `Engine.zero_grad`."""
        self.core.check_open("zero_grad()")
        self.pipeline.drop_any()

    def step(self, lr_kwargs: Mapping[str, Any] | None) -> StepResult:
        """End a micro-batch; see `Engine.step`."""
        if torch.is_inference_mode_enabled():
            with outside_inference_mode():
                return self.step(lr_kwargs)
        refuse_unless_default("step()", "lr_kwargs", lr_kwargs or None, None, OWN_SCHEDULE)
        self.core.check_open("step()")
        check_trains(self.core, "step()")
        self.core.check_step()
        self.pipeline.settle()
        self.optimizer.check_groups()
        if self.accumulation.updates_now():
            self.hooks.run_before()
        self.state.is_at_boundary = self.accumulation.end_micro_batch()
        if not self.state.is_at_boundary:
            return StepResult(step=self.state.global_steps, at_boundary=False)
        self.relayout.before_step(is_checked=self.core.passes.is_checked)
        self.core.ledger.enter("step")
        self._has_scaled = False
        self.state.global_steps += 1
        outcome = self.pipeline.run(
            step=self.state.global_steps,
            stop=self.state.stop_requested,
            save_stage=self.checkpoints.save_stage,
        )
        self._count(outcome)
        self.state.stop_agreed = outcome.stop
        self._settle_device()
        self.clock.restart()
        self.state.last_step = outcome.result
        self.hooks.run_after(outcome.result)
        self.checkpoints.end_if_over(outcome.save_stages)
        return outcome.result

    def _count(self, outcome: StepOutcome) -> None:
        """Advance the schedule unless the step was skipped. Where the host does not know, the step counts
        until it does; a schedule that cannot go back waits."""
        late, steps = outcome.late, self.steps_schedule
        can_undo = isinstance(self.schedule, LrSchedule) or not steps
        if late is not None and late.may_skip and can_undo:
            late.undo = partial(self._undo, steps=steps)
        elif outcome.result.skipped:
            self.state.skipped_steps += 1
            return
        if steps:
            self.schedule.step()

    def _undo(self, *, steps: bool) -> None:
        """Count the last step as skipped after all; `steps`: the schedule was advanced for it."""
        self.state.known_skips += 1
        if steps and isinstance(self.schedule, LrSchedule):
            self.schedule.undo()
