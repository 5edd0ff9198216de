"""The sum of one unit's gradients: of the whole unit, of this rank's part, or this part in host memory.

It is fp32, or bf16 where `Placement.bf16_masters` says so.

Owned by `UnitGradients`, which decides when its contents count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from zerotrain.runtime.comm.sums import accumulate_
from zerotrain.runtime.zero.buffer import flat_zeros
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.unit import Unit


class MovedSum(Protocol):
    """Sum of this rank's part of a unit's gradients in host memory, beside an accelerator."""

    values: torch.Tensor
    """The sum, 1-D in host memory. Call `wait` before reading or writing it."""

    def wait(self) -> None:
        """Block until `values` may be read and written."""
        ...

    def add(self, parts: Sequence[torch.Tensor], scale: float, *, overwrite: bool) -> None:
        """Run `accumulate_` into `values`, without waiting."""
        ...

    def squares(self) -> list[torch.Tensor]:
        """Return sums of squares of the parts of `values`; empty if they are not known."""
        ...

    def drop(self) -> None:
        """Free the memory."""
        ...


MakeSum = Callable[[Unit, MemoryLedger], MovedSum | None]
"""Function that makes a unit's sum in host memory; None = it stays on the device."""


class GradientSum:
    """Memory of the sum, and the additions of what the ranks sent."""

    def __init__(self, unit: Unit, ledger: MemoryLedger, make_moved: MakeSum | None) -> None:
        """`make_moved`: makes sums in host memory, for a rank that keeps its own part alone."""
        self._unit, self._ledger = unit, ledger
        self.is_whole = not (unit.placement.grads_sharded or unit.placement.sums_own_part)
        """Whether the sum has the whole unit rather than this rank's part of it."""
        self.moved = None if self.is_whole or make_moved is None else make_moved(unit, ledger)
        """The sum in host memory; None = it is on the device."""
        self._values = self._made() if self.moved is None else self.moved.values

    @property
    def values(self) -> torch.Tensor:
        """The sum, 1-D, once it may be read and written."""
        if self.moved is not None:
            self.moved.wait()
        return self._values

    @property
    def interval(self) -> tuple[int, int]:
        """Elements of the unit that the sum has."""
        return (0, self._unit.layout.padded_numel) if self.is_whole else (self._unit.start, self._unit.stop)

    def own_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the interval of `values` that the layout assigns to this rank."""
        return values[self._unit.start : self._unit.stop] if self.is_whole else values

    def add(self, parts: Sequence[torch.Tensor], scale: float, *, overwrite: bool) -> None:
        """Compute `own += scale * part` for one part after the other; with `overwrite` the old contents do
        not count."""
        if self.moved is not None:
            self.moved.add(parts, scale, overwrite=overwrite)
        else:
            accumulate_(self.own_of(self._values), parts, scale, overwrite=overwrite)

    def widen(self) -> None:
        """Make the sum whole from now on, and on the device. Its contents are lost."""
        self.drop()
        self.is_whole = True
        self._values = self._made()

    def drop(self) -> None:
        """Free the memory."""
        if self.moved is not None:
            self.moved.drop()
            self.moved = None
            return
        self._ledger.add(MemoryKind.GRADS, -self._values.nbytes)
        if self.is_whole:
            self._unit.comm.memory.drop(self._values)

    def _made(self) -> torch.Tensor:
        start, stop = self.interval
        dtype = self._unit.placement.sum_dtype
        if self.is_whole:
            made = self._unit.comm.memory.keep(stop - start, dtype)
        else:
            made = flat_zeros(stop - start, dtype=dtype, device=self._unit.comm.device)
        return self._ledger.count(MemoryKind.GRADS, made)
