"""The vault's units of account: chunks, records of chunks, and intervals of them. No I/O here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

BLOCK_BYTES = 4096
"""Every chunk, offset and buffer is a multiple of it: what O_DIRECT needs on any device in use."""

TILE_CHUNKS = 64
"""Chunks that are read, updated and written as one; 12 MiB of Adam state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VaultIdentity:
    """Whose vault it is: named in errors and bound into every chunk's authentication."""

    job: str
    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkBatch:
    """Consecutive chunks of one record, in memory, for the sealer."""

    data: torch.Tensor
    """uint8, 1-D, contiguous, on the CPU: the chunks back to back, as they lie in the file."""

    record: int
    """Id of the record; never used again in the life of the vault."""

    unit: str
    """The record's name."""

    first: int
    """Index in the record of the first chunk."""

    sizes: tuple[int, ...]
    """Bytes of each chunk; multiples of BLOCK_BYTES."""

    offset: int
    """Bytes from the file's start to the first chunk."""

    def one(self, position: int) -> ChunkBatch:
        """The batch of one chunk, over the same memory."""
        start = sum(self.sizes[:position])
        return ChunkBatch(
            data=self.data[start : start + self.sizes[position]],
            record=self.record,
            unit=self.unit,
            first=self.first + position,
            sizes=self.sizes[position : position + 1],
            offset=self.offset + start,
        )


@dataclass(eq=False, slots=True)
class Record:
    """What one unit keeps in the file: chunks one after another, at one offset."""

    id: int
    name: str
    sizes: tuple[int, ...]
    """Bytes of each chunk."""

    offset: int = -1
    """Bytes from the file's start; -1 until the vault is allocated, and again once it is forgotten."""

    starts: tuple[int, ...] = field(init=False)
    """Bytes from the record's start to each chunk, and its end."""

    def __post_init__(self) -> None:
        bad = next((i for i, size in enumerate(self.sizes) if size <= 0 or size % BLOCK_BYTES), None)
        if bad is not None or not self.sizes:
            what = "it has no chunks" if bad is None else f"chunk {bad} has {self.sizes[bad]} bytes"
            raise ValueError(
                f"the vault's record {self.name!r}: {what}; give chunks of multiples of {BLOCK_BYTES} bytes"
            )
        self.starts = (0, *accumulate(self.sizes))

    @property
    def num_bytes(self) -> int:
        """Bytes of the record in the file."""
        return self.starts[-1]

    def tiles(self, first: int = 0, last: int | None = None) -> tuple[TileRef, ...]:
        """The chunks `first` to `last` (exclusive; all by default) cut into tiles on the record's grid."""
        stop = len(self.sizes) if last is None else last
        if not 0 <= first <= stop <= len(self.sizes):
            raise ValueError(
                f"chunks {first} to {stop} are outside of record {self.name!r}, which has {len(self.sizes)}"
            )
        cuts = [first, *range(first - first % TILE_CHUNKS + TILE_CHUNKS, stop, TILE_CHUNKS), stop]
        return tuple(TileRef(self, a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b)


@dataclass(frozen=True, slots=True)
class TileRef:
    """The chunks `first` to `last` (exclusive) of a record."""

    record: Record
    first: int
    last: int

    @property
    def num_bytes(self) -> int:
        """Bytes of these chunks."""
        return self.record.starts[self.last] - self.record.starts[self.first]

    @property
    def offset(self) -> int:
        """Bytes from the file's start to the first of them."""
        return self.record.offset + self.record.starts[self.first]

    def batch(self, data: torch.Tensor) -> ChunkBatch:
        """The chunks as they lie in `data`."""
        return ChunkBatch(
            data=data,
            record=self.record.id,
            unit=self.record.name,
            first=self.first,
            sizes=self.record.sizes[self.first : self.last],
            offset=self.offset,
        )


def largest_tile_bytes(records: Sequence[Record]) -> int:
    """Bytes of the largest tile of any record: the size of one buffer of the ring."""
    return max((ref.num_bytes for record in records for ref in record.tiles()), default=0)
