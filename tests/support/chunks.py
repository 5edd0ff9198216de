"""Sealers of both backends and batches of chunks, for the tests of `runtime/spill`'s encryption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from zerotrain.runtime import _native
from zerotrain.runtime.spill.seal import ChunkBatch, SealedRecord, Sealer, SpillIdentity
from zerotrain.runtime.spill.sealer_cryptography import CryptographySealer

IDENTITY = SpillIdentity(job="job-1", rank=3, world_size=8)
KEY = bytes(range(32))
CHUNK, LAST = 4096 * 5, 4096 * 3
NUM_CHUNKS = 6
KeyedSealer = Callable[..., Sealer]

BACKENDS: dict[str, KeyedSealer] = {"cryptography": CryptographySealer}
if _native.openssl_version():
    from zerotrain.runtime.spill.sealer_openssl import OpenSslSealer

    BACKENDS["openssl"] = OpenSslSealer


def sizes(num_chunks: int = NUM_CHUNKS) -> list[int]:
    """Return the chunk sizes of a record whose last chunk is shorter."""
    return [CHUNK] * (num_chunks - 1) + [LAST]


def batch_of(record: SealedRecord, *, first: int = 0, count: int | None = None, seed: int = 1) -> ChunkBatch:
    """Return chunks of random bytes."""
    count = record.num_chunks - first if count is None else count
    data = torch.empty(record.bytes_of(first, count), dtype=torch.uint8)
    data.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return ChunkBatch(
        record=record, first=first, count=count, data=data, file_offset=1 << 20 | first * record.chunk_bytes
    )


def copy_of(chunks: ChunkBatch) -> ChunkBatch:
    """Return the same chunks in other memory."""
    return replace(chunks, data=chunks.data.clone())


def sealed(
    sealer: Sealer, *, unit: str = "block.0", layout: str = "f32,f32,f32"
) -> tuple[ChunkBatch, torch.Tensor]:
    """Seal a whole record; return it and its plaintext."""
    chunks = batch_of(sealer.add(unit, sizes(), layout=layout))
    plain = chunks.data.clone()
    sealer.seal(chunks)
    return chunks, plain
