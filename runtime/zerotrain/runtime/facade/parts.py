"""Makes the parts of an engine, and connects those that call each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.clock import StepClock
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.facade.accumulation import Accumulation
from zerotrain.runtime.facade.checkpoints import EngineCheckpoints
from zerotrain.runtime.facade.deepspeed_names import DeepSpeedNames
from zerotrain.runtime.facade.entries import Entries
from zerotrain.runtime.facade.export import Exports
from zerotrain.runtime.facade.feeding import Feeding
from zerotrain.runtime.facade.generation import SyncedGeneration
from zerotrain.runtime.facade.inspection import Inspection
from zerotrain.runtime.facade.module_names import ModuleNames
from zerotrain.runtime.facade.state import EngineState
from zerotrain.runtime.facade.step_hooks import StepHooks
from zerotrain.runtime.facade.training import TrainingLoop
from zerotrain.runtime.offload.updater import make_updater
from zerotrain.runtime.optim.joint import JointRule
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.schedule import Schedule
from zerotrain.runtime.optim.torch_face import EngineCalls
from zerotrain.runtime.refreeze import Relayout
from zerotrain.runtime.setup import build_core
from zerotrain.runtime.step import StepPipeline
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.options import EngineCallbacks

if TYPE_CHECKING:
    from zerotrain.runtime.data.epochs import EpochLoader


class EngineParts:
    """Parts of one engine; each gets by its constructor what it needs."""

    def __init__(
        self,
        module: nn.Module,
        config: EngineConfig,
        *,
        comm: Comm,
        optimizer: ZeroOptimizer,
        schedule: Schedule,
        plan: Callable[[], ModelLayout],
        loader: EpochLoader | None,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        """Make the parts, in an order in which each finds the others; see `Engine` for the arguments.
        Collective."""
        self._optimizer = optimizer
        self.state = state = EngineState(config=config)
        updater = make_updater(config, comm, is_elementwise=not isinstance(optimizer.rule, JointRule))
        self.core = core = build_core(
            module, config, optimizer, comm, callbacks=self._callbacks(), just_in_time=updater is not None
        )
        self.clock = StepClock(core.updates, comm)
        self.pipeline = StepPipeline(
            core, optimizer, comm=comm, config=config, clock=self.clock, updater=updater
        )
        state.settle = self.pipeline.settle
        self.relayout = Relayout(core, optimizer, plan)
        self.generation = SyncedGeneration(core)
        self.entries = Entries(core, config)
        self.accumulation = Accumulation(state, core)
        self.feeding = Feeding(state, comm, self.accumulation, loader)
        self.hooks = StepHooks(state, core, optimizer, self.pipeline)
        self.inspection = Inspection(state, core, optimizer)
        self.exports = Exports(core, optimizer, compute_dtype=config.precision.compute_dtype)
        self.checkpoints = EngineCheckpoints(
            state,
            core,
            optimizer=optimizer,
            schedule=schedule,
            pipeline=self.pipeline,
            clock=self.clock,
            feeding=self.feeding,
        )
        self.loop = self._training_loop(schedule)
        self.names = DeepSpeedNames(
            state,
            core,
            optimizer=optimizer,
            pipeline=self.pipeline,
            exports=self.exports,
            collate_fn=collate_fn,
        )
        self.module_names = ModuleNames(module)
        # Not by its constructor: `initialize` makes the optimizer first, since the schedule needs its groups.
        optimizer.calls = self._engine_calls()

    def _training_loop(self, schedule: Schedule) -> TrainingLoop:
        return TrainingLoop(
            state=self.state,
            core=self.core,
            optimizer=self._optimizer,
            schedule=schedule,
            pipeline=self.pipeline,
            clock=self.clock,
            relayout=self.relayout,
            entries=self.entries,
            accumulation=self.accumulation,
            feeding=self.feeding,
            hooks=self.hooks,
            checkpoints=self.checkpoints,
        )

    def _callbacks(self) -> EngineCallbacks:
        """Return what the sharded model calls. The parts that need the model are made after it, so each call
        looks them up."""
        optimizer = self._optimizer
        return EngineCallbacks(
            on_unit_made=optimizer.make_states,
            on_weights_written=optimizer.take_weights,
            on_entry=lambda *call: self.entries.enter(*call),
            before_pass=lambda: self.loop.before_pass(),
            on_evaluation=lambda: self.state.observer.evaluation_pass(),
            check_places=lambda: self.relayout.check_places(),
            takes_gradients=lambda: self.relayout.note_backward(),
            on_own_backward=lambda: self.loop.check_scaled(),
            on_first_backward=optimizer.registry.make_deferred,
            on_new_gradients=lambda: self.state.observer.training_pass(),
            at_boundary=lambda: self.accumulation.reduces_now(),
            keeps_local=lambda: optimizer.is_local,
            gradient_scale=lambda: self.pipeline.gradient_scale,
            close=lambda: self.close(),
        )

    def _engine_calls(self) -> EngineCalls:
        """Return what the optimizer calls."""
        return EngineCalls(
            drop_gradients=self.loop.zero_grad,
            backward=partial(self.loop.backward, is_divided=False, release_loss=False),
            loss_scale=lambda: self.pipeline.scaler.scale,
            settle=self.pipeline.settle,
            was_skipped=lambda: self.state.last_step is not None and self.state.last_step.skipped,
        )

    def close(self) -> None:
        """End what runs in the background, remove the hooks and leave the process groups; see
        `Engine.close`."""
        if self.core.is_closed:
            return
        try:
            self.core.updates.settle_all()
            self.pipeline.settle()
            self.checkpoints.close()  # not after a failed update: the other ranks do not get here then
            self.state.observer.closing()
        finally:
            self.state.monitor.close()
            self.pipeline.executor.close()
            self.entries.detach()
            self.generation.detach()
            self.core.close()
            self.core.comm.close()
