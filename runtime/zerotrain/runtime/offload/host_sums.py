"""Sums of gradients in host memory, beside an accelerator whose optimizer states are in host memory, too.

`zero.gradient_sum` adds the ranks' parts of a unit's gradients to its sum. Where `HostSums` makes that sum,
the parts leave the accelerator during backward, and the update finds them where it works.

[Note: sums in tiles] The parts are added on the device, tile by tile, and each tile is sent to page-locked
host memory at once. If the sum has contents (a step's second micro-batch), the tile is first brought back. So
every addition is made in the order, and has the bits, of a sum that stays on the device; no core of the host
adds anything, and a step's last addition also gives the sum of squares. One stream brings tiles up, another
adds and sends them down. With two tiles both directions of the bus are used at the same time. The main stream
waits for neither, except that the parts of one unit must have been read before the next unit's are taken: so
one unit's parts stay alive beside those that backward computes.

Where the accelerator is the CPU itself there are no such sums. Tests make them there, without streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.memory.inputs import SUM_TILE_NUMEL, SUM_TILES
from zerotrain.contract.memory.moved import moves_gradients
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.streams import event_behind
from zerotrain.runtime.comm.sums import accumulate_, square_sum
from zerotrain.runtime.offload.pages import HostPages
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.unit import Unit

tile_numel = SUM_TILE_NUMEL


def is_host(device: torch.device) -> bool:
    """Return whether the device computes in host memory, where sums have nowhere to go."""
    return device.type == "cpu"


class HostSums:
    """Maker of the sums of one engine, and the streams and tiles that they share."""

    def __init__(self, device: torch.device, *, leaves: Callable[[Unit], bool], pins: bool) -> None:
        """`leaves` returns whether the states of a unit are offloaded; `pins`: the sums are page-locked."""
        self._leaves = leaves
        self._pins = pins and device.type == "cuda"
        self._copies = _Copies(device)

    def make(self, unit: Unit, ledger: MemoryLedger) -> HostSum | None:
        """Return memory for the sum of this rank's part of a unit; None = it stays on the device."""
        numel = unit.stop - unit.start
        if not self._leaves(unit) or not numel:
            return None
        dtype = unit.placement.sum_dtype
        self._copies.fit(numel, dtype, ledger)
        return HostSum(numel, dtype, self._copies, ledger, pins=self._pins)


class HostSum:
    """The sum of one unit's gradients, an implementation of `zero.gradient_sum.MovedSum`."""

    def __init__(
        self, numel: int, dtype: torch.dtype, copies: _Copies, ledger: MemoryLedger, *, pins: bool
    ) -> None:
        self._pages = HostPages(dtype.itemsize * numel, pinned=pins)
        self._ledger = ledger
        self._copies = copies
        self.values = self._pages.data.view(dtype)
        ledger.count(MemoryKind.HOST_GRADS, self.values)
        self._landed: Any = None
        """CUDA event behind the last copy into `values`."""
        self._squares: list[torch.Tensor] = []
        self._seen_version = -1

    def wait(self) -> None:
        """Block until `values` may be read and written."""
        if self._landed is not None:
            self._landed.synchronize()
            self._landed = None
        self._copies.release()

    @torch.no_grad()
    def add(self, parts: Sequence[torch.Tensor], scale: float, *, overwrite: bool) -> None:
        """Run `accumulate_` into `values`; see [Note: sums in tiles]."""
        self._squares.clear()
        self._landed = self._copies.add(
            self.values, parts, scale, after=self._landed, overwrite=overwrite, squares=self._squares
        )
        self._seen_version = self.values._version

    def squares(self) -> list[torch.Tensor]:
        """Return the sums of squares of the parts of `values`, on the device; empty if something else wrote
        into `values` since they were added."""
        self.wait()
        return self._squares if self.values._version == self._seen_version else []

    def drop(self) -> None:
        """Free the memory."""
        self.wait()
        self._ledger.add(MemoryKind.HOST_GRADS, -self.values.nbytes)
        self._pages.release()


