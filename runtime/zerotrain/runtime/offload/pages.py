"""Host memory that a CUDA device copies from and to: an exact number of bytes, page-locked if requested; and
pools of buffers for records of the spill store.

Neither malloc nor torch's pinned allocator serves here: malloc keeps freed pages, and the pinned allocator
rounds up to powers of two.

[Note: locked pages] The driver knows page-locked memory by its address. Memory that is unmapped while the
driver still knows it would leave an entry behind, and a later mapping at that address could not be locked any
more. So the mapping itself removes its entry, when the last tensor over it is freed.

[Note: locked pages and forks] A fork copies locked pages at once, for a worker of a DataLoader that never
reads them: each worker would take as much memory as all sums of gradients. Older kernels share them instead,
and move the parent's at its next write, which the device does not see. A child finds zeros there.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger

if TYPE_CHECKING:
    from zerotrain.runtime.spill.store import RecordIO

_PORTABLE = 1
"""The value of cudaHostRegisterPortable: page-locked for every context of the process."""

_WIPE_ON_FORK = 18
"""The kernel's MADV_WIPEONFORK, which Python does not name; see [Note: locked pages and forks]."""


class HostPages:
    """Zeroed memory of an exact size, on huge pages where the system has some."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        """Map the memory. Raises RuntimeError when the driver does not lock it."""
        self._map = _Map(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # for a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]
        """The memory as a 1-D uint8 tensor. It is freed with the last tensor over it."""
        if pinned and num_bytes > 0:
            self._map.lock_pages(self.data.data_ptr(), num_bytes)

    def release(self) -> None:
        """Unlock the pages; no copy may be under way any more. A second call does nothing."""
        self._map.unlock_pages()


class _Map(mmap.mmap):
    """A mapping that unlocks its pages before it is unmapped; see [Note: locked pages]."""

    _address: int | None = None
    """Address that the driver has page-locked, if any."""

    def lock_pages(self, address: int, num_bytes: int) -> None:
        with contextlib.suppress(OSError):  # for a kernel without it
            self.madvise(_WIPE_ON_FORK)
        runtime = _runtime()
        error = int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE))
        if error:
            raise RuntimeError(
                f"CUDA does not page-lock {num_bytes} bytes of host memory (error {error}, "
                f"{runtime.cudaGetErrorString(runtime.cudaError(error))}); raise the limit of locked memory "
                "(ulimit -l), or set pin_memory of the offload block to false"
            )
        self._address = address

    def unlock_pages(self) -> None:
        address, self._address = self._address, None
        if address is not None:
            _runtime().cudaHostUnregister(address)

    def __del__(self) -> None:
        # The pages are unlocked before the memory is unmapped. At the process's end the driver may be gone.
        with contextlib.suppress(Exception):
            self.unlock_pages()


class RecordBuffer:
    """A buffer for one record."""

    __slots__ = ("copied", "data", "io", "pinned")

    def __init__(self, data: torch.Tensor, pinned: HostPages | None) -> None:
        self.data = data
        self.pinned = pinned
        self.io: RecordIO | None = None
        """The read or write that is under way in the buffer, if any."""
        self.copied: Any = None
        """CUDA event after which the device has read the buffer."""

    @property
    def is_copied(self) -> bool:
        """Whether the device does not read the buffer any more."""
        return self.copied is None or self.copied.query()

    def wait(self) -> None:
        """Wait for the buffer's transfers. Then it holds weights after a read, nothing of use after a
        write."""
        if (io := self.io) is not None:
            io.wait()
            self.io = None
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


class BufferPool:
    """Free buffers of one size."""

    def __init__(self, count: int, ledger: MemoryLedger, *, pins: bool) -> None:
        """Create an empty pool of `count` buffers to be. `pins`: the buffers are page-locked."""
        self._count = count
        self._ledger = ledger
        self._pins = pins
        self.num_bytes = 0
        self.free: list[RecordBuffer] = []

    def grow(self, num_bytes: int) -> None:
        """Replace the buffers where they are smaller than `num_bytes`. All buffers must be free."""
        if num_bytes <= self.num_bytes:
            return
        for buffer in self.free:
            buffer.wait()  # for the device, which may still read the weights of the last pass
            self._ledger.add(MemoryKind.RING, -buffer.data.nbytes)
            if buffer.pinned is not None:
                buffer.pinned.release()
        self.free = [self._made(num_bytes) for _ in range(self._count)]
        self.num_bytes = num_bytes

    def _made(self, num_bytes: int) -> RecordBuffer:
        from zerotrain.runtime._native import aligned_buffer  # needs compiled code

        pinned = HostPages(num_bytes, pinned=True) if self._pins else None
        data = aligned_buffer(num_bytes) if pinned is None else pinned.data
        return RecordBuffer(self._ledger.count(MemoryKind.RING, data), pinned)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
