"""A flat tensor whose memory is allocated and freed while the tensor, and every view of it, stays the same
object.

Autograd keeps views of gathered weights until backward. So freeing a unit removes the memory of its tensor,
and gathering allocates it again. A new tensor would not reach the saved views.

[Note: modules on other streams] A GPU's allocator hands freed memory to the stream that allocated it, at
once. If a script runs a module on a stream of its own, its unit may have been gathered ahead and allocated on
another one. The allocator is then told of the stream that reads the weights, and waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import torch

from zerotrain.runtime.comm.memory import PrivateMemory
from zerotrain.runtime.comm.streams import ComputeStream
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger


def flat_zeros(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a 1-D tensor of zeros for a buffer of the engine.

    On CPU it is a mapping of its own: malloc keeps freed megabytes in its heap, and the process would then
    hold more than the byte formulas say.
    """
    return PrivateMemory(device).keep(numel, dtype)


def flat_copy(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy a tensor into a new 1-D tensor."""
    copy = flat_zeros(source.numel(), dtype=dtype, device=source.device)
    return copy.copy_(source)


def return_free_memory() -> None:
    """Ask malloc to return the heap's free pages to the system, if it can (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def has_pages(device: torch.device) -> bool:
    """Return whether memory is freed by pages and keeps its address; on other devices storages are
    resized."""
    return device.type == "cpu"


def stream_on(device: torch.device) -> Any:
    """Return the device's current stream; None on a CPU."""
    return ComputeStream.current(device).stream


class FlatBuffer:
    """Flat buffer of `numel` elements; starts released. Contents are undefined after `allocate()` and lost by
    `release()`."""

    def __init__(
        self,
        numel: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ledger: MemoryLedger,
        kind: MemoryKind,
        pages: mmap.mmap | None = None,
    ) -> None:
        """Make the buffer. `pages` is a mapping of memory that is accounted for elsewhere; it always has
        contents."""
        self.num_bytes = 0 if pages is not None else numel * dtype.itemsize
        self._is_mapped = pages is not None
        self.is_allocated = False
        self._ledger = ledger
        self._kind = kind
        self._map: mmap.mmap | None = None
        self._home: Any = None
        """Stream for which the memory was allocated; None on a CPU."""
        if pages is not None or has_pages(device):
            # Private pages freed with madvise read as zeros. A storage resized to nothing has no address, and
            # reading a forgotten alias of a weight (`w = layer.weight.detach()`) would then crash the
            # process.
            self._map = pages or mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.tensor = torch.frombuffer(self._map, dtype=dtype)
        else:
            self.tensor = torch.empty(numel, dtype=dtype, device=device)
            self.tensor.untyped_storage().resize_(0)

    def views(self, cut: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the views that `cut` makes of the tensor, which has memory meanwhile: torch refuses views
        without it."""
        if self.is_allocated or self._map is not None:
            return cut(self.tensor)
        storage = self.tensor.untyped_storage()
        storage.resize_(self.num_bytes)
        try:
            return cut(self.tensor)
        finally:
            storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the tensor's memory. Does nothing if it has some."""
        if self.is_allocated:
            return
        if self._map is None:
            self.tensor.untyped_storage().resize_(self.num_bytes)
            self._home = stream_on(self.tensor.device)
        self.is_allocated = True
        self._ledger.add(self._kind, self.num_bytes)

    def use(self) -> None:
        """Record that the current stream reads the memory from now on; see [Note: modules on other
        streams]."""
        if self._home is not None and self.is_allocated:
            current = stream_on(self.tensor.device)
            if current != self._home:
                self.tensor.record_stream(current)

    def release(self) -> None:
        """Return the memory to the system (CPU) or the caching allocator (CUDA)."""
        if not self.is_allocated:
            return
        self.use()
        if self._map is None:
            self.tensor.untyped_storage().resize_(0)
        elif not self._is_mapped:
            self._map.madvise(mmap.MADV_DONTNEED)
        self.is_allocated = False
        self._ledger.add(self._kind, -self.num_bytes)
