"""Gradient accumulation controlled by the user: where a step ends, and backward passes without communication.

Called by training scripts through the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zerotrain.runtime.facade.parts import EngineParts


class Accumulation(EngineParts):
    """Determines which backward pass is the last one before an update."""

    _in_no_sync = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the `step()` that belongs to the current micro-batch updates the weights."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        if not self.config.managed_gradient_accumulation:
            return True
        return (self.micro_steps + 1) % self.config.batch.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set before a forward pass whether its `step()` updates, instead of counting micro-batches; None =
        count.

        With False, `step()` need not be called after each backward pass. `backward` divides losses by
        `gradient_accumulation_steps` in any case.
        """
        self._forced_boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward passes within accumulate gradients on this rank; the next `step()` outside reduces
        them.

        Micro-batches are not counted and `step()` raises RuntimeError within, as in DeepSpeed. Raises
        RuntimeError at stages 2 and 3, where a rank keeps no memory for whole gradients, and when nested.
        """
        stage = self.config.zero.stage
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

    def reduces_now(self) -> bool:
        """Return whether stages 0 and 1 may reduce in the backward pass that starts."""
        if not self.config.managed_gradient_accumulation and self._forced_boundary is None:
            return False  # another backward pass may follow before the step
        return not self._in_no_sync and self.is_gradient_accumulation_boundary()

    def end_micro_batch(self) -> bool:
        """Count a micro-batch; return whether the step is due. Raises RuntimeError within `no_sync`."""
        if self._in_no_sync:
            raise RuntimeError("step() cannot be called within no_sync(); call it after the context")
        at_boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self.step_calls += 1
        if at_boundary:  # a boundary that the user set ends the count as well
            every = self.config.batch.gradient_accumulation_steps
            self.micro_steps = -(-self.micro_steps // every) * every
        return at_boundary
