"""The few buffers that all tiles of a sweep pass through."""

from __future__ import annotations

import torch

from zerotrain.runtime._native import aligned_buffer


class Ring:
    """Buffers in one mapping on huge pages: `num_tiles` of `tile_bytes` each."""

    def __init__(self, num_tiles: int, tile_bytes: int) -> None:
        self.num_tiles = num_tiles
        self.tile_bytes = tile_bytes
        self._all = (
            aligned_buffer(num_tiles * tile_bytes) if tile_bytes else torch.empty(0, dtype=torch.uint8)
        )
        self._free = [self._all[i * tile_bytes : (i + 1) * tile_bytes] for i in range(num_tiles)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.num_tiles * self.tile_bytes

    @property
    def is_whole(self) -> bool:
        """Whether no buffer is in use."""
        return len(self._free) == self.num_tiles

    def take(self) -> torch.Tensor | None:
        """Return a buffer (uint8, 1-D), or None when all are in use."""
        return self._free.pop() if self._free else None

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the ring. Neither the process nor the kernel may use it any more."""
        self._free.append(buffer)
