"""The buffers through which spilled weights come and go. Called by `params.py`, from two threads.

Two buffers bring weights close to their next gather; three serve updates: weights are read into one (where
the update needs them), updated in another and written from the third. None of this depends on settings of
the user, so there is always enough.

[Note: two threads] Gathers, reads ahead and windows belong to the main thread, updates to that of the
just-in-time step. Whoever uses a unit has waited for its update, so both never work on the same record; what
they share are the buffers, which the lock guards. Nobody waits for a buffer that the other thread holds: each
gives its own back.

[Note: fresh weights] New weights are written to the file, and the first ones of a step also stay in a free
buffer, where the next forward pass finds them without reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

from zerotrain.contract.memory.inputs import READ_BUFFERS, UPDATE_BUFFERS
from zerotrain.runtime.offload.host import HostPages
from zerotrain.runtime.offload.uploads import Uploads
from zerotrain.runtime.vault.chunks import Record
from zerotrain.runtime.vault.store import RecordIO, Vault
from zerotrain.runtime.zero.ledger import Kind, MemoryLedger


class _Buffer:
    """Room for one record."""

    __slots__ = ("copied", "data", "io", "pages")

    def __init__(self, data: torch.Tensor, pages: HostPages | None = None) -> None:
        self.data = data
        self.pages = pages
        """What `data` is of, where that is page-locked."""
        self.io: RecordIO | None = None
        """What moves its bytes just now."""
        self.copied: Any = None
        """Event after which the device has read it."""

    def wait(self) -> None:
        """Until its bytes are still: weights after a read, of no use after a write."""
        io = self.io
        if io is not None:
            io.wait()
            self.io = None
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


class ParamRing:
    """Of one vault."""

    def __init__(self, vault: Vault, uploads: Uploads, ledger: MemoryLedger, *, pins: bool) -> None:
        self._vault = vault
        self._uploads = uploads
        self._ledger = ledger
        self._pins = pins
        self._lock = RLock()
        self._sizes = (0, 0)
        self._to_read: list[_Buffer] = []
        """Free ones."""
        self._to_update: list[_Buffer] = []
        self._ahead: dict[Record, _Buffer] = {}
        """Weights that are on their way to the next gather, or there already."""
        self._loading: dict[Record, _Buffer] = {}
        """Weights that are read for the next update."""
        self._written: dict[Record, _Buffer] = {}
        """Weights on their way to the file, oldest first."""
        self._busy: set[Record] = set()
        """Being updated."""
        self._window: tuple[Record, _Buffer] | None = None
        """What is looked at part by part."""
        self._is_dirty = False

    def fit(self, largest: int, trained: int) -> None:
        """Have room for records of so many bytes, and for trained ones. Not during a step."""
        sizes = (max(largest, self._sizes[0]), max(trained, self._sizes[1]))
        if sizes == self._sizes:
            return
        self._empty()
        for buffers, size, count in (
            (self._to_read, sizes[0], READ_BUFFERS),
            (self._to_update, sizes[1], UPDATE_BUFFERS if sizes[1] else 0),
        ):
            for buffer in buffers:
                self._ledger.add(Kind.RING, -buffer.data.nbytes)
                if buffer.pages is not None:
                    buffer.pages.release()
            buffers[:] = [self._made(size) for _ in range(count)]
        self._sizes = sizes

    def _made(self, num_bytes: int) -> _Buffer:
        pages = HostPages(num_bytes, pinned=True) if self._pins else None
        data = self._vault.aligned(num_bytes) if pages is None else pages.data
        return _Buffer(self._ledger.count(Kind.RING, data), pages)

    @contextmanager
    def contents(self, record: Record) -> Iterator[torch.Tensor]:
        """The weights of a record, to be sent to the device."""
        self._settle(record)
        with self._lock:
            self._close_window()
            buffer = self._ahead.pop(record, None) or self._read(record)
        try:
            buffer.wait()
            yield buffer.data[: record.num_bytes]
            buffer.copied = self._uploads.mark()
        finally:
            with self._lock:
                self._to_read.append(buffer)

    def read_ahead(self, record: Record) -> bool:
        """Begin to read a record for `contents`; False where no buffer is free."""
        if record in self._busy or record in self._ahead:
            return True
        self._settle(record)
        with self._lock:
            if record in self._busy or record in self._ahead:
                return True  # meanwhile
            if self._window is not None and self._window[0] is record:
                self._close_window()
            if not self._to_read:
                return False
            self._ahead[record] = self._read(record)
        return True

    @contextmanager
    def updating(self, record: Record, *, reads: bool, following: Record | None) -> Iterator[torch.Tensor]:
        """A buffer whose contents become the record when the block ends without an error; it holds the record
        if `reads`. `following` will be next, and is read meanwhile."""
        with self._lock:
            self._busy.add(record)
            self._drop_ahead(record)
        self._settle(record)
        buffer = self._loading.pop(record, None) or self._take(record, loads=reads)
        try:
            if following is not None:
                self._load_ahead(following)
            buffer.wait()
            yield buffer.data[: record.num_bytes]
            self._store(record, buffer)
        except BaseException:
            with self._lock:
                self._to_update.append(buffer)
            raise
        finally:
            self._busy.discard(record)

    @contextmanager
    def window(self, record: Record, *, writes: bool = False, loads: bool = True) -> Iterator[torch.Tensor]:
        """A record to look at, and to change if `writes`; `loads` False = what it holds does not matter.

        It stays close until something else is wanted, as records are looked at part by part.
        """
        self._settle(record)
        with self._lock:
            if self._window is None or self._window[0] is not record:
                self._close_window()
                buffer = self._ahead.pop(record, None)
                if buffer is None:
                    buffer = self._read(record) if loads else self._free_to_read()
                self._window = (record, buffer)
            buffer = self._window[1]
            buffer.wait()
            if writes:
                self._drop_loaded(record)
                self._is_dirty = True
            yield buffer.data[: record.num_bytes]

    def forget(self, record: Record) -> None:
        """Nobody wants this record any more."""
        self._settle(record)
        with self._lock:
            if self._window is not None and self._window[0] is record:
                self._is_dirty = False
                self._close_window()
            self._drop_ahead(record)
            self._drop_loaded(record)

    def _empty(self) -> None:
        """Have all buffers free."""
        with self._lock:
            self._close_window()
            for record in [*self._ahead, *self._loading]:
                self._drop_ahead(record)
                self._drop_loaded(record)
            for record in list(self._written):
                self._settle(record)

    # --- on their way to a gather

    def _read(self, record: Record) -> _Buffer:
        buffer = self._free_to_read()
        buffer.io = self._vault.start_read(record, buffer.data[: record.num_bytes])
        return buffer

    def _free_to_read(self) -> _Buffer:
        if not self._to_read:
            self._close_window()
        if not self._to_read:
            _, guessed = self._ahead.popitem()  # another than the one that is wanted now
            self._to_read.append(guessed)
        buffer = self._to_read.pop()
        buffer.wait()
        return buffer

    def _close_window(self) -> None:
        if self._window is None:
            return
        (record, buffer), self._window = self._window, None
        is_dirty, self._is_dirty = self._is_dirty, False
        self._to_read.append(buffer)
        if is_dirty:
            self._vault.start_write(record, buffer.data[: record.num_bytes]).wait()

    def _drop_ahead(self, record: Record) -> None:
        """The record will be written: what was read for a gather is out of date."""
        if self._window is not None and self._window[0] is record:
            self._close_window()
        if (buffer := self._ahead.pop(record, None)) is not None:
            buffer.wait()
            self._to_read.append(buffer)

    # --- updates

    def _load_ahead(self, record: Record) -> None:
        for guessed in list(self._loading):
            self._drop_loaded(guessed)
        self._settle(record)
        with self._lock:
            if self._window is not None and self._window[0] is record:
                self._close_window()
        self._loading[record] = self._take(record, loads=True)

    def _take(self, record: Record, *, loads: bool) -> _Buffer:
        if not self._to_update:
            self._settle(next(iter(self._written)))
        with self._lock:
            buffer = self._to_update.pop()
        if loads:
            buffer.io = self._vault.start_read(record, buffer.data[: record.num_bytes])
        return buffer

    def _drop_loaded(self, record: Record) -> None:
        if (buffer := self._loading.pop(record, None)) is not None:
            buffer.wait()
            self._to_update.append(buffer)

    def _store(self, record: Record, buffer: _Buffer) -> None:
        data = buffer.data[: record.num_bytes]
        with self._lock:
            kept = self._to_read.pop() if self._to_read else None
        if kept is not None:  # see [Note: fresh weights]
            kept.wait()
            kept.data[: record.num_bytes].copy_(data)
        buffer.io = self._vault.start_write(record, data)
        with self._lock:
            self._written[record] = buffer
            if kept is not None:
                self._ahead[record] = kept

    def _settle(self, record: Record) -> None:
        """Wait until a record is in the file, if it is on its way there."""
        buffer = self._written.get(record)
        if buffer is None:
            return
        if (io := buffer.io) is not None:
            io.wait()
        with self._lock:
            if self._written.get(record) is buffer:
                del self._written[record]
                buffer.io = None
                self._to_update.append(buffer)
