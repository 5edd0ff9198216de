"""States that are resident as whole tensors: on the device beside the weights, or in host memory.

Made through `tiers.StateTiers`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zerotrain.runtime.offload.pages import HostPages
from zerotrain.runtime.offload.states import (
    REMAINDER,
    Block,
    Encoding,
    UnitStates,
    block_of,
    stored_dtype,
    stored_names,
)
from zerotrain.runtime.zero.buffer import flat_zeros
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.state import MASTER
from zerotrain.runtime.zero.unit import Unit


class ResidentStates(UnitStates):
    """States of one unit with one tensor per stored array."""

    def __init__(
        self,
        unit: Unit,
        kinds: tuple[str, ...],
        encoding: Encoding,
        *,
        arrays: Mapping[str, torch.Tensor],
        device: torch.device,
        ledger: MemoryLedger,
        kind: MemoryKind = MemoryKind.STATES,
    ) -> None:
        """Take `arrays` by stored name, all on one device, counted as `kind`."""
        super().__init__(unit, kinds, encoding, device=device)
        self.arrays = dict(arrays)
        self._counted_as = kind
        self._ledger = ledger
        self.num_bytes = sum(array.nbytes for array in self.arrays.values())
        ledger.add(self._counted_as, self.num_bytes)

    @property
    def master(self) -> torch.Tensor:
        """Masters of the interval in memory, for rules that see whole tensors. Not under SPLIT."""
        if self.encoding is Encoding.WEIGHT:
            unit = self.unit
            return unit.shard if unit.placement.states_sharded else unit.full.tensor
        return self.arrays[MASTER]

    @property
    def by_kind(self) -> Mapping[str, torch.Tensor]:
        """The rule's states in memory, by kind."""
        return {kind: self.arrays[kind] for kind in self.kinds}

    def adopt(self, kind: str, array: torch.Tensor) -> None:
        """Add a further kind, in memory that is accounted for elsewhere."""
        self.kinds = (*self.kinds, kind)
        self.arrays[kind] = array

    def load(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.arrays[name][start:stop]

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        self.arrays[name][start : start + values.numel()].copy_(values)

    def block(self, weights: torch.Tensor) -> Block:
        """Return all elements, to be updated with these weights."""
        return block_of(self, self.arrays, weights, start=0)

    def round_weights(self) -> None:
        """Round the masters into the weights, after a rule updated them."""
        if self.encoding is Encoding.FULL:
            self.write_weights(0, self.master)

    def drop(self) -> None:
        """Release the memory."""
        self._ledger.add(self._counted_as, -self.num_bytes)
        self.arrays.clear()


def device_states(
    unit: Unit, kinds: tuple[str, ...], encoding: Encoding, initial: torch.Tensor, *, ledger: MemoryLedger
) -> ResidentStates:
    """Make states on the device beside the weights. `initial`: the unit's fp32 values, which become the
    master where it is stored."""
    numel, device = initial.numel(), unit.comm.device
    arrays = {}
    if encoding is Encoding.FULL:
        arrays[MASTER] = initial
    elif encoding is Encoding.SPLIT:
        arrays[REMAINDER] = flat_zeros(numel, dtype=torch.int16, device=device)
    for kind in kinds:
        arrays[kind] = flat_zeros(numel, dtype=stored_dtype(unit, kind), device=device)
    states = ResidentStates(unit, kinds, encoding, arrays=arrays, device=device, ledger=ledger)
    if encoding is Encoding.SPLIT:
        states.take_initial(initial)
    return states


def host_states(
    unit: Unit,
    kinds: tuple[str, ...],
    encoding: Encoding,
    initial: torch.Tensor,
    *,
    ledger: MemoryLedger,
) -> ResidentStates:
    """Make states in one mapping of exactly their bytes, with the arrays one after another. `initial`: the
    unit's fp32 values. Nothing is page-locked: the update works here, and no device copies the states."""
    names = stored_names(kinds, encoding)
    dtypes = [stored_dtype(unit, name) for name in names]
    sizes = [initial.numel() * dtype.itemsize for dtype in dtypes]
    pages = HostPages(sum(sizes), pinned=False)
    parts = torch.split(pages.data, sizes) if names else ()  # the last of them frees the mapping
    arrays = {name: part.view(dtype) for name, part, dtype in zip(names, parts, dtypes, strict=True)}
    states = ResidentStates(
        unit,
        kinds,
        encoding,
        arrays=arrays,
        device=torch.device("cpu"),
        ledger=ledger,
        kind=MemoryKind.HOST_STATES,
    )
    states.take_initial(initial)
    return states
