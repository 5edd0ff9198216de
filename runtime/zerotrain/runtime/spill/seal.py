"""Sealing of the spill store's chunks: the interface, its records, and the sealer that encrypts nothing.

The spill store calls `seal` before it writes and `open` after it has read; the optimizer's step over the
spill store calls `update`, which does both around the arithmetic. Encrypting sealers: `OpenSslSealer`
(OpenSSL through `csrc/io`) and `CryptographySealer` (the `cryptography` package); `sealers.create_sealer`
chooses.
`docs/spill-encryption.md` states the guarantees.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock
from typing import TypedDict

import torch

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.memory.inputs import CHUNK_NUMEL, TAG_BYTES
from zerotrain.runtime._native import Chunks, UpdateTask, update_chunks

PART_BYTES = {"f32": 4, "bf16": 2, "i16": 2}
"""Bytes per element of the dtypes in a layout."""

TILE_CHUNKS = 64
"""Number of chunks of one tile."""

MAX_RECORDS = 2**32
"""Greatest number of records over a sealer's life: a record's id is four bytes of the nonce."""


class Encryption(Enum):
    """Values of `zero_optimization.spill.encryption`."""

    AEAD = "AEAD"
    NONE = "None"
    """Plain text on the drive; used only when named explicitly, and a metric reports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillIdentity:
    """Identity of the bytes' owner; part of what every chunk is authenticated with."""

    job: str
    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SealerInfo:
    """Description of the spill store's encryption, for its reports."""

    name: str
    """Name of the cipher: "AES-256-GCM" or "None"."""

    backend: str
    """Name and version of the code that encrypts."""

    is_encrypted: bool

    memory: str = ""
    """Description of how the key and what is derived from it are kept; refused protection with the reason."""


