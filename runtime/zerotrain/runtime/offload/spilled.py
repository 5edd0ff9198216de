"""States in the spill store: sealed chunks on disk, processed through a ring of tiles.

A chunk holds the arrays of 16,384 elements one after another, so that a tile is opened, updated and sealed
before it leaves the caches. Called through `tiers.StateTiers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

import torch

from zerotrain.contract.memory.inputs import CHUNK_NUMEL
from zerotrain.runtime.offload.states import (
    REMAINDER,
    Block,
    Encoding,
    UnitStates,
    block_of,
    stored_dtype,
    stored_names,
)
from zerotrain.runtime.spill.chunks import Record
from zerotrain.runtime.spill.store import SpillStore
from zerotrain.runtime.spill.tile_pipeline import Tile
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.rounding import split
from zerotrain.runtime.zero.state import MASTER
from zerotrain.runtime.zero.unit import Unit

PART_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int16: "i16"}
"""The sealer's names of dtypes."""

_WINDOW_CHUNKS = 64
"""Number of chunks that are in memory at a time when states are read or written outside of a step."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Layout of a record's elements in its chunks: these arrays, in order, one after another."""

    arrays: Mapping[str, torch.dtype]
    """Dtypes by name."""
    numel: int

    @property
    def width(self) -> int:
        """Bytes per element."""
        return sum(dtype.itemsize for dtype in self.arrays.values())

    @property
    def chunk_bytes(self) -> tuple[int, ...]:
        """Bytes of every chunk."""
        starts = range(0, self.numel, CHUNK_NUMEL)
        return tuple(min(CHUNK_NUMEL, self.numel - start) * self.width for start in starts)

    @property
    def dtypes(self) -> str:
        """The sealer's names of the dtypes, in order, separated by commas."""
        return ",".join(PART_DTYPES[dtype] for dtype in self.arrays.values())

    def chunks(self, data: torch.Tensor, first: int) -> Iterator[tuple[int, int, dict[str, torch.Tensor]]]:
        """Yield `(start, stop, arrays by name)` of the chunks from `first` on in `data`, which is 1-D
        uint8."""
        offset = 0
        while offset < data.numel():
            start = first * CHUNK_NUMEL
            count = min(CHUNK_NUMEL, self.numel - start)
            arrays = {}
            for name, dtype in self.arrays.items():
                size = count * dtype.itemsize
                arrays[name] = data[offset : offset + size].view(dtype)
                offset += size
            yield start, start + count, arrays
            first += 1


class _Window:
    """Consecutive chunks of one record in memory, read or about to be written. A chunk has all kinds side by
    side, and callers go through a unit one kind after the other."""

    def __init__(self, states: SpillStates, first: int, last: int) -> None:
        self.states, self.first, self.last = states, first, last
        self.data = states.spill_store.read_chunks(states.record, first, last)
        self._arrays = {start: arrays for start, _, arrays in states.layout.chunks(self.data, first)}
        self.is_changed = False

    def arrays(self, chunk: int) -> tuple[dict[str, torch.Tensor], int]:
        """Return the arrays of a chunk, and its first element."""
        start = chunk * CHUNK_NUMEL
        return self._arrays[start], start

    def flush(self) -> None:
        """Write the chunks if they were changed."""
        if self.is_changed:
            self.states.spill_store.write_chunks(self.states.record, self.first, self.last, self.data)
            self.is_changed = False


