"""A pass over tiles: the next ones are read and the last ones written while one is worked on.

Made by `SpillStore`; iterated by the optimizer's step over the spill store and by state access.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from zerotrain.runtime.spill.chunk_io import ChunkIO
from zerotrain.runtime.spill.chunks import TileRef
from zerotrain.runtime.spill.errors import SpillError
from zerotrain.runtime.spill.ring import Ring

if TYPE_CHECKING:
    from zerotrain.runtime._native import UpdateTask


MAX_INTERRUPTS = 4
"""Greatest number of interrupted waits for one tile while a sweep ends; after them the spill store is
lost."""


class SweepLock:
    """The lock of the running sweep, which raises an error when a thread would wait for itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def acquire(self) -> None:
        """Wait for the other sweep to end. Raises SpillError inside of a sweep of this thread."""
        if self._owner == threading.get_ident():
            raise SpillError("this thread is inside of a sweep of the spill store; leave it first")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def release(self) -> None:
        """Release the lock for the next sweep."""
        self._owner = None
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class TileState(Enum):
    """State of a tile's bytes."""

    AS_READ = auto()  # sealed, the same as in the file
    OPEN = auto()  # plain
    SEALED = auto()  # sealed again, to be written


@dataclass(slots=True)
class SweepStats:
    """Amounts that a sweep moved, and the time that it had to wait."""

    num_tiles: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    wait_s: float = 0.0
    """Seconds in which only the drive was at work."""
    total_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes moved in both directions."""
        return self.bytes_read + self.bytes_written

    def add(self, other: SweepStats) -> None:
        """Add the other's values, field by field."""
        self.num_tiles += other.num_tiles
        self.bytes_read += other.bytes_read
        self.bytes_written += other.bytes_written
        self.wait_s += other.wait_s
        self.total_s += other.total_s


class Tile:
    """A tile in memory, valid until the loop goes on to the next."""

    def __init__(self, chunk_io: ChunkIO, ref: TileRef, data: torch.Tensor, state: TileState) -> None:
        self.ref = ref
        self.data = data
        """The chunks back to back (uint8, 1-D); plain while the tile is open."""
        self.state = state
        self._chunk_io = chunk_io

    def open(self) -> None:
        """Verify and decrypt. Raises SpillIntegrityError."""
        self._expect(TileState.AS_READ, "opened")
        self._chunk_io.open(self.ref, self.data)
        self.state = TileState.OPEN

    def seal(self) -> None:
        """Encrypt; the sweep writes the tile once the loop goes on."""
        self._expect(TileState.OPEN, "sealed")
        self._chunk_io.seal(self.ref, self.data)
        self.state = TileState.SEALED

    def update(self, task: UpdateTask, *, origin: int = 0) -> None:
        """Open, update and seal, chunk by chunk; `origin`: the task's element where the record starts."""
        self._expect(TileState.AS_READ, "updated")
        self._chunk_io.update(self.ref, self.data, task, origin)
        self.state = TileState.SEALED

    def _expect(self, state: TileState, done: str) -> None:
        if self.state is not state:
            raise SpillError(
                f"a tile of record {self.ref.record.name!r} cannot be {done}: it is {self.state.name}"
            )


@dataclass(slots=True)
class _InFlight:
    ref: TileRef
    buffer: torch.Tensor
    ticket: int | None


