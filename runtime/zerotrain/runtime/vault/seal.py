"""How chunks of the vault are sealed: the interface, its records, and the sealer that encrypts nothing.

The vault's store calls `seal` before it writes and `open` after it has read; the optimizer's step over the
vault calls `update`, which does both around the arithmetic. Encrypting sealers: `openssl` (OpenSSL through
`csrc/io`) and `wheel` (the `cryptography` package); `sealers.create_sealer` chooses. `docs/vault.md` says
what is promised.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock
from typing import Protocol, TypedDict

import torch

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.memory.inputs import CHUNK_NUMEL, TAG_BYTES
from zerotrain.runtime._native import Chunks, UpdateTask, update_chunks

TILE_CHUNKS = 64
"""Chunks of one tile."""

MAX_RECORDS = 2**32
"""Records that a sealer may have had over its life: a record's id is four bytes of the nonce."""


class Encryption(Enum):
    """`zero_optimization.spill.encryption`."""

    AEAD = "AEAD"
    NONE = "None"
    """Plain text on the drive; only ever by name, and a metric says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VaultIdentity:
    """Whose bytes these are; part of what every chunk is authenticated with."""

    job: str
    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SealerInfo:
    """What the vault reports of its encryption."""

    name: str
    """"AES-256-GCM" or "None"."""

    backend: str
    """Which code computes it, with its version."""

    is_encrypted: bool

    memory: str = ""
    """How the key and what is derived from it are kept; what could not be had, with the reason."""


@dataclass(kw_only=True, slots=True, eq=False)
class SealedRecord:
    """One stream of chunks in the spill file, and what memory keeps to tell its bytes from any other.

    All chunks have `chunk_bytes` but the last, which has `last_chunk_bytes`.
    """

    id: int
    """Unique over all records that the sealer ever had."""

    unit: str
    num_chunks: int
    chunk_bytes: int
    last_chunk_bytes: int
    layout: str
    """The dtypes of a chunk's parts in order."""

    context: bytes
    """What is authenticated with every chunk beside its place and its generation."""

    table: bytearray = field(repr=False)
    """Where chunks are encrypted TAG_BYTES per chunk: all tags, then all counters, then all generations; else
    one byte per chunk, 1 where it was sealed."""

    @property
    def has_remainder(self) -> bool:
        """Whether chunks hold the lower half of the master weight instead of all of it.

        Raises ValueError where the record was added without a layout, or with one that is not a step's.
        """
        first, *states = self.layout.split(",")
        if first not in ("f32", "i16") or any(state != "f32" for state in states):
            raise ValueError(
                f"chunks of unit {self.unit!r} have the layout {self.layout!r}; an update needs 'f32' or "
                "'i16', and 'f32' for every other part"
            )
        return first == "i16"

    @property
    def element_bytes(self) -> int:
        """Of all parts together. Raises ValueError as `has_remainder`."""
        return (2 if self.has_remainder else 4) + 4 * self.layout.count(",")

    def bytes_of(self, first: int, count: int) -> int:
        """Bytes of `count` chunks from chunk `first` on."""
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
    """1-D uint8 on the CPU, exactly the chunks' bytes; written in place."""

    file_offset: int
    """Of the first byte in the spill file; for messages."""

    def check(self) -> None:
        """Raises ValueError where `data` or the range is not the record's."""
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
    """Bytes that the drive returned are not those that were written there last. Nothing of them was used."""

    exit_code: ExitCode = ExitCode.SPILL_INTEGRITY

    def __init__(self, chunks: ChunkBatch, failed: Sequence[int], *, rank: int) -> None:
        """`failed`: indices in the record of the chunks that did not pass."""
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


class Sealer(Protocol):
    """Turns chunks into what may lie on the drive, and back. Thread-safe; runs without the GIL."""

    @property
    def info(self) -> SealerInfo: ...

    @property
    def table_bytes(self) -> int:
        """Memory that tags, counters and generations of all records take."""

    def add(self, unit: str, chunk_bytes: Sequence[int], *, layout: str = "") -> SealedRecord:
        """A record for chunks of these sizes: all equal, but the last may be shorter.

        `layout`: the dtypes of a chunk's parts in order, as in "f32,f32,f32" or "i16,f32,f32"; authenticated
        with every chunk, and what `update` cuts chunks by.
        """

    def forget(self, record: SealedRecord) -> None:
        """Its id is never used again."""

    def seal(self, chunks: ChunkBatch) -> None:
        """Makes `data` what may be written, in place. Every call counts as a new generation of its chunks."""

    def open(self, chunks: ChunkBatch) -> None:
        """Makes `data` what was sealed last, in place.

        Raises SpillIntegrityError, which names all chunks that failed: they are zeroed, the others are open.
        ValueError for chunks that were never sealed.
        """

    def update(self, chunks: ChunkBatch, task: UpdateTask, *, origin: int = 0) -> None:
        """Opens, updates and seals chunk by chunk, so that a chunk stays in the processor's cache.

        `origin`: element of the task that the record's first element is. Raises SpillIntegrityError, which
        names all chunks that failed: they were not updated, the others were.
        """

    def close(self) -> None:
        """Wipes the key: what lies on the drive is unreadable from here on."""


