"""States in host memory: one mapping per unit, of exactly the bytes it needs, page-locked beside a GPU.

Called through `tiers.StateTiers`.
"""

from __future__ import annotations

import torch

from zerotrain.runtime.offload.device import ResidentStates
from zerotrain.runtime.offload.pages import HostPages
from zerotrain.runtime.offload.states import STORED_DTYPES, Encoding
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.unit import Unit


class HostStates(ResidentStates):
    """States of one unit in one memory mapping, with the stored arrays one after another."""

    def __init__(
        self,
        unit: Unit,
        kinds: tuple[str, ...],
        encoding: Encoding,
        *,
        initial: torch.Tensor,
        ledger: MemoryLedger,
        pinned: bool,
    ) -> None:
        """Make the states of a unit from `initial`, its fp32 values."""
        first = encoding.stored
        names = kinds if first is None else (first, *kinds)
        numel = initial.numel()
        sizes = [numel * STORED_DTYPES.get(name, torch.float32).itemsize for name in names]
        self._memory = HostPages(sum(sizes), pinned=pinned and unit.comm.device.type == "cuda")
        parts = zip(names, torch.split(self._memory.data, sizes), strict=True) if names else ()
        arrays = {name: part.view(STORED_DTYPES.get(name, torch.float32)) for name, part in parts}
        super().__init__(
            unit, kinds, encoding, arrays=arrays, counted_as=MemoryKind.HOST_STATES, ledger=ledger
        )
        self.take_initial(initial)

    @property
    def device(self) -> torch.device:
        """Device on which the update runs."""
        return torch.device("cpu")

    def unpin(self) -> None:
        """Unlock the memory's pages with the device's driver."""
        self._memory.release()

    def drop(self) -> None:
        super().drop()
        self.unpin()
