"""Buffers for reading and writing spilled weights. Called by `params.py`, from two threads.

Two buffers read weights ahead of their next gather; three serve updates: weights are read into one (where the
update needs them), updated in another and written from the third. None of these numbers depends on settings
of the user, so there are always enough buffers.

[Note: two threads] Gathers, reads ahead and windows belong to the main thread, updates to the thread of the
just-in-time step. A unit is used only after its update was waited for, so the threads never work on the same
record; they share only the buffers, which the lock guards. Neither thread waits for a buffer that the other
one holds: each returns its own.

[Note: fresh weights] New weights are written to the file, and the first ones of a step also stay in a free
buffer, where the next forward pass finds them without reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING

import torch

from zerotrain.contract.memory.inputs import READ_BUFFERS, UPDATE_BUFFERS
from zerotrain.runtime.offload.pages import BufferPool, RecordBuffer
from zerotrain.runtime.offload.transfer import Uploads
from zerotrain.runtime.zero.ledger import MemoryLedger

if TYPE_CHECKING:
    from zerotrain.runtime.spill.chunks import Record
    from zerotrain.runtime.spill.store import SpillStore


class ParamRing:
    """The buffers of one spill store: see the module's text."""

    def __init__(
        self, spill_store: SpillStore, uploads: Uploads, ledger: MemoryLedger, *, pins: bool
    ) -> None:
        """Create the pools, without buffers yet. `pins`: the buffers are page-locked."""
        self._to_read = BufferPool(READ_BUFFERS, ledger, pins=pins)
        self._to_update = BufferPool(UPDATE_BUFFERS, ledger, pins=pins)
        lock = RLock()
        self.updates = UpdateBuffers(spill_store, self._to_update, lock)
        self.gathers = GatherBuffers(spill_store, self._to_read, lock, self.updates, uploads)

    def fit(self, largest: int, trained: int) -> None:
        """Provide buffers for records of up to `largest` bytes, and of up to `trained` bytes for trained
        ones. Not during a step."""
        if largest > self._to_read.num_bytes or trained > self._to_update.num_bytes:
            self.gathers.empty()
            self.updates.empty()
            self._to_read.grow(largest)
            self._to_update.grow(trained)

    @contextmanager
    def updating(self, record: Record, *, reads: bool, following: Record | None) -> Iterator[torch.Tensor]:
        """Yield a buffer whose contents become the record when the block ends without an error; it holds the
        record if `reads`. `following` is updated next, and is read meanwhile."""
        self.updates.begin(record)
        try:
            self.gathers.drop(record)
            if following is not None:
                self.gathers.flush(following)
            with self.updates.buffer_of(record, reads=reads, following=following) as data:
                yield data
                kept = self.gathers.borrow()
                if kept is not None:
                    kept.data[: record.num_bytes].copy_(data)  # before it is sealed: [Note: fresh weights]
            if kept is not None:
                self.gathers.keep(record, kept)
        finally:
            self.updates.end(record)

    def forget(self, record: Record) -> None:
        """Wait for the transfers of a record that is not used any more, and free its buffers."""
        self.updates.settle(record)
        self.gathers.forget(record)
        self.updates.drop(record)


class UpdateBuffers:
    """Buffers of weights that are read for an update, updated, or written."""

    def __init__(self, spill_store: SpillStore, pool: BufferPool, lock: RLock) -> None:
        self._spill_store = spill_store
        self._pool = pool
        self._lock = lock
        self._loading: dict[Record, RecordBuffer] = {}
        """Buffers that hold, or will hold, the weights for the next update, by record."""
        self._written: dict[Record, RecordBuffer] = {}
        """Buffers that are being written to the file, by record, oldest first."""
        self._busy: set[Record] = set()

    def begin(self, record: Record) -> None:
        """Mark the record as being updated."""
        with self._lock:
            self._busy.add(record)

    def end(self, record: Record) -> None:
        """Mark the record's update as finished."""
        with self._lock:
            self._busy.discard(record)

    def is_busy(self, record: Record) -> bool:
        """Return whether the record is being updated."""
        return record in self._busy

    @contextmanager
    def buffer_of(self, record: Record, *, reads: bool, following: Record | None) -> Iterator[torch.Tensor]:
        """Yield the buffer of `ParamRing.updating`."""
        self.settle(record)
        buffer = self._loading.pop(record, None) or self._take(record, loads=reads)
        try:
            if following is not None:
                self._load_ahead(following)
            buffer.wait()
            data = buffer.data[: record.num_bytes]
            yield data
            buffer.io = self._spill_store.start_write(record, data)
        except BaseException:
            with self._lock:
                self._pool.free.append(buffer)
            raise
        with self._lock:
            self._written[record] = buffer

    def settle(self, record: Record) -> None:
        """Wait until a record is in the file, if it is being written there."""
        buffer = self._written.get(record)
        if buffer is None:
            return
        if (io := buffer.io) is not None:
            io.wait()
        with self._lock:
            if self._written.get(record) is buffer:
                del self._written[record]
                buffer.io = None
                self._pool.free.append(buffer)

    def drop(self, record: Record) -> None:
        """Discard what was read of a record, as it is out of date."""
        if (buffer := self._loading.pop(record, None)) is not None:
            buffer.wait()
            with self._lock:
                self._pool.free.append(buffer)

    def empty(self) -> None:
        """Free all buffers."""
        for record in list(self._loading):
            self.drop(record)
        for record in list(self._written):
            self.settle(record)

    def _load_ahead(self, record: Record) -> None:
        for guessed in list(self._loading):
            self.drop(guessed)
        self.settle(record)
        self._loading[record] = self._take(record, loads=True)

    def _take(self, record: Record, *, loads: bool) -> RecordBuffer:
        if not self._pool.free:
            self.settle(next(iter(self._written)))
        with self._lock:
            buffer = self._pool.free.pop()
        if loads:
            buffer.io = self._spill_store.start_read(record, buffer.data[: record.num_bytes])
        return buffer


