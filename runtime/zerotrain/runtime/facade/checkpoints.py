"""Saving and loading, as methods of the engine; `zerotrain.runtime.checkpoint` does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from zerotrain.runtime.facade.feeding import Feeding
from zerotrain.runtime.facade.observer import NO_OBSERVER, EngineObserver
from zerotrain.runtime.offload.spill import spills
from zerotrain.runtime.optim.saved_values import match_stored, regrouped
from zerotrain.runtime.optim.schedule import TorchSchedule
from zerotrain.runtime.snapshot import LoadChoice, reload_weights, streams_of
from zerotrain.runtime.zero.extra import extra_states, restore_extra_states
from zerotrain.runtime.zero.ledger import MemoryKind
from zerotrain.runtime.zero.plan import persistent_buffers
from zerotrain.runtime.zero.state import CheckpointState

if TYPE_CHECKING:
    from zerotrain.runtime.checkpoint import (
        BackgroundSave,
        LoadResult,
        RankGroup,
        SaveOptions,
        SaveResult,
        Staging,
    )


class Checkpoints(Feeding):
    """Checkpoints that any number of ranks can load."""

    _claimed: set[Path]
    """Folders that this attempt owns."""
    _saving: BackgroundSave | None = None
    """The save that runs in the background; the same one on every rank."""
    _saves: int = 0
    _staging: Staging | None = None
    """Host memory for the state that is written in the background; kept from the first such save to
    `close`."""
    last_save: SaveResult | None = None
    """The newest durable checkpoint of this engine."""
    observer: EngineObserver = NO_OBSERVER
    """Observer that is notified of saves and loads."""

    def checkpoint_state(self) -> CheckpointState:
        """Return this rank's part of the training state; its streams are the engine's own state, not copies.

        Collective where an update runs in the background: the call waits for it, and raises its error. Raises
        RuntimeError inside gradient accumulation, where gradients would be lost, and after `close`.
        """
        self.check_open("saving or loading a checkpoint")
        if self.comm.model_parallel is not None:
            raise RuntimeError(
                "checkpoints of a model that is divided over a model-parallel group are not part of this "
                "version; on every rank, read the values with zerotrain.runtime.get_full_fp32 and "
                "get_full_optimizer_state, and save those"
            )
        steps = self.config.batch.gradient_accumulation_steps
        if self.micro_steps % steps or self.core.has_gradients:
            raise RuntimeError(
                "a checkpoint inside gradient accumulation would lose gradients (micro-batch "
                f"{self.micro_steps % steps or 1} of {steps}); save and load after "
                "engine.step() returned at_boundary"
            )
        self.synchronize()
        return CheckpointState(
            layout=self.core.layout,
            rank=self.rank,
            world_size=self.world_size,
            streams=streams_of(self.core, self.zero_optimizer),
            scalars={
                "global_steps": self.global_steps,
                "skipped_steps": self.skipped_steps,
                "optimizer": self.zero_optimizer.scalars(),
                "scheduler": self.schedule.state_dict(),
                "loss_scale": self.pipeline.scaler.state_dict(),
                **self.loader_scalars(),
            },
            buffers=persistent_buffers(self.module),
            extra=extra_states(self.module),
            accepts=partial(self._check_scalars, LoadChoice()),
            given_dtypes=self.core.given_buffer_dtypes,
        )

    def after_state_load(self, state: CheckpointState, choice: LoadChoice | None = None) -> None:
        """Apply a state that was overwritten in place. Collective.

        Raises CheckpointMismatch as `_check_scalars`.
        """
        choice, scalars = choice or LoadChoice(), state.scalars
        order = self._check_scalars(choice, scalars)
        restore_extra_states(self.module, state.extra)
        if not choice.module_only:
            self.restore_loader(scalars)
            self.global_steps = int(scalars["global_steps"])
            self.skipped_steps = int(scalars["skipped_steps"])
            self.micro_steps = self.global_steps * self.config.batch.gradient_accumulation_steps
        if choice.optimizer_states:
            self.zero_optimizer.load_scalars(scalars["optimizer"])
            self.pipeline.scaler.load_state_dict(scalars.get("loss_scale", {}))
        if choice.scheduler_states:
            self.schedule.load_state_dict(regrouped(scalars["scheduler"], order))
        reload_weights(self.core, self.zero_optimizer, state.streams)
        self.pipeline.clear()

    def _check_scalars(self, choice: LoadChoice, scalars: Mapping[str, Any]) -> list[int]:
        """Return the stored parameter group of each of the optimizer's groups. Raises CheckpointMismatch when
        a checkpoint has other parameter groups, or another kind of schedule."""
        from zerotrain.runtime.checkpoint import CheckpointMismatch

        num_groups = len(self.zero_optimizer.param_groups)
        order = list(range(num_groups))
        try:
            if choice.optimizer_states:
                order = match_stored(scalars["optimizer"], self.zero_optimizer.registry.group_of, num_groups)
            if choice.scheduler_states and isinstance(self.schedule, TorchSchedule):
                self.schedule.check_state(scalars["scheduler"])
        except ValueError as error:
            raise CheckpointMismatch(str(error)) from error
        return order

    @property
    def _ranks(self) -> RankGroup:
        from zerotrain.runtime.checkpoint.group import ranks_of

        return ranks_of(self.comm)

    def claim_checkpoints(self, directory: Path | str) -> None:
        """Make this attempt the folder's owner, once per folder; the first save does it too. Collective.

        Older attempts cannot commit there any more. Raises CheckpointFenced, CheckpointNotWritable.
        """
        from zerotrain.runtime.checkpoint import open_attempt

        folder = Path(directory).absolute()
        if folder not in self._claimed:
            open_attempt(folder, group=self._ranks)
            self._claimed.add(folder)

    def save_checkpoint(
        self,
        save_dir: Path | str,
        tag: str | None = None,
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
            tag: name of the checkpoint; None = by step. `keep_last` never removes tagged ones.
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
        from zerotrain.runtime.checkpoint import SaveOptions, check_storable

        folder = Path(save_dir).absolute()
        self.check_open("saving or loading a checkpoint")
        with self.clock.standing_still(), self.observer.saving():
            self.meet_and_settle("save_checkpoint")
            state = self.checkpoint_state()
            check_storable(state, folder, client_state, group=self._ranks)
            self._end_of_save(lambda saving: saving.finish())
            if exclude_frozen_parameters:
                state = without_frozen(state)
            self.claim_checkpoints(folder)
            options = SaveOptions(
                tag=tag,
                client_state=client_state,
                keep_last=keep_last,
                save_latest=save_latest,
                serial=self._saves,
            )
            self._saves += 1
            in_background = self.config.checkpoint.asynchronous if asynchronous is None else asynchronous
            return self._save(state, folder, options, in_background=in_background)

    def _save(
        self, state: CheckpointState, save_dir: Path, options: SaveOptions, *, in_background: bool
    ) -> SaveResult:
        from zerotrain.runtime.checkpoint import Staging, begin, save

        if not in_background or spills(self.config):
            result = save(state, save_dir, step=self.global_steps, group=self._ranks, options=options)
            return self._is_durable(result, is_latest=options.save_latest)
        self._staging = self._staging or Staging()
        held = self._staging.num_bytes
        self._saving = begin(
            state,
            save_dir,
            step=self.global_steps,
            group=self._ranks,
            options=options,
            staging=self._staging,
        )
        self.memory.add(MemoryKind.SNAPSHOT, self._staging.num_bytes - held)
        return self._saving.expected_result()

    def _is_durable(self, result: SaveResult, *, is_latest: bool) -> SaveResult:
        self.last_save = result
        self.observer.saved(result, is_latest=is_latest)
        return result

    def wait_for_checkpoint(self) -> SaveResult | None:
        """Wait until the save in the background is durable. Collective. None when there is none.

        Raises the errors of the save: see `save_checkpoint`.
        """
        if self._saving is None:
            return None
        with self.clock.standing_still(), self.observer.saving():
            self.comm.meet("wait_for_checkpoint")
            return self._end_of_save(lambda saving: saving.finish())

    @property
    def save_stage(self) -> int:
        """Stage that the background save has reached on this rank; part of the step record."""
        return 0 if self._saving is None else int(self._saving.stage)

    def handle_saves(self, stages: Sequence[int]) -> None:
        """End the background save when it is over on all ranks; `stages` is every rank's `save_stage`, as
        they exchanged it. Raises its error."""
        if self._saving is None or not self._saving.record_stages(stages):
            return
        if self._saving.is_durable(stages):
            self._end_of_save(lambda saving: saving.settle())
        else:
            self.wait_for_checkpoint()

    def _end_of_save(self, end: Callable[[BackgroundSave], SaveResult]) -> SaveResult | None:
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        return self._is_durable(end(saving), is_latest=saving.folder.is_latest)

    def end_saves(self) -> None:
        """Wait for the save in the background and free its memory. Collective. Raises its error."""
        try:
            self.wait_for_checkpoint()
        finally:
            if self._staging is not None:
                self.memory.add(MemoryKind.SNAPSHOT, -self._staging.num_bytes)
                self._staging = None

    def load_checkpoint(
        self,
        load_dir: Path | str,
        tag: str | None = None,
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
        from zerotrain.runtime.checkpoint.from_deepspeed.spawn import readable

        if custom_load_fn is not None:
            raise ValueError(
                "custom_load_fn must be None: every rank reads its own intervals in place, there is no whole "
                "state dict to hand over; load, then change weights inside full_parameters(...)"
            )
        takes_states = bool(self.core.gradients) and not load_module_only
        choice = LoadChoice(
            module_only=load_module_only,
            optimizer_states=load_optimizer_states and takes_states,
            scheduler_states=load_lr_scheduler_states and takes_states,
        )
        self.check_open("saving or loading a checkpoint")
        with self.clock.standing_still(), self.observer.loading():
            if load_module_strict:
                self.comm.meet("load_checkpoint")  # whatever was written is overwritten
            else:
                self.meet_and_settle("load_checkpoint")
            state = self.checkpoint_state()
        self.wait_for_checkpoint()
        began, path = monotonic(), Path(load_dir).absolute()
        with (
            self.clock.standing_still(),
            self.observer.loading(),
            readable(path, tag, self._ranks) as (folder, name, foreign),
        ):
            result = self._load(state, folder, name, choice, strict=load_module_strict)
            self.last_load = replace(result, path=foreign) if foreign else result
        seconds = monotonic() - began
        self.observer.loaded(self.last_load, seconds=seconds, module_only=load_module_only)
        return self.last_load.path, self.last_load.client_state

    def _load(
        self, state: CheckpointState, folder: Path, tag: str | None, choice: LoadChoice, *, strict: bool
    ) -> LoadResult:
        from zerotrain.runtime.checkpoint import load

        state.streams = choice.streams(state.streams)
        state.accepts = partial(self._check_scalars, choice)
        restores_rng = not choice.module_only
        result = load(state, folder, tag, group=self._ranks, strict=strict, restore_rng=restores_rng)
        if result.path is not None:
            self.after_state_load(state, choice)
        return result


def without_frozen(state: CheckpointState) -> CheckpointState:
    """Return the state without the units that are not trained."""
    trained = {unit.name for unit in state.layout.units if unit.trainable}
    return replace(state, streams={key: value for key, value in state.streams.items() if key[0] in trained})