class Sweep:
    """A context manager and iterator over its tiles, in the order given. Leaving it waits for the writes."""

    def __init__(
        self,
        chunk_io: ChunkIO,
        tiles: Sequence[TileRef],
        *,
        reads: bool,
        writes: bool,
        lock: SweepLock,
        ring: Callable[[], Ring],
        totals: SweepStats,
    ) -> None:
        self.stats = SweepStats()
        self._chunk_io, self._tiles = chunk_io, tiles
        self._reads, self._writes = reads, writes
        self._sweep_lock, self._make_ring, self._totals = lock, ring, totals
        self._ring: Ring
        self._next = 0  # index of the next tile to be read
        self._ahead: deque[_InFlight] = deque()
        self._behind: deque[_InFlight] = deque()
        self._tile: Tile | None = None
        self._now: _InFlight  # the entry of `_tile`
        self._started_s = 0.0

    def __enter__(self) -> Self:
        self._chunk_io.usable()
        self._sweep_lock.acquire()
        try:
            self._chunk_io.usable()
            self._ring = self._make_ring()
        except BaseException:
            self._sweep_lock.release()
            raise
        self._started_s = perf_counter()
        return self

    def __iter__(self) -> Iterator[Tile]:
        while True:
            self._retire_tile()
            self._read_ahead()
            if not self._ahead:
                break
            entry = self._ahead.popleft()
            self._tile = Tile(
                self._chunk_io,
                entry.ref,
                entry.buffer[: entry.ref.num_bytes],
                TileState.AS_READ if self._reads else TileState.OPEN,
            )
            self._now = entry
            self._wait(entry)
            self.stats.num_tiles += 1
            yield self._tile

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._retire_tile()
        except BaseException as late:
            error = late
            raise
        finally:
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        """Wait until nothing is under way, or mark the spill store as failed; a broken pass with writes is
        final."""
        broken, is_clear = error, False
        try:
            entries = [*self._behind, *self._ahead, *([] if self._tile is None else [self._now])]
            for entry in entries:
                late = self._end(entry)
                broken = broken or late
                if entry.ticket is None:
                    self._ring.give_back(entry.buffer)
            is_clear = all(entry.ticket is None for entry in entries)
        except BaseException as late:
            broken = broken or late
            raise
        finally:
            if not is_clear or (broken is not None and self._writes):
                self._chunk_io.fail(self._broken_off(broken))
            self.stats.total_s = perf_counter() - self._started_s
            self._totals.add(self.stats)
            self._sweep_lock.release()
        if error is None and broken is not None:
            raise broken

    def _end(self, entry: _InFlight) -> BaseException | None:
        """Wait, also where the wait is interrupted; return the first error that came in between."""
        first: BaseException | None = None
        for _ in range(MAX_INTERRUPTS):
            try:
                self._wait(entry)
            except BaseException as error:
                first = first or error
            if entry.ticket is None:
                break
        return first

    def _broken_off(self, by: BaseException | None) -> SpillError:
        stopped = SpillError(
            f"the spill store of rank {self._chunk_io.identity.rank}: a pass that "
            f"{'writes' if self._writes else 'reads'} was broken off after {self.stats.num_tiles} of "
            f"{len(self._tiles)} tiles by {type(by).__name__}: {by}"
        )
        stopped.__cause__ = by
        return stopped

    def _read_ahead(self) -> None:
        """Keep one tile for now and half of the other buffers ahead of it."""
        while self._next < len(self._tiles) and len(self._ahead) <= (self._ring.num_tiles - 1) // 2:
            buffer = self._ring.take()
            if buffer is None:
                if not self._behind:
                    break
                self._wait(self._behind[0])
                buffer = self._behind.popleft().buffer
            ref = self._tiles[self._next]
            self._next += 1
            entry = _InFlight(ref, buffer, None)
            self._ahead.append(entry)
            if self._reads:
                entry.ticket = self._chunk_io.read(ref, buffer[: ref.num_bytes])
                self.stats.bytes_read += ref.num_bytes

    def _retire_tile(self) -> None:
        """Start to write the tile that the loop has left."""
        if self._tile is None:
            return
        tile = self._tile
        entry = self._now
        if self._writes and tile.state is TileState.OPEN:
            raise SpillError(f"a tile of record {tile.ref.record.name!r} was left open by a pass that writes")
        if tile.state is TileState.SEALED:
            if not self._writes:
                raise SpillError(
                    f"a tile of record {tile.ref.record.name!r} was changed by a pass that only reads"
                )
            entry.ticket = self._chunk_io.write(tile.ref, tile.data)
            self.stats.bytes_written += tile.ref.num_bytes
        self._tile = None
        self._behind.append(entry)

    def _wait(self, entry: _InFlight) -> None:
        if entry.ticket is None:
            return
        started = perf_counter()
        try:
            self._chunk_io.wait(entry.ticket, entry.ref)
            entry.ticket = None
        except (SpillError, ValueError):
            entry.ticket = None  # failed for good, or reported before to a wait that was interrupted
            raise
        finally:
            self.stats.wait_s += perf_counter() - started
