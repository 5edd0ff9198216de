"""Gradient accumulation controlled by the user: where a step ends, and backward passes without communication.

Called by training scripts through the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from zerotrain.runtime.facade.state import EngineState
from zerotrain.runtime.zero.sharded_model import ShardedModel


class Accumulation:
    """Counts micro-batches and determines which backward pass is the last one before an update."""

    def __init__(self, state: EngineState, core: ShardedModel) -> None:
        self._state, self._core = state, core
        self._forced_boundary: bool | None = None
        """Value of `set_boundary`; None = micro-batches are counted."""
        self._in_no_sync = False

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Determine whether the next steps update; see `Engine.set_gradient_accumulation_boundary`."""
        self._forced_boundary = is_boundary

    def is_boundary(self) -> bool:
        """Return whether the `step()` that belongs to the current micro-batch updates the weights."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        if not self._state.config.managed_gradient_accumulation:
            return True
        return (self._state.micro_steps + 1) % self._state.accumulation_steps == 0

    def reduces_now(self) -> bool:
        """Return whether stages 0 and 1 may reduce in the backward pass that starts."""
        if not self._state.config.managed_gradient_accumulation and self._forced_boundary is None:
            return False  # another backward pass may follow before the step
        return self.updates_now()

    def updates_now(self) -> bool:
        """Return whether a `step()` called now updates the weights."""
        return not self._in_no_sync and self.is_boundary()

    def steps_left(self) -> int:
        """Return the number of micro-batches up to the next update."""
        every = self._state.accumulation_steps
        is_counted = self._state.config.managed_gradient_accumulation and self._forced_boundary is None
        return every - self._state.micro_steps % every if is_counted else 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Reduce nothing within; see `Engine.no_sync`."""
        stage = self._state.config.zero.stage
        if stage >= 2:
            raise RuntimeError(
                f"no_sync() needs whole gradients on every rank, which zero_optimization.stage {stage} does "
                "not keep; remove it (the result is the same, reduced after each backward), or take stage 1"
            )
        if self._in_no_sync:
            raise RuntimeError("no_sync() is entered already; leave it first")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def end_micro_batch(self) -> bool:
        """Count a micro-batch; return whether the step is due. Raises RuntimeError within `no_sync`."""
        if self._in_no_sync:
            raise RuntimeError("step() cannot be called within no_sync(); call it after the context")
        at_boundary = self.is_boundary()
        self._state.micro_steps += 1
        self._state.step_calls += 1
        if at_boundary:  # a boundary that the user set ends the count as well
            every = self._state.accumulation_steps
            self._state.micro_steps = -(-self._state.micro_steps // every) * every
        return at_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step; see `Engine.set_train_batch_size`."""
        batch, world_size = self._state.config.batch, self._core.comm.world_size
        one_pass = batch.micro_batch_size * world_size
        if train_batch_size < one_pass or train_batch_size % one_pass:
            raise ValueError(
                f"train_batch_size must be a multiple of {one_pass} (micro batch "
                f"{batch.micro_batch_size} times {world_size} ranks); got {train_batch_size}"
            )
        self._set_batch(accumulation=train_batch_size // one_pass, micro=batch.micro_batch_size)

    def set_micro_batch_size(self, micro_batch_size: int) -> None:
        """Declare another number of samples per forward pass; see `Engine.set_train_micro_batch_size`."""
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1; got {micro_batch_size}")
        self._set_batch(accumulation=self._state.accumulation_steps, micro=micro_batch_size)

    def _set_batch(self, *, accumulation: int, micro: int) -> None:
        state = self._state
        if state.micro_steps % state.accumulation_steps or self._core.has_gradients:
            raise RuntimeError(
                "the batch size cannot change between the micro-batches of a step; change it after step() "
                "returned at_boundary"
            )
        batch = replace(
            state.config.batch,
            gradient_accumulation_steps=accumulation,
            micro_batch_size=micro,
            train_batch_size=micro * accumulation * self._core.comm.world_size,
        )
        state.config = replace(state.config, batch=batch)
        state.micro_steps = state.global_steps * accumulation  # boundaries are counted in micro-batches
