"""Records of chunks in the spill file, and ranges of their chunks. No I/O here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from zerotrain.runtime.spill.seal import TILE_CHUNKS, ChunkBatch, SealedRecord

BLOCK_BYTES = 4096
"""Divisor of every chunk size, offset and buffer size: what O_DIRECT needs on the devices in use."""


@dataclass(eq=False, slots=True)
class Record:
    """The data of one unit in the file: chunks one after another, at one offset."""

    sealed: SealedRecord
    """The sealer's record, which authenticates the chunks."""

    sizes: tuple[int, ...]
    """Bytes of each chunk."""

    swept: bool = True
    """Whether sweeps pass over the record, so that the ring's buffers must hold its tiles."""

    offset: int = -1
    """Bytes from the file's start; -1 while the record has no place there."""

    starts: tuple[int, ...] = field(init=False)
    """Bytes from the record's start to each chunk, and to its end."""

    def __post_init__(self) -> None:
        self.starts = (0, *accumulate(self.sizes))

    @property
    def name(self) -> str:
        """Name of the unit."""
        return self.sealed.unit

    @property
    def num_bytes(self) -> int:
        """Bytes of the record in the file."""
        return self.starts[-1]

    def tiles(self, first: int = 0, last: int | None = None) -> tuple[TileRef, ...]:
        """Return the chunks `first` to `last` (exclusive; all by default), cut on the record's tile grid."""
        stop = len(self.sizes) if last is None else last
        if not 0 <= first <= stop <= len(self.sizes):
            raise ValueError(
                f"chunks {first} to {stop} are outside of record {self.name!r}, which has {len(self.sizes)}"
            )
        cuts = [first, *range(first - first % TILE_CHUNKS + TILE_CHUNKS, stop, TILE_CHUNKS), stop]
        return tuple(TileRef(self, a, b) for a, b in pairwise(cuts) if a < b)


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
        """Bytes from the file's start to the first of these chunks."""
        return self.record.offset + self.record.starts[self.first]

    def batch(self, data: torch.Tensor) -> ChunkBatch:
        """Return the chunks as a batch whose bytes are `data` (uint8, 1-D)."""
        return ChunkBatch(
            record=self.record.sealed,
            first=self.first,
            count=self.last - self.first,
            data=data,
            file_offset=self.offset,
        )

    def inner(self, chunk: int) -> slice:
        """Return the range of a chunk of the record in the tile's bytes."""
        base = self.record.starts[self.first]
        return slice(self.record.starts[chunk] - base, self.record.starts[chunk + 1] - base)


def check_chunks(name: str, sizes: Sequence[int]) -> None:
    """Raise ValueError where the spill store cannot hold chunks of these sizes."""
    bad = next((i for i, size in enumerate(sizes) if size <= 0 or size % BLOCK_BYTES), None)
    if bad is not None or not sizes:
        what = "it has no chunks" if bad is None else f"chunk {bad} has {sizes[bad]} bytes"
        raise ValueError(f"the spill store's record {name!r}: {what}; give multiples of {BLOCK_BYTES} bytes")


def largest_tile_bytes(records: Iterable[Record]) -> int:
    """Return the bytes of the largest tile that sweeps pass over: the size of one buffer of the ring."""
    return max((ref.num_bytes for record in records if record.swept for ref in record.tiles()), default=0)