class WindowCache:
    """The single window that is in memory, for all units of a tier."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._window: _Window | None = None

    def get(self, states: SpillStates, chunk: int) -> _Window:
        """Return the window around a chunk."""
        found = self._window
        if found is None or found.states is not states or not found.first <= chunk < found.last:
            self.close()
            first = chunk - chunk % _WINDOW_CHUNKS
            last = min(first + _WINDOW_CHUNKS, len(states.layout.chunk_bytes))
            found = self._window = _Window(states, first, last)
            self._ledger.add(MemoryKind.RING, found.data.nbytes)
        return found

    def close(self) -> None:
        """Write the window back and release its memory. Called before a step and before a record's
        removal."""
        if (window := self._window) is not None:
            window.flush()
            self._window = None
            self._ledger.add(MemoryKind.RING, -window.data.nbytes)


class SpillStates(UnitStates):
    """States of one unit in one record of the spill store."""

    is_spilled = True

    def __init__(
        self,
        unit: Unit,
        kinds: tuple[str, ...],
        encoding: Encoding,
        *,
        spill_store: SpillStore,
        record: Record,
        layout: ChunkLayout,
        cache: WindowCache,
    ) -> None:
        """Take `record`, a record of the spill_store for `layout`, without contents so far."""
        super().__init__(unit, kinds, encoding)
        self.spill_store, self.record, self.layout = spill_store, record, layout
        self._cache = cache

    def load(self, name: str, start: int, stop: int) -> torch.Tensor:
        values = torch.empty(stop - start, dtype=self.layout.arrays[name])
        position = 0
        for _, arrays, low, high in self._chunks(start, stop):
            values[position : position + high - low] = arrays[name][low:high]
            position += high - low
        return values

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        position = 0
        for window, arrays, low, high in self._chunks(start, start + values.numel()):
            arrays[name][low:high].copy_(values[position : position + high - low])
            position += high - low
            window.is_changed = True

    @torch.no_grad()
    def take_initial(self, initial: torch.Tensor) -> None:
        """Write every chunk once: the master's part of it, and zeros."""
        with self.spill_store.sweep(self.record.tiles(), writes=True, reads=False) as sweep:
            for tile in sweep:
                tile.data.zero_()
                for start, stop, arrays in self.layout.chunks(tile.data, tile.ref.first):
                    if self.encoding is Encoding.FULL:
                        arrays[MASTER].copy_(initial[start:stop])
                    elif self.encoding is Encoding.SPLIT:
                        arrays[REMAINDER].copy_(split(initial[start:stop])[1])
                tile.seal()

    def open_blocks(self, tile: Tile, weights: torch.Tensor) -> Iterator[Block]:
        """Open a tile, yield it chunk by chunk, to be updated with the unit's weights, and seal it."""
        tile.open()
        for start, stop, arrays in self.layout.chunks(tile.data, tile.ref.first):
            yield block_of(self, arrays, weights[start:stop], start=start)
        tile.seal()

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[_Window, dict[str, torch.Tensor], int, int]]:
        """Yield `(window, arrays, low, high)`: elements `[low, high)` of the chunk's arrays are next."""
        while start < stop:
            chunk = start // CHUNK_NUMEL
            window = self._cache.get(self, chunk)
            arrays, first = window.arrays(chunk)
            low, high = start - first, min(stop - first, CHUNK_NUMEL)
            yield window, arrays, low, high
            start = first + high


class StateSweep:
    """One pass over spilled states, unit by unit: the tiles of the next unit are read while those of the last
    one are written. Used by one thread, from the first `tiles` to `end`."""

    def __init__(self, spill_store: SpillStore, order: Sequence[SpillStates]) -> None:
        self._spill_store, self._order = spill_store, order
        self._stack = ExitStack()
        self._tiles: Iterator[Tile] | None = None

    def tiles(self, states: SpillStates) -> Iterator[Tile]:
        """Yield the tiles of the next states in the order, sealed, and to be left sealed."""
        if self._tiles is None:
            refs = [ref for each in self._order for ref in each.record.tiles()]
            self._tiles = iter(self._stack.enter_context(self._spill_store.sweep(refs, writes=True)))
        return islice(self._tiles, len(states.record.tiles()))

    def end(self, error: BaseException | None = None) -> None:
        """Wait until everything is stored; `error`: what breaks the sweep off. Raises the first error. A
        second call does nothing."""
        trace = None if error is None else error.__traceback__
        self._stack.__exit__(None if error is None else type(error), error, trace)


class StateRecords:
    """The records of one engine's states in a spill store that engines may share, and their accounting."""

    def __init__(self, spill_store: SpillStore, ledger: MemoryLedger) -> None:
        self._spill_store, self._ledger = spill_store, ledger
        self.cache = WindowCache(ledger)
        self._ring_bytes = 0

    def add(self, unit: Unit, kinds: tuple[str, ...], encoding: Encoding, numel: int) -> SpillStates:
        """Allocate a record for the states of a unit, without contents. Raises SpillDoesNotFit."""
        names = stored_names(kinds, encoding)
        layout = ChunkLayout({name: stored_dtype(unit, name) for name in names}, numel)
        tag_bytes = self._spill_store.memory.tags
        record = self._spill_store.add(unit.name, layout.chunk_bytes, layout=layout.dtypes)
        self._spill_store.allocate()
        self._count(record.num_bytes, self._spill_store.memory.tags - tag_bytes)
        return SpillStates(
            unit,
            kinds,
            encoding,
            spill_store=self._spill_store,
            record=record,
            layout=layout,
            cache=self.cache,
        )

    def open_sweep(self, order: Sequence[SpillStates]) -> StateSweep:
        """Return a sweep over these states, in this order."""
        self.cache.close()
        return StateSweep(self._spill_store, order)

    def forget(self, states: SpillStates) -> None:
        """Release the record of these states."""
        self.cache.close()
        tag_bytes = self._spill_store.memory.tags
        self._spill_store.forget(states.record)
        self._count(-states.record.num_bytes, self._spill_store.memory.tags - tag_bytes)

    def _count(self, file_bytes: int, tag_bytes: int) -> None:
        self._ledger.add(MemoryKind.SPILL, file_bytes)
        self._ledger.add(MemoryKind.TAGS, tag_bytes)
        ring_bytes = self._spill_store.memory.ring
        self._ledger.add(MemoryKind.RING, ring_bytes - self._ring_bytes)
        self._ring_bytes = ring_bytes
