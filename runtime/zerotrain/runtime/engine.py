"""The engine: the object that `zerotrain.runtime.initialize` returns and that training scripts call.

It orchestrates; the work is in `zero` (sharding), `comm` (collectives), `optim` (updates) and `step` (the
boundary).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.clock import StepClock
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.facade.accumulation import Accumulation
from zerotrain.runtime.facade.arguments import Arguments, ConfigSource, taking
from zerotrain.runtime.facade.checkpoints import Checkpoints
from zerotrain.runtime.facade.deepspeed_names import (
    OWN_LOSS,
    OWN_SCHEDULE,
    DeepSpeedNames,
    refuse_unless_default,
)
from zerotrain.runtime.facade.entries import Entries
from zerotrain.runtime.facade.evaluation import Evaluation, for_evaluation, optimizer_of, trains_on_ranks
from zerotrain.runtime.facade.export import Exports
from zerotrain.runtime.facade.generation import SyncedGeneration
from zerotrain.runtime.facade.inspection import Inspection
from zerotrain.runtime.facade.module_names import ModuleNames
from zerotrain.runtime.facade.names import ConfigNames, StateNames
from zerotrain.runtime.notices import log_gradient_access, log_notices
from zerotrain.runtime.offload.updater import make_updater
from zerotrain.runtime.optim.joint import JointRule
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.schedule import Schedule
from zerotrain.runtime.optim.user_optimizer import make_optimizer, make_schedule
from zerotrain.runtime.refreeze import Relayout
from zerotrain.runtime.setup import (
    build_core,
    build_loader,
    check_model,
    configure_activations,
    join_ranks,
    make_layout,
    read_config,
    settle_encoding,
)
from zerotrain.runtime.step import StepPipeline, StepResult
from zerotrain.runtime.zero.buffer import return_free_memory
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.sharded_model import has_lost_spill
from zerotrain.runtime.zero.torch_calls import serve


class Engine(
    Accumulation,
    Checkpoints,
    Evaluation,
    Exports,
    Inspection,
    ConfigNames,
    StateNames,
    DeepSpeedNames,
    ModuleNames,
):
    """A model in training, or in evaluation only where every parameter is frozen. Made by `initialize`; all
    ranks call every method in the same order.

    Attributes:
        module: the user's model; its parameters are partitioned as configured.
        config, rank, world_size, device: the resolved configuration, rank, number of ranks and device.
        comm: collectives with `timings` (finished ones, for metrics) and `bytes_sent`.
        memory: exact bytes of every buffer that the engine holds, by kind.
        global_steps, skipped_steps: step boundaries so far, and those whose gradient was not finite.
        micro_steps: micro-batches so far.
        last_step: result of the last boundary, None before the first.
        last_load: what `load_checkpoint` found, None before.
        stop_agreed: whether a rank asked to stop before the last boundary; the same on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        config: EngineConfig,
        *,
        comm: Comm,
        optimizer: ZeroOptimizer,
        schedule: Schedule,
        plan: Callable[[], ModelLayout],
    ) -> None:
        """`schedule` may be a constant one, made where none was given; `plan` lays the model out as it is
        when called."""
        self.module = module
        self.config = config
        self.comm = comm
        self.rank, self.world_size, self.device = comm.rank, comm.world_size, comm.device
        self.zero_optimizer = optimizer
        self.schedule = schedule
        updater = make_updater(config, comm, is_elementwise=not isinstance(optimizer.rule, JointRule))
        self.core = build_core(module, config, optimizer, comm, just_in_time=updater is not None)
        self.memory = self.core.ledger
        self.optimizer = optimizer_of(self)
        optimizer.attach(self.core)
        optimizer.drop_gradients = self.zero_grad
        optimizer.run_backward = partial(self.backward, scale_wrt_gas=False)
        serve(self.core)
        optimizer.read_loss_scale = self.loss_scale
        optimizer.read_skipped = lambda: self.last_step is not None and self.last_step.skipped
        return_free_memory()  # held by the model's own tensors before
        self.global_steps = 0
        self.skipped_steps = 0
        self.last_step = None
        self.last_load = None
        self.stop_agreed = False
        self._stop_requested = False
        self._claimed: set[Path] = set()
        self.micro_steps = self.step_calls = 0
        self.clock = StepClock(self.core.updates, comm)
        self.pipeline = StepPipeline(
            self.core, optimizer, comm=comm, config=config, clock=self.clock, updater=updater
        )
        self._has_scaled = False
        if not self.is_evaluation_only:
            self.core.on_own_backward = self._check_scaled
        self.core.at_boundary = self.reduces_now
        self.relayout = Relayout(self.core, optimizer, plan)
        self.core.before_pass = self._before_pass
        self.core.takes_gradients = self.relayout.note_backward
        self._generation = SyncedGeneration(self.core)
        self._entries = Entries(self.core, config)
        self.core.on_new_gradients = lambda: self.observer.training_pass()
        self._begin_inspection()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""
        self.check_open("a forward pass")
        began = self.clock.now()
        self.memory.enter("forward")
        self.look_at_batch(args, kwargs)
        if self.module._compiled_call_impl is not None and not self.core.knows_compiler:
            raise RuntimeError(
                "the model was compiled after initialize(), whose hooks torch.compile cannot trace; call "
                "torch.compile (or module.compile()) on the model or its blocks before initialize()"
            )
        try:
            with self._autocast():
                output = self.module(*args, **kwargs)
        except BaseException as error:
            self.comm.note_error(error)
            raise
        self._settle_device()
        self.clock.add("forward", since=began)
        return output

    def backward(
        self,
        loss: torch.Tensor,
        *,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        release_loss: bool = False,
    ) -> torch.Tensor:
        """Accumulate the gradients of a scalar loss, divided by the accumulation steps; return the loss.

        May be called several times before `step()`; `scale_wrt_gas=False` does not divide. When it raises,
        `step()` raises until `zero_grad()` is called, because a part of the gradients is already accumulated.
        Raises ValueError for a loss that is not a scalar, and for `release_loss`.
        """
        refuse_unless_default("backward()", "release_loss", release_loss, False, OWN_LOSS)
        self.check_open("backward()")
        self.check_trains("backward()")
        if loss.numel() != 1:
            raise ValueError(
                f"loss must hold one element; got shape {tuple(loss.shape)}: reduce it, e.g. loss.mean()"
            )
        self.check_batch(loss)
        began = self.clock.now()
        self.memory.enter("backward")
        begins = not self.core.has_gradients
        self.core.begin_backward()
        try:
            scaled = self._scaled(loss, divided=scale_wrt_gas, begins=begins)
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException as error:
            self._entries.explain_backward(error)
            self.comm.note_error(error)
            self.core.is_torn = True
            if not has_lost_spill(self.core):  # else this rank stops here, and the others learn of it
                self.core.finish_backward()
            raise
        self.core.finish_backward()
        self._settle_device()
        self.clock.add("backward", since=began)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the fp16 loss scale and the batch's weight; call `backward()` on it instead
        of `engine.backward`.

        Return the loss itself where nothing is scaled. It is not divided by the accumulation steps.
        """
        self._has_scaled = True
        loss = self.weighted(loss)
        scaler = self.pipeline.scaler
        return loss.float() * scaler.scale if scaler.is_active else loss  # in fp16 the product could overflow

    def _check_scaled(self) -> None:
        self.pipeline.division.settle(self.core.gradients.values())
        if self.pipeline.scaler.is_active and not self._has_scaled:
            raise RuntimeError(
                "fp16 gradients need a scaled loss: call engine.backward(loss), or scale(loss).backward() of "
                "the engine or of the sharded optimizer, instead of loss.backward()"
            )
        if self.batch_weight != 1.0 and not self._has_scaled:
            raise RuntimeError(
                'with uneven_inputs "join" losses are weighted: call engine.backward(loss), or '
                "scale(loss).backward() of the engine or of the sharded optimizer, instead of loss.backward()"
            )

    def _before_pass(self) -> None:
        if self.module.training:  # else it may be an evaluation
            self.observer.training_pass()
        self.relayout.before_pass()

    def _autocast(self) -> AbstractContextManager[object]:
        name = self.config.precision.autocast_dtype
        return torch.autocast(self.device.type, TORCH_DTYPES[name]) if name else nullcontext()

    def _scaled(self, loss: torch.Tensor, *, divided: bool, begins: bool) -> torch.Tensor:
        """Return the loss that backward starts from: divided by the accumulation steps, times the fp16 loss
        scale."""
        steps = self.config.batch.gradient_accumulation_steps if divided else None
        return self.pipeline.division.divide(self.scale(loss), steps, begins=begins)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepResult:
        """End a micro-batch; at the accumulation boundary, clip, update and clear the gradients.

        Under `offload_optimizer.just_in_time` it returns when the clip factor is known. The units are then
        updated in the background with the present hyperparameters: changing a learning rate afterwards
        affects the next step. Code that uses weights or states waits for the update; see `synchronize`.

        Raises CommError when the ranks have diverged (they issued different collectives), CheckpointError
        when a checkpoint in the background failed (the step itself is done then), RuntimeError after a
        backward pass that raised, within `full_parameters` and after `close`, ValueError for `lr_kwargs`.
        """
        refuse_unless_default("step()", "lr_kwargs", lr_kwargs or None, None, OWN_SCHEDULE)
        self.check_open("step()")
        self.check_trains("step()")
        self.core.check_step()
        self.zero_optimizer.check_groups()
        if self.is_gradient_accumulation_boundary() and not self._in_no_sync:
            self._before_update()
        if not self.end_micro_batch():
            return StepResult(step=self.global_steps, at_boundary=False)
        self.relayout.before_step(is_checked=self.core.passes.is_checked)
        self.memory.enter("step")
        self._has_scaled = False
        self.global_steps += 1
        outcome = self.pipeline.run(
            step=self.global_steps, stop=self._stop_requested, save_stage=self.save_stage
        )
        if outcome.result.skipped:
            self.skipped_steps += 1
        else:
            self.schedule.step()
        self.stop_agreed = outcome.stop
        self._settle_device()
        self.clock.restart()
        self.last_step = outcome.result
        self._after_step(outcome.result)
        self.handle_saves(outcome.save_stages)
        return outcome.result

    def request_stop(self) -> None:
        """Ask all ranks to stop after the next step boundary; safe to call from a signal handler."""
        self._stop_requested = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all micro-batches since the last step boundary; the count of micro-batches
        goes on.

        `step()` also clears them. Call this on every rank to leave a batch out, or after a backward pass that
        raised.
        """
        self.check_open("zero_grad()")
        self.pipeline.drop_any()

    def train(self, mode: bool = True) -> Engine:
        """Set the model's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the model's evaluation mode."""
        return self.train(False)

    def close(self) -> None:
        """Wait for an update and a checkpoint in the background, remove the hooks and leave the process
        groups that `initialize` made. Raises the errors of that update and checkpoint.

        Sharded weights stay sharded, and every operation that needs the other ranks raises RuntimeError from
        then on. A second `close` does nothing.
        """
        if self.core.is_closed:
            return
        try:
            self.synchronize()
            self.end_saves()  # not after a failed update: the other ranks do not get here then
            self.observer.closing()
        finally:
            self.pipeline.executor.close()
            self.zero_optimizer.registry.tiers.close()
            self._entries.detach()
            self._generation.detach()
            self.core.close()
            self.comm.close()