class _Copies:
    """The two streams of one engine and the tiles that pass over them; on a CPU everything is done at
    once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = _new_stream(device), _new_stream(device)
        self._tiles: list[torch.Tensor] = []
        self._sent: list[Any] = []
        """Events behind the last copy from each tile."""
        self._next_slot = 0
        self._ledger: MemoryLedger | None = None
        self._held: tuple[Any, Sequence[torch.Tensor]] | None = None
        """Parts that the device may still read, and the event after which it does not."""

    def fit(self, numel: int, dtype: torch.dtype, ledger: MemoryLedger) -> None:
        """Make the tiles large enough for a sum of `numel` elements; all sums are of one dtype."""
        wanted = min(numel, tile_numel)
        held = self._tiles[0].numel() if self._tiles else 0
        if wanted > held:
            for sent in self._sent:
                if sent is not None:
                    sent.synchronize()  # the main stream may use the memory of the old tiles at once
            with _on(self._down):  # whose memory it is when an engine is dropped during its copies
                self._tiles = [
                    torch.empty(wanted, dtype=dtype, device=self._device) for _ in range(SUM_TILES)
                ]
            self._sent = [None] * SUM_TILES
            ledger.add(MemoryKind.GRADS, SUM_TILES * dtype.itemsize * (wanted - held))
        self._ledger = ledger

    def add(
        self,
        values: torch.Tensor,
        parts: Sequence[torch.Tensor],
        scale: float,
        *,
        after: Any,
        overwrite: bool,
        squares: list[torch.Tensor],
    ) -> Any:
        """Add parts to `values` when event `after` has passed, and put the sums of squares of the result into
        `squares`; return the event behind the last copy."""
        self._free_previous()
        ready = self._mark_main()
        for stream in (self._up, self._down):
            _wait(stream, ready)
        _wait(self._up, after)
        for start in range(0, values.numel(), self._tiles[0].numel()):
            slot, self._next_slot = self._next_slot, (self._next_slot + 1) % SUM_TILES
            tile = self._tiles[slot][: values.numel() - start]
            here = slice(start, start + tile.numel())
            if not overwrite:
                _wait(self._up, self._sent[slot])
                with _on(self._up):
                    tile.copy_(values[here], non_blocking=True)
                _wait(self._down, event_behind(self._up))
            with _on(self._down):
                accumulate_(tile, [part[here] for part in parts], scale, overwrite=overwrite)
                squares.append(square_sum(tile))
                values[here].copy_(tile, non_blocking=True)
            self._sent[slot] = event_behind(self._down)
        return self._hold(parts)

    def release(self) -> None:
        """Drop parts that the device has read."""
        if self._held is not None and self._held[0].query():
            self._drop_held()

    def _free_previous(self) -> None:
        """Make the main stream wait until the unit before is read, whose memory it may then use again."""
        if self._held is not None:
            torch.cuda.current_stream(self._device).wait_event(self._held[0])
            self._drop_held()

    def _hold(self, parts: Sequence[torch.Tensor]) -> Any:
        if self._down is None:
            return None
        event = event_behind(self._down)
        self._held = event, list(parts)
        self._count(parts, 1)
        return event

    def _drop_held(self) -> None:
        assert self._held is not None
        self._count(self._held[1], -1)
        self._held = None

    def _count(self, parts: Sequence[torch.Tensor], sign: int) -> None:
        assert self._ledger is not None
        self._ledger.add(MemoryKind.REDUCE, sign * sum(part.nbytes for part in parts))

    def _mark_main(self) -> Any:
        return None if self._down is None else event_behind(torch.cuda.current_stream(self._device))


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait(stream: Any, event: Any) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def make_host_sums(config: EngineConfig, comm: Comm, *, leaves: Callable[[Unit], bool]) -> HostSums | None:
    """Return the maker of sums in host memory; None where all gradients stay on their device."""
    block = config.zero.offload_optimizer
    if block is None or not moves_gradients(config, on_host=is_host(comm.device)):
        return None
    return HostSums(comm.device, leaves=leaves, pins=block.pin_memory)
