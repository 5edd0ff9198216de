"""Memory of the host that a CUDA device copies from and to: exactly so many bytes, page-locked if asked.

Neither malloc nor torch's pinned allocator is asked: the one keeps freed pages, the other rounds up to powers
of two.

[Note: locked pages] The driver knows page-locked memory by its address. Memory that went while the driver
still knew it would leave an entry behind, and whatever is mapped there next could not be locked any more. So
the mapping itself takes its entry out, when the last tensor over it goes.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch

_PORTABLE = 1
"""cudaHostRegisterPortable: for every context of the process."""


class HostPages:
    """Zeroed memory of an exact size, on huge pages where the system has some."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        """Raises RuntimeError when the driver does not lock the memory."""
        self._map = _Map(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]
        """1-D uint8. The memory goes when the last tensor over it does."""
        if pinned and num_bytes > 0:
            self._map.lock_pages(self.data.data_ptr(), num_bytes)

    def release(self) -> None:
        """Let the system move the pages; nothing may copy any more. The second time does nothing."""
        self._map.unlock_pages()


class _Map(mmap.mmap):
    """See [Note: locked pages]."""

    _address: int | None = None
    """That the driver knows."""

    def lock_pages(self, address: int, num_bytes: int) -> None:
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
        # Before the memory is unmapped. At the end of the process the driver may be gone already.
        with contextlib.suppress(Exception):
            self.unlock_pages()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
