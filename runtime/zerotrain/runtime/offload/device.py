"""States that are resident as whole tensors: on the device beside the weights, and the base class of the host
tier.

Called through `tiers.StateTiers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zerotrain.runtime.offload.states import REMAINDER, Block, Encoding, UnitStates, UnitUpdate
from zerotrain.runtime.zero.buffer import flat_zeros
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.state import MASTER
from zerotrain.runtime.zero.unit import Unit

MakeArray = Callable[[int, torch.dtype], torch.Tensor]
"""Function that returns a 1-D tensor of zeros, of that many elements and that dtype."""


class ResidentStates(UnitStates):
    """States of one unit with one tensor per stored array."""

    def __init__(
        self,
        unit: Unit,
        kinds: tuple[str, ...],
        encoding: Encoding,
        *,
        arrays: Mapping[str, torch.Tensor],
        counted_as: MemoryKind,
        ledger: MemoryLedger,
    ) -> None:
        """Take `arrays` by stored name, all on one device."""
        super().__init__(unit, kinds, encoding)
        self.arrays = dict(arrays)
        self._counted_as, self._ledger = counted_as, ledger
        self.num_bytes = sum(array.nbytes for array in self.arrays.values())
        ledger.add(counted_as, self.num_bytes)

    @property
    def device(self) -> torch.device:
        """Device on which the update runs."""
        found = next(iter(self.arrays.values()), None)
        return self.unit.comm.device if found is None else found.device

    @property
    def master(self) -> torch.Tensor:
        """fp32 masters of the interval in memory, for rules that see whole tensors. Not under SPLIT."""
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

    def update(self, update: UnitUpdate) -> None:
        """Update all elements in one block."""
        with self.weights_to_update(self.device) as weights:
            is_master = self.encoding is Encoding.WEIGHT
            block = Block(
                start=0,
                stop=self.numel,
                master=weights if is_master else self.arrays.get(MASTER),
                remainder=self.arrays.get(REMAINDER),
                by_kind=self.by_kind,
                weight=None if is_master else weights,
            )
            update.bind(weights, self.encoding)(block)

    def round_weights(self) -> None:
        """Round the masters into the weights, after a rule updated them."""
        if self.encoding is Encoding.FULL:
            self.write_weights(0, self.master)

    def drop(self) -> None:
        """Release the memory."""
        self._ledger.add(self._counted_as, -self.num_bytes)
        self.arrays.clear()


def device_states(
    unit: Unit, kinds: tuple[str, ...], encoding: Encoding, initial: torch.Tensor, ledger: MemoryLedger
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
        arrays[kind] = flat_zeros(numel, dtype=torch.float32, device=device)
    states = ResidentStates(unit, kinds, encoding, arrays=arrays, counted_as=MemoryKind.STATES, ledger=ledger)
    if encoding is Encoding.SPLIT:
        states.take_initial(initial)
    return states