class GatherBuffers:
    """Buffers of weights for gathers, and a window on the record that is accessed part by part."""

    def __init__(
        self, spill_store: SpillStore, pool: BufferPool, lock: RLock, updates: UpdateBuffers, uploads: Uploads
    ) -> None:
        self._spill_store = spill_store
        self._pool = pool
        self._lock = lock
        self._updates = updates
        self._uploads = uploads
        self._ahead: dict[Record, RecordBuffer] = {}
        self._window: tuple[Record, RecordBuffer] | None = None
        self._is_dirty = False

    @contextmanager
    def contents(self, record: Record) -> Iterator[torch.Tensor]:
        """Yield the weights of a record, to be sent to the device."""
        self._updates.settle(record)
        with self._lock:
            self._close_window()
            buffer = self._ahead.pop(record, None) or self._read(record)
        try:
            buffer.wait()
            yield buffer.data[: record.num_bytes]
            buffer.copied = self._uploads.mark()
        finally:
            with self._lock:
                self._pool.free.append(buffer)

    def read_ahead(self, record: Record) -> bool:
        """Start to read a record for `contents`; return False where no buffer is free."""
        if self._updates.is_busy(record) or record in self._ahead:
            return True
        self._updates.settle(record)
        with self._lock:
            self.flush(record)
            if self._updates.is_busy(record) or record in self._ahead:
                return True  # in the meantime
            if not self._pool.free:
                return False
            self._ahead[record] = self._read(record)
        return True

    @contextmanager
    def window(self, record: Record, *, writes: bool = False, loads: bool = True) -> Iterator[torch.Tensor]:
        """Yield a record to read, and to change if `writes`; with `loads` False its present contents do not
        matter.

        The record stays in its buffer until another one needs it, as records are accessed part by part.
        """
        self._updates.settle(record)
        with self._lock:
            if self._window is None or self._window[0] is not record:
                self._close_window()
                buffer = self._ahead.pop(record, None)
                if buffer is None:
                    buffer = self._read(record) if loads else self._take()
                self._window = (record, buffer)
            buffer = self._window[1]
            buffer.wait()
            if writes:
                self._updates.drop(record)
                self._is_dirty = True
            yield buffer.data[: record.num_bytes]

    def flush(self, record: Record) -> None:
        """Write to the file what was changed through the record's window."""
        with self._lock:
            if self._window is not None and self._window[0] is record:
                self._close_window()

    def drop(self, record: Record) -> None:
        """Discard what was read of a record that is about to be written."""
        with self._lock:
            self.flush(record)
            if (buffer := self._ahead.pop(record, None)) is not None:
                buffer.wait()
                self._pool.free.append(buffer)

    def forget(self, record: Record) -> None:
        """Discard what was read of a record as `drop` does, and also what was written through its window."""
        with self._lock:
            if self._window is not None and self._window[0] is record:
                self._is_dirty = False
            self.drop(record)

    def borrow(self) -> RecordBuffer | None:
        """Return a free buffer for fresh weights that needs no waiting; None where there is none."""
        with self._lock:
            for index, buffer in enumerate(self._pool.free):
                if buffer.io is None and buffer.is_copied:
                    return self._pool.free.pop(index)
        return None

    def keep(self, record: Record, buffer: RecordBuffer) -> None:
        """Keep the borrowed buffer, which holds the weights for the record's next gather."""
        with self._lock:
            self._ahead[record] = buffer

    def empty(self) -> None:
        """Free all buffers."""
        with self._lock:
            self._close_window()
            for record in list(self._ahead):
                self.drop(record)

    def _read(self, record: Record) -> RecordBuffer:
        buffer = self._take()
        buffer.io = self._spill_store.start_read(record, buffer.data[: record.num_bytes])
        return buffer

    def _take(self) -> RecordBuffer:
        self._close_window()
        if not self._pool.free:
            _, guessed = self._ahead.popitem()  # not the record that is needed now
            self._pool.free.append(guessed)
        buffer = self._pool.free.pop(0)  # the one that was sent to the device first
        buffer.wait()
        return buffer

    def _close_window(self) -> None:
        if self._window is None:
            return
        (record, buffer), self._window = self._window, None
        is_dirty, self._is_dirty = self._is_dirty, False
        self._pool.free.append(buffer)
        if is_dirty:
            self._spill_store.start_write(record, buffer.data[: record.num_bytes]).wait()
