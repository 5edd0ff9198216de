"""Host memory that the state is copied into before a thread writes it; kept from one save to the next.

The first touch of fresh pages takes several times as long as the copy itself, and training is blocked during
the copy. The engine holds one of these from its first background save until `close`.

[Note: copies from a GPU] The memory of the copies is not page-locked, as it is as large as the rank's file.
What is on a GPU passes through two page-locked buffers of one window: while a window is copied on within host
memory, the device sends the next one.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Mapping

import torch

from zerotrain.runtime.checkpoint.tensorfile import Content, num_bytes_of, stream_of
from zerotrain.runtime.comm.streams import HostCopy
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
        arrivals = _Arrivals()
        made: dict[str, Content] = {}
        for key, tensor in tensors.items():
            made[key] = _copy(tensor, pages, starts[key], arrivals)
        arrivals.finish()
        return made


class _Arrivals:
    """Windows of tensors of a GPU on their way; see [Note: copies from a GPU]."""

    def __init__(self) -> None:
        self._on_their_way: deque[tuple[HostCopy, torch.Tensor]] = deque()

    def put(self, window: torch.Tensor, place: torch.Tensor) -> None:
        """Let `place` have the window's values by the end of `finish`."""
        if is_host(window.device):
            place.copy_(window)
            return
        self._on_their_way.append((HostCopy(window), place))
        if len(self._on_their_way) > 1:
            self._take_one()

    def finish(self) -> None:
        """Wait for all windows."""
        while self._on_their_way:
            self._take_one()

    def _take_one(self) -> None:
        arriving, place = self._on_their_way.popleft()
        place.copy_(arriving.read())


def is_host(device: torch.device) -> bool:
    """Return whether a tensor of the device is in host memory already."""
    return device.type == "cpu"


def _copy(content: Content, pages: mmap.mmap, offset: int, arrivals: _Arrivals) -> torch.Tensor:
    stream = stream_of(content)
    copy = torch.empty(0, dtype=stream.dtype)
    if stream.numel:
        copy = torch.frombuffer(pages, dtype=stream.dtype, count=stream.numel, offset=offset)
    if isinstance(content, torch.Tensor):
        overwrite(copy, stream.read(0, stream.numel))
        return copy.view(content.shape)
    for start, stop in windows(stream.numel):
        arrivals.put(stream.read(start, stop), copy[start:stop])
    return copy