@taking(Arguments)
def initialize(asked: Arguments) -> tuple[Engine, ZeroOptimizer, DataLoader[Any] | None, Schedule | None]:
    """Take a model over for training on all ranks: `(engine, optimizer, loader, scheduler)`. Collective.

    The arguments are those of DeepSpeed, in its order, and `unit_modules`; pass them by keyword. `model` and
    a configuration are required.

    Args:
        args: an object whose `deepspeed_config` names the configuration, where `config` does not.
        model: built normally on every rank (rank 0's values are used) or on the meta device within
            `init_context`. It moves to this rank's device.
        optimizer, lr_scheduler: torch's, or functions that make them; None = as configured. Where neither
            gives a schedule, the fourth value is None and every group keeps its rate.
        model_parameters: parameters, (name, parameter) pairs or parameter groups as for a torch optimizer;
            None = all trainable ones.
        training_data: a map-style or iterable data set; the loader gives each rank its part in micro-batches,
            in a new order in every epoch. None = no loader.
        distributed_port: port of the rendezvous, where the environment sets no MASTER_PORT.
        mpu: object with the groups of tensor parallelism, like Megatron's.
        dist_init_required: False = the process group must exist already.
        collate_fn: for the loader.
        config: DeepSpeed-style JSON as a file, text or mapping, or already resolved.
        config_params: the older name of `config`.
        unit_modules: names or classes of the modules that are gathered as a whole; None = found by rule
            (`zero/plan.py`).

    Raises ConfigError when the configuration is wrong or asks for what this version does not run, LayoutError
    when the model cannot be laid out, GroupError for wrong parameter groups.

    The method is ZeRO, https://arxiv.org/abs/1910.02054, with one flat buffer per unit.
    """
    model, source = asked.require_model(), asked.config_source()
    asked.apply_port()
    comm = join_ranks(asked.mpu)
    try:
        return _take_over(model, source, asked, comm)
    except BaseException as error:
        comm.note_error(error)
        comm.close()
        raise


