"""Host memory through which updated weights travel to the device, where the states are elsewhere.

Called by the host and the vault tier, on the thread and the stream that run the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zerotrain.runtime.offload.host import HostPages
from zerotrain.runtime.zero.ledger import Kind, MemoryLedger

BUFFERS = 2
"""The weights of one unit travel while those of the next are computed."""


class WeightStaging:
    """Buffers for the largest unit that crosses, taken in turn."""

    def __init__(self, ledger: MemoryLedger, *, pinned: bool) -> None:
        """`pinned`: in memory that a CUDA device copies from directly."""
        self._ledger, self._pinned = ledger, pinned
        self._buffers: list[HostPages] = []
        self._sent: list[Any] = [None] * BUFFERS
        """Events behind the last upload from each buffer."""
        self._turn = 0

    def fit(self, num_bytes: int) -> None:
        """Make room for a unit of that many bytes. Between steps."""
        if self._buffers and self._buffers[0].data.nbytes >= num_bytes:
            return
        self.close()
        self._buffers = [HostPages(num_bytes, pinned=self._pinned) for _ in range(BUFFERS)]
        self._ledger.add(Kind.RING, BUFFERS * num_bytes)

    @contextmanager
    def lend(self, weights: torch.Tensor, *, reads: bool) -> Iterator[torch.Tensor]:
        """Host memory like `weights`, with their contents only if `reads`. At the end of the block, if it did
        not raise, it is copied to them on the current stream, which goes on meanwhile."""
        place, self._turn = self._turn, (self._turn + 1) % BUFFERS
        if (sent := self._sent[place]) is not None:
            sent.synchronize()
        host = self._buffers[place].data[: weights.nbytes].view(weights.dtype)
        if reads:
            host.copy_(weights)
        yield host
        with torch.no_grad():
            weights.copy_(host, non_blocking=True)
        if weights.device.type == "cuda":
            self._sent[place] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent[place].record()

    def close(self) -> None:
        """Give the memory back, when no copy is under way."""
        for sent in self._sent:
            if sent is not None:
                sent.synchronize()
        for pages in self._buffers:
            pages.release()
            self._ledger.add(Kind.RING, -pages.data.nbytes)
        self._buffers, self._sent = [], [None] * BUFFERS
