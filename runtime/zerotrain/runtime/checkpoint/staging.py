"""Host memory that the state is copied into before a thread writes it; kept from one save to the next.

The first touch of fresh pages takes several times as long as the copy itself, and training is blocked during
the copy. The engine holds one of these from its first background save until `close`.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch

from zerotrain.runtime.checkpoint.tensorfile import Content, num_bytes_of, stream_of
from zerotrain.runtime.zero.layout import round_up
from zerotrain.runtime.zero.state import windows
from zerotrain.runtime.zero.strided import overwrite

_START_BYTES = 64
"""Alignment of the copies, in bytes."""


class Staging:
    """One private mapping, as large as the last copies."""

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None
        self.num_bytes = 0
        """Bytes of the copies, without the few bytes between them."""

    def copies(self, tensors: Mapping[str, Content]) -> dict[str, Content]:
        """Return copies of the tensors and streams, under the same keys, over those of an earlier call."""
        starts: dict[str, int] = {}
        end = 0
        for key, tensor in tensors.items():
            starts[key] = end
            end += round_up(num_bytes_of(tensor), _START_BYTES)
        pages = self._pages
        if pages is None or len(pages) != max(end, 1):
            pages = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages, self.num_bytes = pages, sum(map(num_bytes_of, tensors.values()))
        return {key: _copy(tensor, pages, starts[key]) for key, tensor in tensors.items()}


def _copy(content: Content, pages: mmap.mmap, offset: int) -> torch.Tensor:
    stream = stream_of(content)
    copy = torch.empty(0, dtype=stream.dtype)
    if stream.numel:
        copy = torch.frombuffer(pages, dtype=stream.dtype, count=stream.numel, offset=offset)
    if isinstance(content, torch.Tensor):
        overwrite(copy, stream.read(0, stream.numel))
        return copy.view(content.shape)
    for start, stop in windows(stream.numel):
        copy[start:stop].copy_(stream.read(start, stop))
    return copy