@dataclass(kw_only=True, slots=True, eq=False)
class SealedRecord:
    """One stream of chunks in the spill file, and the data in memory that tells its bytes from any other.

    All chunks have `chunk_bytes` but the last, which has `last_chunk_bytes`.
    """

    id: int
    """Number that is unique over all records that the sealer ever had."""

    unit: str
    num_chunks: int
    chunk_bytes: int
    last_chunk_bytes: int
    layout: str
    """The dtypes of a chunk's parts in order."""

    context: bytes
    """Bytes authenticated with every chunk beside its place and its generation."""

    table: bytearray = field(repr=False)
    """Table of TAG_BYTES per chunk where chunks are encrypted: all tags, then all counters, then all
    generations. Otherwise one byte per chunk, 1 where it was sealed."""

    @property
    def has_remainder(self) -> bool:
        """Whether chunks hold the lower half of the master weight instead of all of it.

        Raises ValueError where the record was added without a layout, or with one that an update cannot use.
        """
        first, *states = self.layout.split(",")
        is_one_dtype = {first, *states} in ({"f32"}, {"bf16"})
        if not is_one_dtype and (first != "i16" or not {"f32"}.issuperset(states)):
            raise ValueError(
                f"chunks of unit {self.unit!r} have the layout {self.layout!r}; an update needs 'f32' or "
                "'bf16' for every part, or 'i16' and 'f32' for every other part"
            )
        return first == "i16"

    @property
    def element_bytes(self) -> int:
        """Bytes of one element, over all parts. Raises ValueError as `has_remainder`."""
        first, *states = self.layout.split(",")
        first_bytes = PART_BYTES["i16"] if self.has_remainder else PART_BYTES[first]
        return first_bytes + sum(PART_BYTES[part] for part in states)

    def bytes_of(self, first: int, count: int) -> int:
        """Return the bytes of `count` chunks from chunk `first` on."""
        ends_record = first + count == self.num_chunks
        return count * self.chunk_bytes + (
            self.last_chunk_bytes - self.chunk_bytes if ends_record and count else 0
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkBatch:
    """Consecutive chunks of one record, side by side in memory."""

    record: SealedRecord
    first: int
    """Index of the first chunk in the record."""

    count: int
    data: torch.Tensor
    """The chunks' exact bytes, 1-D uint8 on the CPU; written in place."""

    file_offset: int
    """Offset of the first byte in the spill file; for messages."""

    def check(self) -> None:
        """Raise ValueError where `data` or the range does not fit the record."""
        if self.first < 0 or self.count < 1 or self.first + self.count > self.record.num_chunks:
            raise ValueError(
                f"chunks {self.first} to {self.first + self.count} of unit {self.record.unit!r}: "
                f"the record has {self.record.num_chunks}"
            )
        expected = self.record.bytes_of(self.first, self.count)
        if self.data.dtype != torch.uint8 or self.data.numel() != expected or not self.data.is_contiguous():
            raise ValueError(
                f"data of {self.count} chunks of unit {self.record.unit!r} must be {expected} contiguous "
                f"bytes; got {self.data.numel()} of {self.data.dtype}"
            )


class SpillIntegrityError(Exception):
    """Error of bytes from the drive that are not those written there last. None of them was used."""

    exit_code: ExitCode = ExitCode.SPILL_INTEGRITY

    def __init__(self, chunks: ChunkBatch, failed: Sequence[int], *, rank: int) -> None:
        """Take as `failed` the indices in the record of the chunks that failed authentication."""
        record, chunk = chunks.record, failed[0]
        self.unit, self.rank, self.chunk = record.unit, rank, chunk
        self.failed = tuple(failed)
        self.file_offset = chunks.file_offset + (chunk - chunks.first) * record.chunk_bytes
        others = f" (and {len(failed) - 1} more chunks of the same read)" if len(failed) > 1 else ""
        super().__init__(
            f"spill file of rank {rank}, offset {self.file_offset}: chunk {chunk} of unit {record.unit!r}"
            f"{others} failed authentication: the drive returned other bytes than were written last; nothing "
            "of them was used. Replace the node's drive; training goes on from the last checkpoint"
        )


class Sealer(ABC):
    """Converter of chunks to what may be on the drive, and back. Thread-safe; runs without the GIL.

    This class keeps the records: it assigns their ids, and counts the bytes of their tables.
    """

    def __init__(self, identity: SpillIdentity, *, table_bytes_per_chunk: int = TAG_BYTES) -> None:
        self.identity = identity
        self._per_chunk = table_bytes_per_chunk
        self._records: dict[int, SealedRecord] = {}
        self._next_id = 0
        self._lock = Lock()

    @property
    @abstractmethod
    def info(self) -> SealerInfo:
        """Present state of the encryption."""

    @property
    def table_bytes(self) -> int:
        """Bytes of memory for the tags, counters and generations of all records that were not forgotten."""
        with self._lock:
            return sum(len(record.table) for record in self._records.values())

    def add(self, unit: str, chunk_bytes: Sequence[int], *, layout: str = "") -> SealedRecord:
        """Return a new record for chunks of these sizes: all equal, but the last may be shorter.

        `layout`: the dtypes of a chunk's parts in order, as in "f32,f32,f32" or "i16,f32,f32". It is
        authenticated with every chunk, and `update` cuts chunks by it. Raises ValueError where the sizes are
        not those of one record, or no id is left.
        """
        sizes = set(chunk_bytes[:-1])
        if (
            not chunk_bytes
            or len(sizes) > 1
            or min(chunk_bytes) < 1
            or any(chunk_bytes[-1] > size for size in sizes)
        ):
            raise ValueError(
                f"chunks of unit {unit!r} must have one size, and the last at most that; got "
                f"{chunk_bytes!s:.200}"
            )
        with self._lock:
            if self._next_id >= MAX_RECORDS:
                raise ValueError(f"a spill store has at most {MAX_RECORDS} records over its life")
            record = SealedRecord(
                id=self._next_id,
                unit=unit,
                num_chunks=len(chunk_bytes),
                chunk_bytes=chunk_bytes[0],
                last_chunk_bytes=chunk_bytes[-1],
                layout=layout,
                context=_context(self.identity, unit, layout),
                table=bytearray(self._per_chunk * len(chunk_bytes)),
            )
            self._next_id += 1
            self._records[record.id] = record
        return record

    def forget(self, record: SealedRecord) -> None:
        """Remove a record. Its id is never used again."""
        with self._lock:
            self._records.pop(record.id, None)

    @abstractmethod
    def seal(self, chunks: ChunkBatch) -> None:
        """Encrypt `data` in place, so that it may be written. Every call is a new generation of the
        chunks."""

    @abstractmethod
    def open(self, chunks: ChunkBatch) -> None:
        """Decrypt `data` in place to what was sealed last.

        Raises SpillIntegrityError, which names all chunks that failed: they are zeroed, the others are open.
        Raises ValueError for chunks that were never sealed.
        """

    @abstractmethod
    def update(self, chunks: ChunkBatch, task: UpdateTask, *, origin: int = 0) -> None:
        """Open, update and seal chunk by chunk, so that a chunk stays in the processor's cache.

        `origin`: element of the task that is the record's first element. Raises SpillIntegrityError, which
        names all chunks that failed: they were not updated, the others were.
        """

    def close(self) -> None:
        """Remove all records. An encrypting sealer wipes its key: the bytes on the drive are unreadable from
        here on."""
        with self._lock:
            self._records.clear()


def _context(identity: SpillIdentity, unit: str, layout: str) -> bytes:
    """Return the bytes authenticated with a chunk beside its place; each text has its length before it."""
    parts = [part.encode() for part in ("zerotrain spill store 1", identity.job, unit, layout)]
    return struct.pack("<II", identity.rank, identity.world_size) + b"".join(
        struct.pack("<I", len(part)) + part for part in parts
    )


def native_chunks(chunks: ChunkBatch) -> Chunks:
    """Return the batch as `csrc/io` takes it. Raises ValueError where it does not fit its record."""
    chunks.check()
    record = chunks.record
    return Chunks(
        chunks.data,
        record.table,
        context=record.context,
        record=record.id,
        first=chunks.first,
        chunk_bytes=record.chunk_bytes,
    )


class ChunkCut(TypedDict):
    """Position of a task's elements in a batch of chunks, as `csrc/io` takes it."""

    start: int
    has_remainder: bool
    element_bytes: int


def chunk_cut(chunks: ChunkBatch, origin: int) -> ChunkCut:
    """Return the position of a task's elements in a batch. `origin`: element of the task that is the record's
    first. Raises ValueError without a layout."""
    record = chunks.record
    return {
        "start": origin + chunks.first * CHUNK_NUMEL,
        "has_remainder": record.has_remainder,
        "element_bytes": record.element_bytes,
    }


class PlainSealer(Sealer):
    """A sealer that leaves chunks as they are: `encryption: "None"`, which must be named explicitly."""

    def __init__(self, identity: SpillIdentity) -> None:
        super().__init__(identity, table_bytes_per_chunk=1)  # whether the chunk was ever sealed

    @property
    def info(self) -> SealerInfo:
        return SealerInfo(name="None", backend="none", is_encrypted=False, memory="no key")

    def seal(self, chunks: ChunkBatch) -> None:
        """Record only that the chunks hold data."""
        chunks.check()
        chunks.record.table[chunks.first : chunks.first + chunks.count] = b"\x01" * chunks.count

    def open(self, chunks: ChunkBatch) -> None:
        """Check the chunks and change nothing. Raises ValueError for chunks that were never sealed."""
        chunks.check()
        never = chunks.record.table.find(0, chunks.first, chunks.first + chunks.count)
        if never >= 0:
            raise ValueError(
                f"chunk {never} of unit {chunks.record.unit!r} was never sealed: there is nothing to open"
            )

    def update(self, chunks: ChunkBatch, task: UpdateTask, *, origin: int = 0) -> None:
        """Run the arithmetic alone."""
        self.open(chunks)
        update_chunks(native_chunks(chunks), task, **chunk_cut(chunks, origin))
