"""States in host memory: one private mapping per unit, of exactly the bytes it needs.

Neither malloc nor torch's pinned allocator is asked: the one keeps freed pages, the other rounds up to powers
of two. On CUDA the mapping is registered with the driver, so that what crosses the bus is copied by DMA.
Called through `tiers.StateTiers`.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch

from zerotrain.runtime.offload.device import ResidentStates
from zerotrain.runtime.offload.states import STORED_DTYPES, Encoding
from zerotrain.runtime.zero.ledger import Kind, MemoryLedger
from zerotrain.runtime.zero.unit import Unit

_PORTABLE = 1
"""cudaHostRegisterPortable: for every context of the process."""


class HostPages:
    """Zeroed memory of an exact size, on huge pages where the system has some, pinned if asked."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        """Raises RuntimeError when the driver does not register the memory."""
        self._pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.data = torch.frombuffer(self._pages, dtype=torch.uint8)[:num_bytes]
        """1-D uint8."""
        self._is_pinned = pinned and num_bytes > 0
        if self._is_pinned:
            driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(driver.cudaHostRegister(self.data.data_ptr(), num_bytes, _PORTABLE))
            if error:
                raise RuntimeError(
                    f"CUDA cannot register {num_bytes} bytes of host memory (error {error}); raise the limit "
                    "of locked memory, or set pin_memory of the offload block to false"
                )

    def release(self) -> None:
        """Unregister; the memory goes when the last tensor over it does."""
        if self._is_pinned:
            driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            driver.cudaHostUnregister(self.data.data_ptr())
            self._is_pinned = False


class HostStates(ResidentStates):
    """One mapping with the stored arrays behind each other."""

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
        """`initial`: the unit's fp32 values."""
        first = encoding.stored
        names = kinds if first is None else (first, *kinds)
        numel = initial.numel()
        sizes = [numel * STORED_DTYPES.get(name, torch.float32).itemsize for name in names]
        self._memory = HostPages(sum(sizes), pinned=pinned and unit.comm.device.type == "cuda")
        parts = zip(names, torch.split(self._memory.data, sizes), strict=True) if names else ()
        arrays = {name: part.view(STORED_DTYPES.get(name, torch.float32)) for name, part in parts}
        super().__init__(unit, kinds, encoding, arrays=arrays, counted_as=Kind.HOST_STATES, ledger=ledger)
        self.take_initial(initial)

    @property
    def device(self) -> torch.device:
        """Where the update runs."""
        return torch.device("cpu")

    def unpin(self) -> None:
        """Take the memory back from the device's driver."""
        self._memory.release()

    def drop(self) -> None:
        super().drop()
        self.unpin()
