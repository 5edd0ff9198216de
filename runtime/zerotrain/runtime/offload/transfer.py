"""Transfers between a device and host memory: gradients down, weights up.

`Uploads` sends offloaded shards to their gathers. Units of which only the states are offloaded are updated in
host memory: `DeviceLink` fetches their gradients where these are not there already (`host_sums.py`),
`WeightStaging` their weights, and sends these back. On a CPU both are the same memory: a copy is made at
once, and there is no `DeviceLink`.

[Note: streams] Gradients come down on one stream and weights go up on another, so both directions of the bus
are used while the main stream computes. Both wait for what the main stream did before the step. An update
runs with the upload stream as the current one. Whatever it copies to the device, or computes there, is
followed by the event that the main stream waits for at the unit's fence, before it starts the unit's gather.
Gradients land in a ring of pinned buffers: the copy of the next units goes on while one is updated, and a
buffer is used again when the update that read it is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.memory.inputs import UPLOAD_BUFFERS
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.streams import event_behind
from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.offload.pages import HostPages
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.shards import StartGather

DOWNLOAD_BUFFERS = 3
"""Number of buffers: one that an update reads, one that is full, one that fills."""


class DeviceLink:
    """The copies of one engine; see [Note: streams]."""

    def __init__(self, device: torch.device, ledger: MemoryLedger, *, pins: bool = True) -> None:
        """Create the streams of a CUDA device. `pins` False: copies through pageable memory, which is
        slower."""
        self._device = device
        self._pins = pins
        self._ledger = ledger
        self._uploads: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._downloads: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ring: list[HostPages] = []
        self._order: list[UnitGradients] = []
        self._places: dict[UnitGradients, int] = {}
        self._started: list[Any] = []
        """Events behind the copies of this step that were started, in order."""
        self._done: dict[str, Any] = {}
        """Events behind the updates that were run, by unit."""

    def begin(self, parts: Sequence[UnitGradients], *, leaving: Sequence[UnitGradients]) -> None:
        """Prepare a step that updates `parts`, of which `leaving` have their states in host memory. The step
        before must be over. Called by the main thread."""
        main = torch.cuda.current_stream(self._device)
        self._uploads.wait_stream(main)
        self._downloads.wait_stream(main)
        self._done.clear()
        self._started.clear()
        self._order = list(leaving)
        self._places = {part: place for place, part in enumerate(leaving)}
        self._fit_ring(max((part.shard.nbytes for part in leaving), default=0))
        for part in parts:
            part.download = partial(self._download, part) if part in self._places else None

    @contextmanager
    def updating(self, name: str) -> Iterator[None]:
        """Provide the context of one unit's update, in any one thread."""
        with torch.cuda.stream(self._uploads):
            yield
            self._done[name] = event_behind(self._uploads)

    def wait(self, name: str) -> None:
        """Make the current stream wait for what `updating` put on the upload stream."""
        torch.cuda.current_stream(self._device).wait_event(self._done[name])

    def close(self) -> None:
        """Release the ring. No update may be running."""
        self._downloads.synchronize()
        self._fit_ring(0)

    def _download(self, part: UnitGradients) -> torch.Tensor:
        """Return the gradients in host memory, valid until the next unit's are requested."""
        place = self._places[part]
        # The update before this one is over, so its buffer is free. The buffer of `place` itself is not.
        while len(self._started) < min(place + DOWNLOAD_BUFFERS, len(self._order)):
            self._start(len(self._started))
        self._started[place].synchronize()
        return self._buffer(place)

    def _start(self, place: int) -> None:
        with torch.cuda.stream(self._downloads):
            self._buffer(place).copy_(self._order[place].shard, non_blocking=True)
        self._started.append(event_behind(self._downloads))

    def _buffer(self, place: int) -> torch.Tensor:
        source = self._order[place].shard
        tensor = self._ring[place % DOWNLOAD_BUFFERS].data
        return tensor[: source.nbytes].view(source.dtype)

    def _fit_ring(self, num_bytes: int) -> None:
        held = self._ring[0].data.nbytes if self._ring else 0
        if held == num_bytes:
            return
        for buffer in self._ring:
            buffer.release()
        wanted = DOWNLOAD_BUFFERS if num_bytes else 0
        self._ring = [HostPages(num_bytes, pinned=self._pins) for _ in range(wanted)]
        self._ledger.add(MemoryKind.HOST_GRADS, DOWNLOAD_BUFFERS * (num_bytes - held))


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
        return event_behind(self._stream)

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
        return event_behind(torch.cuda.current_stream(self._device))


def make_staging(config: EngineConfig, comm: Comm) -> WeightStaging | None:
    """Return the staging buffers for an accelerator's weights that rules on the host update; None without
    such rules."""
    block = config.zero.offload_optimizer
    if block is None or comm.device.type == "cpu":
        return None
    return WeightStaging(comm.device, pins=block.pin_memory)
