"""Copies of weights between host memory and the device, concurrent with the device's computation.

`params.py` sends offloaded shards to their gathers; units of which only the states are offloaded are updated
in host memory and sent back. On a CPU there is nothing to overlap: a copy is made at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zerotrain.contract.memory.inputs import UPLOAD_BUFFERS
from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.offload.pages import HostPages
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.shards import StartGather


class Uploads:
    """The copies of one engine, in order, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def send(self, source: torch.Tensor, part: torch.Tensor, start: StartGather) -> Pending:
        """Copy page-locked `source` to `part` and start the gather from there. `source` must stay unchanged
        until `finish`, or until an event of `mark` has passed."""
        if self._stream is None:
            part.copy_(source)
            return start(part)
        # The computation used the memory of `part` until now, and its allocator may hand it out again.
        self._stream.wait_stream(torch.cuda.current_stream(part.device))
        with torch.cuda.stream(self._stream):
            part.copy_(source, non_blocking=True)
            pending = start(part)
            arrived = self.mark()

        def wait() -> None:
            torch.cuda.current_stream(part.device).wait_event(arrived)
            pending.wait()

        return Pending(wait)

    def mark(self) -> Any:
        """Return an event that has passed when all copies so far are done; None where they are done."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def finish(self) -> None:
        """Wait until all copies so far are done."""
        if self._stream is not None:
            self._stream.synchronize()


class WeightStaging:
    """Page-locked buffers in rotation: one unit is computed while the one before is sent. Used by one
    thread."""

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self._device = device
        self._pins = pins and device.type == "cuda"
        self._buffers: list[HostPages] = []
        self._sent: list[Any] = []
        """Events behind the last copy from each buffer."""
        self._next_slot = 0
        self._ledger: MemoryLedger | None = None

    @contextmanager
    def lend(self, weights: torch.Tensor, *, reads: bool, ledger: MemoryLedger) -> Iterator[torch.Tensor]:
        """Yield a host buffer for weights, as `zero.shards.Staging`. The copies run on the current stream."""
        self._fit(weights.nbytes, ledger)
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % UPLOAD_BUFFERS
        if (sent := self._sent[slot]) is not None:
            sent.synchronize()
        host = self._buffers[slot].data[: weights.nbytes].view(weights.dtype)
        with torch.no_grad():
            if reads:
                host.copy_(weights, non_blocking=True)
                self._wait()
            yield host
            weights.copy_(host, non_blocking=True)
        self._sent[slot] = self._mark()

    def close(self) -> None:
        """Wait for the copies and release the buffers. A second call does nothing."""
        for sent in self._sent:
            if sent is not None:
                sent.synchronize()
        for buffer in self._buffers:
            if self._ledger is not None:
                self._ledger.add(MemoryKind.RING, -buffer.data.nbytes)
            buffer.release()
        self._buffers, self._sent = [], []

    def _fit(self, num_bytes: int, ledger: MemoryLedger) -> None:
        if self._buffers and self._buffers[0].data.nbytes >= num_bytes:
            return
        self.close()
        self._ledger = ledger
        for _ in range(UPLOAD_BUFFERS):
            self._buffers.append(HostPages(num_bytes, pinned=self._pins))
            self._sent.append(None)
            ledger.add(MemoryKind.RING, num_bytes)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