def _take_over(
    model: nn.Module, source: ConfigSource, asked: Arguments, comm: Comm
) -> tuple[Engine, ZeroOptimizer, DataLoader[Any] | None, Schedule | None]:
    """Do the part of `initialize` that follows the making of the process groups."""
    supplied = () if asked.mpu is None else ("mpu",)
    resolved = read_config(source, world_size=comm.world_size, model=model, supplied=supplied)
    log_notices(resolved, source, comm)
    configure_activations(resolved, asked.mpu)
    check_model(model)
    if not trains_on_ranks(model, comm):
        resolved, asked = for_evaluation(resolved, asked)
    plan = partial(make_layout, model, resolved, asked.unit_modules)
    optimizer = make_optimizer(
        model, plan(), resolved, optimizer=asked.optimizer, model_parameters=asked.model_parameters
    )
    resolved = settle_encoding(resolved, optimizer)
    schedule = make_schedule(optimizer, resolved, asked.lr_scheduler)
    loader = build_loader(asked.training_data, resolved, comm, asked.collate_fn)
    engine = Engine(model, resolved, comm=comm, optimizer=optimizer, schedule=schedule, plan=plan)
    log_gradient_access(resolved, engine.core, comm)
    engine.follow_loader(loader)
    return engine, engine.optimizer, loader, engine.scheduler