class Records:
    """The records of one sealer: hands out ids, and counts what their tables take."""

    def __init__(self, identity: VaultIdentity, *, table_bytes_per_chunk: int = TAG_BYTES) -> None:
        self.identity = identity
        self._per_chunk = table_bytes_per_chunk
        self._records: dict[int, SealedRecord] = {}
        self._next_id = 0
        self._lock = Lock()

    @property
    def table_bytes(self) -> int:
        """Of all records that were not forgotten."""
        with self._lock:
            return sum(len(record.table) for record in self._records.values())

    def add(self, unit: str, chunk_bytes: Sequence[int], layout: str) -> SealedRecord:
        """Raises ValueError where the sizes are not those of one record, or no id is left."""
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
                raise ValueError(f"a vault has at most {MAX_RECORDS} records over its life")
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
        """Its id stays used."""
        with self._lock:
            self._records.pop(record.id, None)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._records.clear()


def _context(identity: VaultIdentity, unit: str, layout: str) -> bytes:
    """What a chunk is authenticated with beside its place; every part has its length before it."""
    parts = [part.encode() for part in ("zerotrain vault 1", identity.job, unit, layout)]
    return struct.pack("<II", identity.rank, identity.world_size) + b"".join(
        struct.pack("<I", len(part)) + part for part in parts
    )


def native_chunks(chunks: ChunkBatch) -> Chunks:
    """The batch as `csrc/io` takes it. Raises ValueError where it does not fit its record."""
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
    """How a task's elements lie in a batch of chunks, as `csrc/io` takes it."""

    start: int
    has_remainder: bool
    element_bytes: int


def chunk_cut(chunks: ChunkBatch, origin: int) -> ChunkCut:
    """`origin`: element of the task that the record begins with. Raises ValueError without a layout."""
    record = chunks.record
    return {
        "start": origin + chunks.first * CHUNK_NUMEL,
        "has_remainder": record.has_remainder,
        "element_bytes": record.element_bytes,
    }


class KeepsRecords:
    """What every sealer does about its records."""

    def __init__(self, identity: VaultIdentity, *, table_bytes_per_chunk: int = TAG_BYTES) -> None:
        self._records = Records(identity, table_bytes_per_chunk=table_bytes_per_chunk)

    @property
    def table_bytes(self) -> int:
        """See Sealer."""
        return self._records.table_bytes

    def add(self, unit: str, chunk_bytes: Sequence[int], *, layout: str = "") -> SealedRecord:
        """See Sealer."""
        return self._records.add(unit, chunk_bytes, layout)

    def forget(self, record: SealedRecord) -> None:
        """See Sealer."""
        self._records.forget(record)


class PlainSealer(KeepsRecords):
    """Leaves chunks as they are: `encryption: "None"`, which has to be asked for by name."""

    info = SealerInfo(name="None", backend="none", is_encrypted=False, memory="no key")

    def __init__(self, identity: VaultIdentity) -> None:
        super().__init__(identity, table_bytes_per_chunk=1)  # whether it was ever sealed

    def seal(self, chunks: ChunkBatch) -> None:
        """Only takes down that the chunks hold something."""
        chunks.check()
        chunks.record.table[chunks.first : chunks.first + chunks.count] = b"\x01" * chunks.count

    def open(self, chunks: ChunkBatch) -> None:
        """Changes nothing. Raises ValueError for chunks that were never sealed."""
        chunks.check()
        never = chunks.record.table.find(0, chunks.first, chunks.first + chunks.count)
        if never >= 0:
            raise ValueError(
                f"chunk {never} of unit {chunks.record.unit!r} was never sealed: there is nothing to open"
            )

    def update(self, chunks: ChunkBatch, task: UpdateTask, *, origin: int = 0) -> None:
        """The arithmetic alone."""
        self.open(chunks)
        update_chunks(native_chunks(chunks), task, **chunk_cut(chunks, origin))

    def close(self) -> None:
        """Forgets all records; nothing is secret."""
        self._records.clear()
