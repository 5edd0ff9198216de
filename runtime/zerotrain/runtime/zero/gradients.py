"""Gradients of one trainable unit: the buffer that autograd writes into, and the sum of micro-batches.

Autograd accumulates in place into `p.grad`, so every `p.grad` is a view of one flat buffer and no hook per
parameter is needed. That buffer *is* the accumulator if dtype and placement allow it; otherwise it is a
zero-filled buffer that exists from the first gradient of a backward pass to the reduction. Parameters that
got no gradient keep zeros. `slots.py` defines `p.grad` when that buffer is gone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.gradient_sum import GradientSum, MakeSum
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.slots import GradientSharded, GradientSlots
from zerotrain.runtime.zero.unit import Unit, UnitState


class GradientOutsideModule(RuntimeError):
    """A gradient was computed from weights that were not available."""

    def __init__(self, fqn: str, module: str) -> None:
        super().__init__(
            f"backward used parameter {fqn!r} outside of the backward of its module "
            f"{module or 'the model'!r}, when its "
            "values were on other ranks, so this gradient is wrong. It came through a tensor that the "
            "module did not return: return it, or store it as an attribute of the module itself; or run "
            "forward and backward within full_parameters(model)"
        )


class UnitGradients:
    """Sum of a step's gradients of one unit, and the buffer for gradients that are not in the sum yet."""

    def __init__(self, unit: Unit, ledger: MemoryLedger, make_moved: MakeSum | None = None) -> None:
        """`make_moved`: makes sums in host memory, for a rank that keeps its own part alone."""
        self.unit = unit
        self._ledger = ledger
        self.sum = GradientSum(unit, ledger, make_moved)
        self.is_direct = self.sum.is_whole and unit.dtype is unit.placement.sum_dtype
        """Whether autograd writes into the accumulator itself."""
        self._is_blank = not self.is_direct
        """Whether the contents of `sum` count as zeros."""
        self.is_reduced = False
        """Whether, at stages 0 and 1, the accumulator already holds this step's sum over the ranks."""
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self.slots = GradientSlots(unit, self.parts_of)
        self.fence: Callable[[], None] = lambda: None
        """Makes the current stream wait for sums of this pass, which another may compute; see reduce.py."""
        self.download: Callable[[], torch.Tensor] | None = None
        """Copies `shard` to host memory if the states are there and the gradients are not."""
        self._direct_views = unit.views_of(self.sum.values) if self.is_direct else []
        self._clean_version = 0
        """Version of the accumulator that autograd writes into, when nothing was added yet."""
        if self.is_direct:
            self._clean_version = self.sum.values._version
            self.attach()

    @property
    def accumulator(self) -> torch.Tensor:
        """1-D accumulator: this rank's shard if gradients are sharded, else the whole unit.

        Once a step's sum over the ranks is computed, only this rank's part of a whole unit is valid, unless
        states are replicated; under `Placement.sums_own_part` nothing else is there.
        """
        if not (self.sum.is_whole or self.unit.placement.grads_sharded or self.is_reduced):
            self.sum.widen()  # nothing is in it yet
        values = self.sum.values
        if self._is_blank:
            values.zero_()
            self._is_blank = False
        return values

    @property
    def shard(self) -> torch.Tensor:
        """Part of the accumulator from which this rank updates weights (the whole if states are
        replicated)."""
        return self.own_part if self.unit.placement.states_sharded else self.accumulator

    @property
    def own_part(self) -> torch.Tensor:
        """Interval of the accumulator that the layout assigns to this rank, at every stage."""
        return self.sum.own_of(self.accumulator)

    @property
    def is_open(self) -> bool:
        """Whether a buffer holds gradients that are not in the accumulator yet."""
        return self._flat is not None

    @property
    def is_touched(self) -> bool:
        """Whether anything was added since `clear`, also by a backward pass that no hook saw."""
        if self.is_direct and self.sum.values._version != self._clean_version:
            return True
        return self.is_open or not (self.is_direct or self._is_blank) or self.slots.have_strays()

    def attach(self) -> None:
        """Make every `p.grad` a view of the buffer. A gradient that is already there is added; one that was
        there and is gone was dropped by the script, and is zeroed."""
        writes_through = self.is_direct and not self.is_reduced
        if not writes_through and self._flat is None:
            layout = self.unit.layout
            self._flat = self.unit.comm.memory.borrow(layout.padded_numel, TORCH_DTYPES[layout.dtype])
            self._ledger.add(MemoryKind.AUTOGRAD, layout.num_bytes)
            self._views = self.unit.views_of(self._flat)
        views = self._direct_views if writes_through else self._views
        lost, strays = self.slots.fill(views)
        for index in lost:
            self.slots.change(index, torch.Tensor.zero_)
        for index, found in strays:
            check_stray(self.unit, index, is_assigned=index in lost)
            with torch.no_grad():
                views[index].add_(found)

    def settle(self) -> None:
        """Take in what scripts and autograd left in `p.grad` since the last backward pass; called before the
        step and before gradients are read."""
        shown, found = self.slots.shown, self.slots.found()
        if shown is not None and all(map(operator.is_, found, shown)):
            return
        if self.slots.have_strays():
            self.attach()
            if not self.unit.placement.grads_sharded:
                self.fold()
        elif shown is not None:
            lost, _ = self.slots.fill(shown)
            for index in lost:
                self.slots.change(index, torch.Tensor.zero_)

    def take(self) -> torch.Tensor:
        """Return the flat buffer of this backward pass (zeros if there is none) and detach from it."""
        if self._flat is None:
            self.attach()
        flat = self._flat
        assert flat is not None  # attach() made it: direct gradients are never taken
        self._flat, self._views = None, []
        self.slots.hide()
        return flat

    def take_whole(self) -> torch.Tensor:
        """Return the contents of a replicated accumulator, to be reduced into this rank's part of it.

        If the step has only one micro-batch, autograd's own buffer is returned, which is as exact and half
        the bytes. What autograd computes from now on until `clear` goes into a separate buffer, because the
        accumulator is being sent or holds a sum over the ranks.
        """
        if self._is_blank and not self.is_direct:
            self.is_reduced = True
            return self.take()
        self.fold()
        self.is_reduced = True
        if self.is_direct:
            self.slots.hide()
        return self.accumulator

    def release(self, flat: torch.Tensor) -> None:
        """Account for a buffer from `take` as freed; the caller drops it. An accumulator stays."""
        if self.sum.is_whole and flat is self.sum.values:
            return
        self._ledger.add(MemoryKind.AUTOGRAD, -flat.numel() * flat.element_size())
        self.unit.comm.memory.give_back(flat)

    def fold(self) -> None:
        """Add this backward pass to a replicated accumulator, without communication. If that is already
        reduced, the buffer stays open for the next reduction."""
        if self.is_reduced or not self.is_open:
            return
        if not self.sum.is_whole:
            self.sum.widen()  # another pass follows before the step after all
        flat = self.take()
        if self._is_blank:
            self._is_blank = False
            self.sum.values.copy_(flat)
        else:
            self.sum.values.add_(flat)
        self.release(flat)

    def dispose(self) -> None:
        """Free all memory, between steps; the parameters then have no gradients."""
        self.slots.empty()
        self.sum.drop()

    def wipe(self) -> None:
        """Zero the accumulator: at once if autograd adds to it, else when it is used. `clear` follows; any
        thread may call this."""
        if self.is_direct:
            self.sum.values.zero_()
        else:
            self._is_blank = True

    def clear(self, *, everything: bool = False, is_wiped: bool = False) -> None:
        """Prepare for the next step.

        `everything`: drop also what a step would have added. `is_wiped`: `wipe` was called.
        """
        if everything:
            if self.is_open:
                self.release(self.take())
            self.slots.empty()
        if not is_wiped:
            self.wipe()
        self.is_reduced = False
        if self.is_direct and self.slots.shown is not self._direct_views:
            self.attach()
        elif not self.is_direct and self.slots.shown is not None:
            self.slots.empty()
        if self.is_direct:
            self._clean_version = self.sum.values._version
        else:
            self.sum.close()

    def parts_of(self, index: int) -> list[torch.Tensor]:
        """Return this rank's parts of one parameter's gradient: its part of the sum, and what is not in the
        sum yet."""
        self.fence()
        unit = self.unit
        segment = unit.layout.segments[index]
        low, high = self.sum.interval
        start, stop = max(low, segment.start), min(high, segment.stop)
        found = []
        if start < stop and not self._is_blank:
            found.append(self.sum.values[start - low : stop - low])
        if self._flat is not None:
            found.append(self._views[index])
        return found

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the gradients of a step, including what is not in the sum yet. Between passes."""
        if not self._is_blank:
            self.sum.values.mul_(factor)
        if self._flat is not None:
            self._flat.mul_(factor)

    def add_parts(self, parts: Sequence[torch.Tensor], scale: float, *, overwrite: bool) -> None:
        """Compute `own_part += scale * part` for one rank's part after the other; with `overwrite` what it
        holds does not count."""
        overwrite, self._is_blank = overwrite or self._is_blank, False
        self.sum.add(parts, scale, overwrite=overwrite)

    def known_squares(self) -> list[torch.Tensor]:
        """Return sums of squares of parts of `own_part` that were computed on the device before it left;
        empty if there are none. May be infinite where `own_part` is finite."""
        moved = self.sum.moved
        return [] if moved is None or self._is_blank else moved.squares()


def shard_on(gradients: UnitGradients, device: torch.device) -> torch.Tensor:
    """Return `shard` on the device; the caller may overwrite it."""
    shard = gradients.shard
    if device == shard.device:
        return shard
    return shard.to(device) if gradients.download is None else gradients.download()


def check_stray(unit: Unit, index: int, *, is_assigned: bool = False) -> None:
    """Check a gradient in `p.grad` that is not the engine's.

    Raises GradientOutsideModule if autograd computed it while the weights were elsewhere, GradientSharded if
    a script assigned it over the engine's. Within `full_parameters` the weights are available.
    """
    if not unit.placement.params_sharded or (unit.state is UnitState.HELD and not is_assigned):
        return
    fqn = unit.layout.segments[index].fqn
    if is_assigned:
        raise GradientSharded(fqn, "an assignment")
    raise GradientOutsideModule(fqn, unit.layout.module)
