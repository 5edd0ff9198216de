"""Saving and loading of an engine; `zerotrain.runtime.checkpoint` does the work."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from zerotrain.runtime.clock import StepClock
from zerotrain.runtime.facade.feeding import Feeding
from zerotrain.runtime.facade.state import EngineState
from zerotrain.runtime.offload.spill import spills
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.saved_values import match_stored, regrouped
from zerotrain.runtime.optim.schedule import Schedule, TorchSchedule
from zerotrain.runtime.snapshot import LoadChoice, reload_weights, streams_of
from zerotrain.runtime.step import StepPipeline
from zerotrain.runtime.zero.extra import extra_states, restore_extra_states
from zerotrain.runtime.zero.ledger import MemoryKind
from zerotrain.runtime.zero.plan import persistent_buffers
from zerotrain.runtime.zero.sharded_model import ShardedModel
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

logger = logging.getLogger("zerotrain")


class EngineCheckpoints:
    """Checkpoints that any number of ranks can load."""

    def __init__(
        self,
        state: EngineState,
        core: ShardedModel,
        *,
        optimizer: ZeroOptimizer,
        schedule: Schedule,
        pipeline: StepPipeline,
        clock: StepClock,
        feeding: Feeding,
    ) -> None:
        self._state, self._core, self._comm = state, core, core.comm
        self._optimizer, self._schedule = optimizer, schedule
        self._pipeline, self._clock, self._feeding = pipeline, clock, feeding
        self._claimed: set[Path] = set()
        """Folders that this attempt owns."""
        self._owns_job = False
        """Whether it owns the job's own folder, or there is none."""
        self._saving: BackgroundSave | None = None
        """The save that runs in the background; the same one on every rank."""
        self._num_saves = 0
        self._staging: Staging | None = None
        """Host memory for the state that is written in the background; kept from the first such save to
        `close`."""

    def state(self, *, drops_gradients: bool = False) -> CheckpointState:
        """Return this rank's part of the training state; see `Engine.checkpoint_state`. Collective where an
        update runs in the background. With `drops_gradients` also inside gradient accumulation."""
        self._core.check_open("saving or loading a checkpoint")
        if self._comm.model_parallel is not None:
            raise RuntimeError(
                "checkpoints of a model that is divided over a model-parallel group are not part of this "
                "version; on every rank, read the values with zerotrain.runtime.get_full_fp32 and "
                "get_full_optimizer_state, and save those"
            )
        steps = self._state.accumulation_steps
        if not drops_gradients and (self._state.micro_steps % steps or self._core.has_gradients):
            raise RuntimeError(
                "a checkpoint inside gradient accumulation would lose gradients (micro-batch "
                f"{self._state.micro_steps % steps or 1} of {steps}); save and load after "
                "engine.step() returned at_boundary"
            )
        self._core.updates.settle_all()
        self._pipeline.settle()  # no checkpoint of a step in which ranks diverged
        return CheckpointState(
            layout=self._core.layout,
            rank=self._comm.rank,
            world_size=self._comm.world_size,
            streams=streams_of(self._core, self._optimizer),
            scalars={
                "global_steps": self._state.global_steps,
                "skipped_steps": self._state.skipped_steps,
                "global_samples": self._state.global_samples,
                "optimizer": self._optimizer.scalars(),
                "scheduler": self._schedule.state_dict(),
                "loss_scale": self._pipeline.scaler.state_dict(),
                **self._feeding.loader_scalars(),
            },
            buffers=persistent_buffers(self._core.model),
            extra=extra_states(self._core.model),
            accepts=partial(self._check_scalars, LoadChoice()),
            given_dtypes=self._core.given_buffer_dtypes,
        )

    def apply(self, state: CheckpointState, choice: LoadChoice | None = None) -> None:
        """Apply a state that was overwritten in place; see `Engine.after_state_load`. Collective."""
        choice, scalars = choice or LoadChoice(), state.scalars
        self._pipeline.settle()
        order = self._check_scalars(choice, scalars)
        restore_extra_states(self._core.model, state.extra)
        if not choice.module_only:
            self._feeding.restore_loader(scalars)
            self._state.global_steps = int(scalars["global_steps"])
            self._state.skipped_steps = int(scalars["skipped_steps"])
            so_far = self._state.global_steps * self._state.config.batch.train_batch_size
            self._state.global_samples = int(scalars.get("global_samples", so_far))
            self._state.micro_steps = self._state.global_steps * self._state.accumulation_steps
        if choice.optimizer_states:
            self._optimizer.load_scalars(scalars["optimizer"])
            self._pipeline.scaler.load_state_dict(scalars.get("loss_scale", {}))
        if choice.scheduler_states:
            self._schedule.load_state_dict(regrouped(scalars["scheduler"], order))
        reload_weights(self._core, self._optimizer, state.streams)
        self._pipeline.clear()

    def _check_scalars(self, choice: LoadChoice, scalars: Mapping[str, Any]) -> list[int]:
        """Return the stored parameter group of each of the optimizer's groups. Raises CheckpointMismatch when
        a checkpoint has other parameter groups, or another kind of schedule."""
        from zerotrain.runtime.checkpoint import CheckpointMismatch

        num_groups = len(self._optimizer.param_groups)
        order = list(range(num_groups))
        try:
            if choice.optimizer_states:
                order = match_stored(scalars["optimizer"], self._optimizer.registry.group_of, num_groups)
            if choice.scheduler_states and isinstance(self._schedule, TorchSchedule):
                self._schedule.check_state(scalars["scheduler"])
        except ValueError as error:
            raise CheckpointMismatch(str(error)) from error
        return order

    @property
    def _ranks(self) -> RankGroup:
        from zerotrain.runtime.checkpoint.group import ranks_of

        return ranks_of(self._comm)

    def claim(self, directory: Path | str) -> None:
        """Make this attempt the folder's owner; see `Engine.claim_checkpoints`. Collective."""
        from zerotrain.runtime.checkpoint import open_attempt

        self.claim_job()
        folder = Path(directory).absolute()
        if folder not in self._claimed:
            open_attempt(folder, group=self._ranks)
            self._claimed.add(folder)

    def claim_job(self) -> None:
        """Make this attempt the owner of the job's own folder, wherever it saves. Collective."""
        from zerotrain.runtime.checkpoint import claim_job

        if not self._owns_job:
            claim_job(self._ranks)
            self._owns_job = True

    def save(
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
        """Write a checkpoint; see `Engine.save_checkpoint`. Collective."""
        from zerotrain.runtime.checkpoint import SaveOptions, check_storable

        folder = Path(save_dir).absolute()
        self._core.check_open("saving or loading a checkpoint")
        with self._clock.standing_still(), self._state.observer.saving():
            self._core.meet_and_settle("save_checkpoint")
            state = self.state(drops_gradients=self._state.saves_drop_gradients)
            check_storable(state, folder, client_state, group=self._ranks)
            self._end_save(lambda saving: saving.finish())
            if exclude_frozen_parameters:
                state = without_frozen(state)
            self.claim(folder)
            options = SaveOptions(
                tag=_text(tag),
                client_state=client_state,
                keep_last=keep_last,
                save_latest=save_latest,
                serial=self._num_saves,
            )
            self._num_saves += 1
            in_background = (
                self._state.config.checkpoint.asynchronous if asynchronous is None else asynchronous
            )
            return self._write(state, folder, options, in_background=in_background)

    def _write(
        self, state: CheckpointState, save_dir: Path, options: SaveOptions, *, in_background: bool
    ) -> SaveResult:
        from zerotrain.runtime.checkpoint import Staging, begin, save

        if not in_background or spills(self._state.config):
            result = save(state, save_dir, step=self._state.global_steps, group=self._ranks, options=options)
            return self._is_durable(result, is_latest=options.save_latest)
        self._staging = self._staging or Staging()
        held = self._staging.num_bytes
        self._saving = begin(
            state,
            save_dir,
            step=self._state.global_steps,
            group=self._ranks,
            options=options,
            staging=self._staging,
        )
        self._core.ledger.add(MemoryKind.SNAPSHOT, self._staging.num_bytes - held)
        return self._saving.expected_result()

    def _is_durable(self, result: SaveResult, *, is_latest: bool) -> SaveResult:
        self._state.last_save = result
        self._state.observer.saved(result, is_latest=is_latest)
        return result

    def wait(self) -> SaveResult | None:
        """Wait for the save in the background; see `Engine.wait_for_checkpoint`. Collective."""
        if self._saving is None:
            return None
        with self._clock.standing_still(), self._state.observer.saving():
            self._comm.meet("wait_for_checkpoint")
            return self._end_save(lambda saving: saving.finish())

    @property
    def save_stage(self) -> int:
        """Stage that the background save has reached on this rank; part of the step record."""
        return 0 if self._saving is None else int(self._saving.stage)

    def end_if_over(self, stages: Sequence[int]) -> None:
        """End the background save when it is over on all ranks; `stages` is every rank's `save_stage`, as
        they exchanged it. Raises its error."""
        if self._saving is None or not self._saving.record_stages(stages):
            return
        if self._saving.is_durable(stages):
            self._end_save(lambda saving: saving.settle())
        else:
            self.wait()

    def _end_save(self, end: Callable[[BackgroundSave], SaveResult]) -> SaveResult | None:
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        return self._is_durable(end(saving), is_latest=saving.folder.is_latest)

    def close(self) -> None:
        """Wait for the save in the background and free its memory. Collective. Raises its error."""
        try:
            self.wait()
        finally:
            if self._staging is not None:
                self._core.ledger.add(MemoryKind.SNAPSHOT, -self._staging.num_bytes)
                self._staging = None

    def load(
        self,
        load_dir: Path | str,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Load a checkpoint; see `Engine.load_checkpoint`. Collective."""
        from zerotrain.runtime.checkpoint.from_deepspeed.spawn import readable

        if custom_load_fn is not None:
            raise ValueError(
                "custom_load_fn must be None: every rank reads its own intervals in place, there is no whole "
                "state dict to hand over; load, then change weights inside full_parameters(...)"
            )
        takes_states = bool(self._core.gradients) and not load_module_only
        choice = LoadChoice(
            module_only=load_module_only,
            optimizer_states=load_optimizer_states and takes_states,
            scheduler_states=load_lr_scheduler_states and takes_states,
        )
        self._core.check_open("saving or loading a checkpoint")
        with self._clock.standing_still(), self._state.observer.loading():
            if load_module_strict:
                self._comm.meet("load_checkpoint")  # whatever was written is overwritten
            else:
                self._core.meet_and_settle("load_checkpoint")
            state = self.state()
            self.claim_job()  # an older attempt commits nothing newer than what this one goes on from
        self.wait()
        began, path = monotonic(), Path(load_dir).absolute()
        with (
            self._clock.standing_still(),
            self._state.observer.loading(),
            readable(path, _text(tag), self._ranks) as (folder, name, foreign),
        ):
            result = self._read(state, folder, name, choice, strict=load_module_strict)
            if result.path is None and self._comm.rank == 0:
                _say_that_nothing_was_loaded(path)
            self._state.last_load = replace(result, path=foreign) if foreign else result
        seconds = monotonic() - began
        self._state.observer.loaded(self._state.last_load, seconds=seconds, module_only=load_module_only)
        return self._state.last_load.path, self._state.last_load.client_state

    def _read(
        self, state: CheckpointState, folder: Path, tag: str | None, choice: LoadChoice, *, strict: bool
    ) -> LoadResult:
        from zerotrain.runtime.checkpoint import load

        state.streams = choice.streams(state.streams)
        state.accepts = partial(self._check_scalars, choice)
        restores_rng = not choice.module_only
        result = load(state, folder, tag, group=self._ranks, strict=strict, restore_rng=restores_rng)
        if result.path is not None:
            self.apply(state, choice)
        return result


def without_frozen(state: CheckpointState) -> CheckpointState:
    """Return the state without the units that are not trained."""
    trained = {unit.name for unit in state.layout.units if unit.trainable}
    return replace(state, streams={key: value for key, value in state.streams.items() if key[0] in trained})


def _say_that_nothing_was_loaded(path: Path) -> None:
    """Log that a folder holds no checkpoint: many scripts do not look at what a load returns."""
    from zerotrain.runtime.checkpoint.names import MANIFEST

    is_whole = os.path.isfile(path / MANIFEST)
    call = f"load_checkpoint({str(path.parent)!r}, tag={path.name!r})"
    way_out = f"; it is one itself: {call}" if is_whole else ""
    logger.warning("%s holds no checkpoints, so nothing was loaded%s", path, way_out)


def _text(tag: str | float | None) -> str | None:
    """Return a tag as the name of a folder: scripts pass numbers of steps, and losses."""
    return None if tag is None else str(tag)
