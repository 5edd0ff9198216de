"""The engine: the object that `zerotrain.runtime.initialize` returns and that training scripts call.

Its methods call its parts: `facade` has those beside the model, `zero` the sharding, `comm` the collectives,
`optim` the updates and `step` the boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.comm.group import Comm, is_device
from zerotrain.runtime.facade.deepspeed_names import DeepSpeedNames, public_names
from zerotrain.runtime.facade.evaluation import optimizer_of
from zerotrain.runtime.facade.memory import MemoryStatus, OffloadTotals
from zerotrain.runtime.facade.missing_names import unknown_attribute
from zerotrain.runtime.facade.module_names import ModuleNames
from zerotrain.runtime.facade.observer import EngineObserver
from zerotrain.runtime.facade.parts import EngineParts
from zerotrain.runtime.facade.state import StateValue
from zerotrain.runtime.facade.step_hooks import StepHook
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.schedule import Schedule, is_constant
from zerotrain.runtime.snapshot import LoadChoice
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.state import CheckpointState

if TYPE_CHECKING:
    from zerotrain.runtime.checkpoint import LoadResult, SaveResult
    from zerotrain.runtime.data.epochs import EpochLoader
    from zerotrain.runtime.spill.probe import VolumeSpace
    from zerotrain.runtime.spill.store import SpillInfo

    class Names(DeepSpeedNames, ModuleNames):
        """Names that `Engine.__getattr__` finds, for type checkers."""
else:
    Names = object


class Engine(Names):
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
        saves_drop_gradients: whether a save inside gradient accumulation leaves the gradients out, as
            DeepSpeed's does, instead of raising RuntimeError; False unless it is set, on every rank.
    """

    config: StateValue[EngineConfig] = StateValue()
    observer: StateValue[EngineObserver] = StateValue()
    global_steps: StateValue[int] = StateValue()
    skipped_steps: StateValue[int] = StateValue()
    global_samples: StateValue[int] = StateValue()
    micro_steps: StateValue[int] = StateValue()
    step_calls: StateValue[int] = StateValue()
    last_step: StateValue[StepResult | None] = StateValue()
    last_load: StateValue[LoadResult | None] = StateValue()
    last_save: StateValue[SaveResult | None] = StateValue()
    stop_agreed: StateValue[bool] = StateValue()
    saves_drop_gradients: StateValue[bool] = StateValue()

    def __init__(
        self,
        module: nn.Module,
        config: EngineConfig,
        *,
        comm: Comm,
        optimizer: ZeroOptimizer,
        schedule: Schedule,
        plan: Callable[[], ModelLayout],
        loader: EpochLoader | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """`schedule` may be a constant one, made where none was given; `plan` lays the model out as it is
        when called; `collate_fn` is that of loaders which `deepspeed_io` makes."""
        self._parts = EngineParts(
            module,
            config,
            comm=comm,
            optimizer=optimizer,
            schedule=schedule,
            plan=plan,
            loader=loader,
            collate_fn=collate_fn,
        )
        self._state, self.core = self._parts.state, self._parts.core
        self.module, self.comm, self.memory = module, comm, self.core.ledger
        self.rank, self.world_size, self.device = comm.rank, comm.world_size, comm.device
        self.zero_optimizer, self.schedule = optimizer, schedule
        self.optimizer = optimizer_of(self.core, optimizer)
        self.pipeline, self.clock = self._parts.pipeline, self._parts.clock
        self.relayout = self._parts.relayout

    # --- training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""
        return self._parts.loop.forward(args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass, as a call of the engine does."""
        return self._parts.loop.forward(args, kwargs)

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
        return self._parts.loop.backward(
            loss, retain_graph=retain_graph, is_divided=scale_wrt_gas, release_loss=release_loss
        )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the fp16 loss scale and the batch's weight; call `backward()` on it instead
        of `engine.backward`.

        Return the loss itself where nothing is scaled. It is not divided by the accumulation steps.
        """
        return self._parts.loop.scale(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepResult:
        """End a micro-batch; at the accumulation boundary, clip, update and clear the gradients.

        Under `offload_optimizer.just_in_time` it returns when the clip factor is known. The units are then
        updated in the background with the present hyperparameters: changing a learning rate afterwards
        affects the next step. Code that uses weights or states waits for the update; see `synchronize`.

        On a GPU it may return before the device knows the norm; reading it from the result then waits.

        Raises CommError when the ranks have diverged (they issued different collectives), CheckpointError
        when a checkpoint in the background failed (the step itself is done then), LossScaleError (on a GPU
        perhaps in the next pass), RuntimeError after a backward pass that raised, within `full_parameters`
        and after `close`, ValueError for `lr_kwargs`.
        """
        return self._parts.loop.step(lr_kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all micro-batches since the last step boundary; the count of micro-batches
        goes on.

        `step()` also clears them. Call this on every rank to leave a batch out, or after a backward pass that
        raised.
        """
        self._parts.loop.zero_grad()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the `step()` that belongs to the current micro-batch updates the weights."""
        return self._parts.accumulation.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set before a forward pass whether its `step()` updates, instead of counting micro-batches; None =
        count.

        With False, `step()` need not be called after each backward pass. `backward` divides losses by
        `gradient_accumulation_steps` in any case.
        """
        self._parts.accumulation.set_boundary(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Make backward passes within accumulate gradients on this rank; the next `step()` outside reduces
        them.

        Micro-batches are not counted and `step()` raises RuntimeError within, as in DeepSpeed. Raises
        RuntimeError at stages 2 and 3, where a rank keeps no memory for whole gradients, and when nested.
        """
        return self._parts.accumulation.no_sync()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step by changing the accumulation steps, from the next step on.

        Raises ValueError unless it is a multiple of micro batch size times ranks, RuntimeError between the
        micro-batches of a step.
        """
        self._parts.accumulation.set_train_batch_size(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Declare another number of samples per forward pass; the accumulation steps stay.

        A loader that `initialize` made keeps its size. Raises ValueError below 1, RuntimeError between the
        micro-batches of a step.
        """
        self._parts.accumulation.set_micro_batch_size(micro_batch_size)

    def request_stop(self) -> None:
        """Ask all ranks to stop after the next step boundary; safe to call from a signal handler."""
        self._state.stop_requested = True

    def train(self, mode: bool = True) -> Engine:
        """Set the model's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the model's evaluation mode."""
        return self.train(False)

    def to(self, *args: Any, **kwargs: Any) -> Engine:
        """Return the engine, which is on its device already. For another device or a dtype the model's own
        `to` is called, after which nothing can be trained."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if not (device is None or is_device(device, self.device)) or dtype is not None:
            self.module.to(*args, **kwargs)
        return self

    def synchronize(self) -> None:
        """Wait for the update in the background, and bring weights on every rank up to date.

        Collective: call it on every rank. It does nothing where no update is running. Afterwards weights and
        states may be read on one rank alone, until the next `step`. Raises the error of the update. That
        error is final, as weights and states may then be of different steps: every later call raises it
        again, and nothing can be saved.
        """
        self.core.updates.settle_all()

    def close(self) -> None:
        """Wait for an update and a checkpoint in the background, remove the hooks and leave the process
        groups that `initialize` made. Raises the errors of that update and checkpoint.

        Sharded weights stay sharded, and every operation that needs the other ranks raises RuntimeError from
        then on. A second `close` does nothing.
        """
        self._parts.close()

    def destroy(self) -> None:
        """Close the engine, as `close` does."""
        self.close()

    # --- batches

    @property
    def training_dataloader(self) -> EpochLoader | None:
        """The third value that `initialize` returns."""
        return self._parts.feeding.loader

    def join(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterate over this rank's batches until every rank has had all of its own. Collective.

        With `uneven_inputs` "join" a rank without data goes on with its last batch at weight zero, and every
        batch is weighted by its samples: `engine.batch_weight`. Otherwise the batches are returned unchanged.
        The loader that `initialize` returns is joined already.

        Train each batch, up to `step()`, before the next one is taken. Raises RuntimeError otherwise, and
        ValueError on every rank when a rank has no batch at all.
        """
        return self._parts.feeding.join(batches)

    @property
    def batch_weight(self) -> float:
        """Factor on the loss of the current batch: 1 unless the ranks' batches differ in size or number."""
        return self._parts.feeding.batch_weight

    # --- checkpoints and weights

    def checkpoint_state(self) -> CheckpointState:
        """Return this rank's part of the training state; its streams are the engine's own state, not copies.

        Collective where an update runs in the background: the call waits for it, and raises its error. Raises
        RuntimeError inside gradient accumulation, where gradients would be lost, and after `close`.
        """
        return self._parts.checkpoints.state()

    def after_state_load(self, state: CheckpointState, choice: LoadChoice | None = None) -> None:
        """Apply a state that was overwritten in place. Collective.

        Raises CheckpointMismatch where a checkpoint has other parameter groups, or another kind of schedule.
        """
        self._parts.checkpoints.apply(state, choice)

    def claim_checkpoints(self, directory: Path | str) -> None:
        """Make this attempt the folder's owner, once per folder; the first save does it too. Collective.

        Older attempts cannot commit there any more. Raises CheckpointFenced, CheckpointNotWritable.
        """
        self._parts.checkpoints.claim(directory)

    def save_checkpoint(
        self,
        save_dir: Path | str,
        tag: str | float | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep_last: int | None = None,
        asynchronous: bool | None = None,
    ) -> SaveResult:
        """Write a checkpoint that any number of ranks can load. Collective, at a step boundary.

        Args:
            save_dir: folder of the run's checkpoints; all ranks see the same one.
            tag: name of the checkpoint, or a number; None = by step. `keep_last` never removes tagged ones.
            client_state: the caller's own values, a dictionary of numbers, texts, bytes, None, tensors, numpy
                arrays and numbers, and lists, tuples, sets and dictionaries of them; loading returns them
                with their types and keys. Rank 0's are stored.
            save_latest: whether loading without a tag may find it.
            exclude_frozen_parameters: leave them out; load with `load_module_strict=False` then.
            keep_last: how many checkpoints without a tag are kept; None = all.
            asynchronous: copy the state to host memory (kept until `close`) and return; a thread writes the
                copy while training goes on (`durable` is False in the result). None = as configured
                (`checkpoint.writer.decoupled`). States on nvme are not copied to memory, which cannot hold
                them: they are written before the call returns, and `durable` is True.

        An error of the background save is raised by the next `step`, `save_checkpoint`, `load_checkpoint`,
        `wait_for_checkpoint` or `close`, as the same error on every rank. Raises RuntimeError inside gradient
        accumulation, CheckpointNoSpace, CheckpointNotWritable, CheckpointFenced, CheckpointError (before
        anything is written, for a value that cannot be stored), CommError where a rank makes another call,
        OutsideWrite, on every rank, where ranks wrote different values into weights.
        """
        return self._parts.checkpoints.save(
            save_dir,
            tag,
            client_state,
            save_latest,
            exclude_frozen_parameters,
            keep_last=keep_last,
            asynchronous=asynchronous,
        )

    def wait_for_checkpoint(self) -> SaveResult | None:
        """Wait until the save in the background is durable. Collective. None when there is none.

        Raises the errors of the save: see `save_checkpoint`.
        """
        return self._parts.checkpoints.wait()

    def load_checkpoint(
        self,
        load_dir: Path | str,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Load the newest whole checkpoint (or `tag`): `(its path, client state)`; `(None, {})` if there is
        none. Collective. `load_dir` may also be a folder that DeepSpeed wrote (stages 1 to 3).

        Args:
            load_dir, tag: as given to `save_checkpoint`.
            load_module_strict: False = parameters and buffers that the checkpoint lacks keep their values,
                those that the model lacks are ignored, and floating buffers may be stored in another
                floating dtype. Shapes must agree in any case.
            load_optimizer_states: False = weights only; moments, rates and loss scale stay.
            load_lr_scheduler_states: False = the schedule goes on from its present state. Where nothing is
                trained, neither states nor schedule are loaded.
            load_module_only: weights and buffers only; steps and random generators stay too.
            custom_load_fn: must be None; weights are read in place, by interval.

        Details, such as damaged checkpoints that were skipped, are in `last_load`. Raises RuntimeError inside
        gradient accumulation, CheckpointDamaged, CheckpointMismatch, CheckpointError; if not strict,
        OutsideWrite where ranks wrote different values into weights, which may stay.
        """
        return self._parts.checkpoints.load(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )

    def module_state_dict(self, *, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the model's state dict as copies in host memory, on every rank, with the plain model's names
        (without the parts that torch.compile and checkpoint_wrapper add). Collective.

        Values are in the compute precision, and tied weights are one tensor under several names. Units are
        gathered one after the other. `get_full_fp32` reads masters, `save_16bit_model` writes files without
        holding the whole model.

        Args:
            exclude_frozen_parameters: leave out parameters that are not trained, and gather none of them;
                those of PEFT adapters are kept, trained or not, so that
                `model.save_pretrained(folder, state_dict=...)` has all of the adapter.

        Raises RuntimeError in forward and backward and after `close`, OutsideWrite, on every rank, when ranks
        wrote different values.
        """
        return self._parts.exports.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: Path | str,
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
        *,
        dtype: str | None = None,
        max_shard_size: int | str = "5GB",
    ) -> Path:
        """Write the weights as safetensors, with `config.json` where it is known; return the folder.
        Collective.

        Every rank writes the part that it owns, tile by tile: nothing is gathered, at any stage. Tied
        parameters are stored once. The new weights replace older ones in the folder atomically; other files
        are kept.

        Args:
            save_dir: folder, made if need be; all ranks must see it.
            save_filename: name of the file when there is one; only `*.safetensors` is used, since others
                (DeepSpeed's `pytorch_model.bin`) would be pickles.
            exclude_frozen_parameters: store only trained parameters; of a PEFT model also all adapters, as
                `PeftModel.from_pretrained` reads them: they are gathered for it, the base is not.
            dtype: "bf16", "fp16" or "fp32", of all floating-point parameters; None = the compute precision,
                and frozen ones as they are stored.
            max_shard_size: bytes of tensors in one file, as a number or a text such as "5GB".

        Raises ValueError for a wrong argument, CheckpointNoSpace or CheckpointNotWritable when the folder
        cannot be written, and OutsideWrite when ranks wrote different values, the same on every rank.
        """
        return self._parts.exports.save_16bit_model(
            save_dir, save_filename, exclude_frozen_parameters, dtype=dtype, max_shard_size=max_shard_size
        )

    # --- inspection

    def memory_status(self) -> MemoryStatus:
        """Return this rank's memory: buffers by kind and tier, peaks by phase, the planned sizes, process,
        device."""
        return self._parts.inspection.memory_status()

    def offload_totals(self) -> OffloadTotals:
        """Return the totals of offloading so far on this rank, without those of `probe_spill`. It does not
        wait for transfers in progress, and works also after the spill was lost."""
        return self._parts.inspection.offload_totals()

    def probe_spill(self) -> float | None:
        """Return the bytes per second of a pass over a part of the spill file at the drive's present speed;
        None where no optimizer state is spilled. Takes up to a second on a slow drive. Do not call it while
        an update is running. It makes states that the first backward pass would otherwise make."""
        return self._parts.inspection.probe_spill()

    def spill_space(self) -> VolumeSpace | None:
        """Return free space and size of the spill file's volumes; None without a spill."""
        return self._parts.inspection.spill_space()

    @property
    def spill_info(self) -> SpillInfo | None:
        """Properties of this rank's spill file: I/O engine, encryption, folders, reasons. None without one,
        also where the configuration names a drive and nothing is spilled there."""
        return self._parts.inspection.spill_info

    def register_step_hook(self, hook: StepHook, *, before_update: bool = False) -> RemovableHandle:
        """Call `hook(result)` after every step boundary, skipped ones included; `handle.remove()` ends it.

        Hooks run in the order of their registration, when the step is complete: they may save, evaluate or
        read states. With `before_update` they run when the step begins and nothing has changed yet:
        `get_full_grad` and `set_full_grad` work then, as does clipping; of the result only step, rate and
        loss scale are known. `engine.step()` raises the exceptions of hooks.
        """
        return self._parts.hooks.register(hook, before_update=before_update)

    def watch_data_writes(self, enabled: bool = True) -> None:
        """Compare the weights at every step with those that the engine wrote, to find writes through `.data`
        (`p.data.clamp_()`), which torch does not count. For debugging: call it on every rank, between steps.

        `step()` then raises OutsideWrite, naming parameters. Each comparison reads the weights once, and
        waits for updates in the background.
        """
        self._parts.inspection.watch_data_writes(enabled)

    @property
    def is_evaluation_only(self) -> bool:
        """Whether every parameter was frozen at `initialize`: there are no gradients, no optimizer and no
        schedule."""
        return not self.core.gradients

    @property
    def scheduler(self) -> Schedule | None:
        """The scheduler that `initialize` returned: None where neither configuration nor caller named one."""
        return None if is_constant(self.schedule) else self.schedule

    @property
    def lr_scheduler(self) -> Schedule | None:
        """The same as `scheduler`; None from then on that None was assigned."""
        return self.scheduler if self._parts.loop.steps_schedule else None

    @lr_scheduler.setter
    def lr_scheduler(self, value: None) -> None:
        """Let the script step the schedule instead of `step()`, as Lightning does. Raises ValueError for
        another value than None."""
        if value is not None:
            raise ValueError("only None can be assigned to lr_scheduler: pass a schedule to initialize()")
        self._parts.loop.steps_schedule = False

    # --- names of DeepSpeed and of the model

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name: str) -> Any:
            """Return DeepSpeed's or else the model's attribute, where the engine has none of that name."""
            if not name.startswith("_"):
                parts = self.__dict__.get("_parts")
                for owner in (parts.names, parts.module_names, parts.core.model) if parts else ():
                    if hasattr(owner, name):
                        return getattr(owner, name)
            raise unknown_attribute(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *public_names(DeepSpeedNames), *public_names(ModuleNames)})

    @property
    def _modules(self) -> Mapping[str, nn.Module]:
        """The model under the name that it has in DeepSpeed's engine."""
        return {"module": self.module}

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.module.training

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return `module_state_dict` on rank 0, None elsewhere. Collective."""
        is_first = self.rank == 0
        state = self._parts.exports.module_state_dict(
            exclude_frozen_parameters=exclude_frozen_parameters, keeps_values=is_first
        )
        return state if is_first else None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise for copies and pickles: the engine holds process groups and memory that ranks share."""
        raise TypeError(
            "an engine must not be copied or pickled, as it holds process groups and memory of all ranks; "
            "call save_checkpoint, or copy what module_state_dict() returns"
        )
