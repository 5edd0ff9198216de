"""Private buffers for collectives between ranks that cannot read each other's memory. Used by `group.py`."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch


class Memory(Protocol):
    """Allocator of the buffers that take part in collectives."""

    @property
    def idle_bytes(self) -> int:
        """Bytes that stay resident for the next `borrow`."""
        ...

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros to send from; release it with `give_back`."""
        ...

    def give_back(self, tensor: torch.Tensor) -> None:
        """Take back a tensor from `borrow`."""
        ...

    def keep(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros to send from, which lives as long as the engine."""
        ...

    def drop(self, tensor: torch.Tensor) -> None:
        """Free the memory of a tensor from `keep`. No rank may use it any more."""
        ...

    def map_shards(self, shard: torch.Tensor) -> mmap.mmap | None:
        """Return one mapping of the shards of all ranks (each from `keep`) in rank order, private to this
        process when written to; None if that is not available. Collective."""
        ...


class PrivateMemory:
    """Memory that only this process can read, on its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def idle_bytes(self) -> int:
        return 0

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.keep(numel, dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Do nothing: the memory is freed when the caller drops the tensor."""

    def keep(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros. On CPU it is a mapping of its own, as malloc keeps freed megabytes in
        its heap."""
        if self._device.type != "cpu" or numel == 0:
            return torch.zeros(numel, dtype=dtype, device=self._device)
        pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=dtype)

    def drop(self, tensor: torch.Tensor) -> None:
        """Do nothing: the memory is freed when the caller drops the tensor."""

    def map_shards(self, shard: torch.Tensor) -> mmap.mmap | None:
        return None
