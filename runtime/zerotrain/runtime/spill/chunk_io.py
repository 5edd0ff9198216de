"""Reads and writes of sealed chunks: the spill file and the sealer together. Used by sweeps and single
records.

The first error is final: after it the file may hold other bytes than memory expects, so every later call
raises it again. One operation is tried twice: bytes that fail authentication are read once more, as a
transfer can corrupt them while the bytes on the drive are intact.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerotrain.runtime._native import SpillFile
from zerotrain.runtime.spill.chunks import TileRef
from zerotrain.runtime.spill.errors import SpillError, SpillIOError
from zerotrain.runtime.spill.seal import Sealer, SpillIdentity, SpillIntegrityError

if TYPE_CHECKING:
    from zerotrain.runtime._native import UpdateTask


@dataclass(slots=True)
class SpillFaults:
    """Counts of faults, for the metrics; valid also after the spill store has failed."""

    io_errors: int = 0
    """Number of reads and writes that the system refused."""
    auth_failures: int = 0
    """Number of reads whose bytes failed authentication, the first and the second ones of a chunk."""


class ChunkIO:
    """Reads and writes of chunks, by ticket. Thread-safe."""

    def __init__(self, sealer: Sealer, identity: SpillIdentity) -> None:
        self.sealer = sealer
        self.identity = identity
        self.file: SpillFile | None = None
        self.num_rereads = 0
        """Number of second reads; after each, the bytes passed or the spill store has failed."""
        self.faults = SpillFaults()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def is_owner(self) -> bool:
        """Whether this process made the spill store; a forked child shares neither the queues nor the
        buffers."""
        return os.getpid() == self._owner

    def usable(self) -> SpillFile:
        """Return the open file. Raises the spill store's first error, or SpillError."""
        if not self.is_owner:
            raise SpillError(
                "the spill store belongs to the process that made it; a forked child cannot use it"
            )
        if self._failure is not None:
            raise self._failure
        if self.file is None:
            raise SpillError("the spill store has no file: it is not allocated yet, or closed")
        return self.file

    def fail(self, error: BaseException) -> BaseException:
        """Make the error final unless there is one already; return the final one."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            return self._failure

    def read(self, ref: TileRef, data: torch.Tensor) -> int:
        """Start to read the sealed chunks into `data`; return the ticket."""
        return self.usable().read(_offset(ref), data)

    def write(self, ref: TileRef, data: torch.Tensor) -> int:
        """Start to write the sealed chunks in `data`; return the ticket."""
        return self.usable().write(_offset(ref), data)

    def wait(self, ticket: int, ref: TileRef) -> None:
        """Wait until nothing of the request is under way. Raises SpillIOError, which is final."""
        if self.file is None or not self.is_owner:
            self.usable()
            return
        try:
            self.file.wait(ticket)
        except OSError as error:
            self.faults.io_errors += 1
            offset = getattr(error, "offset", None)
            raise self.fail(
                SpillIOError(
                    f"the spill file of rank {self.identity.rank}, unit {ref.record.name!r}: "
                    f"{error.strerror}; training goes on from the last checkpoint",
                    errno=error.errno or 0,
                    offset=ref.offset if offset is None else offset,
                    unit=ref.record.name,
                    rank=self.identity.rank,
                )
            ) from error

    def open(self, ref: TileRef, data: torch.Tensor) -> None:
        """Verify and decrypt in place. Raises SpillIntegrityError, which is final."""
        self.usable()
        try:
            self.sealer.open(ref.batch(data))
        except SpillIntegrityError as first:
            self.faults.auth_failures += 1
            self._read_again(ref, data)
            try:
                self.sealer.open(ref.batch(data))
            except SpillIntegrityError as error:
                self.faults.auth_failures += 1
                raise self.fail(error) from first

    def update(self, ref: TileRef, data: torch.Tensor, task: UpdateTask, origin: int) -> None:
        """Open, update and seal every chunk, once. Raises SpillIntegrityError, which is final."""
        self.usable()
        try:
            self.sealer.update(ref.batch(data), task, origin=origin)
        except SpillIntegrityError as first:
            # The other chunks are updated and sealed again by now.
            for chunk in first.failed:
                self.faults.auth_failures += 1
                one, piece = TileRef(ref.record, chunk, chunk + 1), data[ref.inner(chunk)]
                self._read_again(one, piece)
                try:
                    self.sealer.update(one.batch(piece), task, origin=origin)
                except SpillIntegrityError as error:
                    self.faults.auth_failures += 1
                    raise self.fail(error) from first

    def seal(self, ref: TileRef, data: torch.Tensor) -> None:
        """Encrypt in place, as a new generation: the old bytes on the drive cannot be opened any more."""
        self.usable()
        self.sealer.seal(ref.batch(data))

    def _read_again(self, ref: TileRef, data: torch.Tensor) -> None:
        self.num_rereads += 1
        self.wait(self.read(ref, data), ref)


def _offset(ref: TileRef) -> int:
    if ref.record.offset < 0:
        raise SpillError(
            f"record {ref.record.name!r} has no place in the spill store: not allocated, or forgotten"
        )
    return ref.offset
