"""The sum of one unit's gradients: of the whole unit, of this rank's part, or this part in host memory.

It is fp32, or bf16 where `Placement.bf16_masters` says so. Owned by `UnitGradients`, which decides when its
contents count.

[Note: sums between steps] The sum of a rank's part exists on an accelerator from a step's first reduction to
its update alone, so activations can use its memory. On a CPU it stays: new pages in each step would take more
time than the memory is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from zerotrain.runtime.comm.memory import unfilled
from zerotrain.runtime.comm.streams import ComputeStream, keep_for_current
from zerotrain.runtime.comm.sums import accumulate_
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


def stays(device: torch.device) -> bool:
    """Return whether sums of a rank's part exist all the time; see [Note: sums between steps]."""
    return device.type == "cpu"


class GradientSum:
    """Memory of the sum, and the additions of what the ranks sent."""

    def __init__(self, unit: Unit, ledger: MemoryLedger, make_moved: MakeSum | None) -> None:
        """`make_moved`: makes sums in host memory, for a rank that keeps its own part alone."""
        self._unit, self._ledger = unit, ledger
        self.is_whole = not (unit.placement.grads_sharded or unit.placement.sums_own_part)
        """Whether the sum has the whole unit rather than this rank's part of it."""
        self.moved = None if self.is_whole or make_moved is None else make_moved(unit, ledger)
        """The sum in host memory; None = it is on the device."""
        self._on_device: torch.Tensor | None = None
        self._home = ComputeStream(None)
        """Stream for which memory on the device was allocated."""
        if self.moved is None and (self.is_whole or stays(unit.comm.device)):
            self._open()

    @property
    def values(self) -> torch.Tensor:
        """The sum, 1-D, once it may be read and written. Its contents are undefined after `close`."""
        if self.moved is not None:
            self.moved.wait()
            return self.moved.values
        return self._open()

    @property
    def interval(self) -> tuple[int, int]:
        """Elements of the unit that the sum has."""
        return (0, self._unit.layout.padded_numel) if self.is_whole else (self._unit.start, self._unit.stop)

    def own_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the interval of `values` that the layout assigns to this rank."""
        return values[self._unit.start : self._unit.stop] if self.is_whole else values

    def add(self, parts: Sequence[torch.Tensor], scale: float, *, overwrite: bool) -> None:
        """Compute `own += scale * part` for one part after the other; with `overwrite` the old contents do
        not count. Where another stream runs it, `prepare` comes first."""
        if self.moved is not None:
            self.moved.add(parts, scale, overwrite=overwrite)
        else:
            accumulate_(self.own_of(self._open()), parts, scale, overwrite=overwrite)

    def prepare(self) -> None:
        """Allocate the memory on a device, for the current stream, so that others can write into it from
        here on."""
        if self.moved is None:
            self._open()

    def close(self) -> None:
        """Free the memory of a rank's part on a device until the next step; its contents are lost."""
        if not (self.is_whole or self.moved is not None or stays(self._unit.comm.device)):
            self.drop()

    def widen(self) -> None:
        """Make the sum whole from now on, and on the device. Its contents are lost."""
        self.drop()
        self.is_whole = True
        self._open()

    def drop(self) -> None:
        """Free the memory."""
        if self.moved is not None:
            self.moved.drop()
            self.moved = None
        elif self._on_device is not None:
            self._ledger.add(MemoryKind.GRADS, -self._on_device.nbytes)
            if self.is_whole:
                self._unit.comm.memory.drop(self._on_device)
            if self._home != ComputeStream.current(self._on_device.device):
                keep_for_current(self._on_device)
            self._on_device = None

    def _open(self) -> torch.Tensor:
        if self._on_device is None:
            start, stop = self.interval
            comm, dtype = self._unit.comm, self._unit.placement.sum_dtype
            make = comm.memory.keep if self.is_whole else partial(unfilled, device=comm.device)
            self._on_device = self._ledger.count(MemoryKind.GRADS, make(stop - start, dtype))
            self._home = ComputeStream.current(comm.device)
        return self._on_device
