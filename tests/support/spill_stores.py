"""Spill stores of a few tiles for the tests of runtime/spill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from zerotrain.runtime.spill.chunks import Record, TileRef
from zerotrain.runtime.spill.file import SpillLimit, SpillPlace
from zerotrain.runtime.spill.seal import Encryption, SpillIdentity
from zerotrain.runtime.spill.sealers import create_sealer
from zerotrain.runtime.spill.store import SpillStore
from zerotrain.runtime.spill.tile_pipeline import Tile

CHUNK = 4096 * 3
IDENTITY = SpillIdentity(job="job", rank=3, world_size=4)


def make_spill_store(
    *folders: Path, encryption: str = "AEAD", limit_bytes: int | None = None, engine: str = "auto"
) -> SpillStore:
    """Return a spill store that is not allocated yet."""
    place = SpillPlace(
        folders=folders,
        limit=None if limit_bytes is None else SpillLimit(limit_bytes),
        engine=engine,
        request_bytes=16 * 4096,
    )
    return SpillStore(place, sealer=create_sealer(Encryption(encryption), IDENTITY), identity=IDENTITY)


def sizes(num_chunks: int, last_bytes: int = 4096) -> list[int]:
    """Return the sizes of chunks of CHUNK bytes and a shorter one at the end."""
    return [CHUNK] * (num_chunks - 1) + [last_bytes]


def noise(num_bytes: int, seed: int) -> torch.Tensor:
    """Return bytes that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


def filled(spill_store: SpillStore, *num_chunks: int) -> list[tuple[Record, torch.Tensor]]:
    """Allocate the spill store, write records of so many chunks once, and return them with their bytes."""
    records = [
        spill_store.add(f"unit{i}", sizes(count), layout="f32,f32,f32") for i, count in enumerate(num_chunks)
    ]
    spill_store.allocate()
    pairs = [(record, noise(record.num_bytes, i)) for i, record in enumerate(records)]
    for record, data in pairs:
        spill_store.write_chunks(record, 0, None, data)
    return pairs


def all_tiles(pairs: list[tuple[Record, torch.Tensor]]) -> list[TileRef]:
    """Return the tiles of all records, in order."""
    return [ref for record, _ in pairs for ref in record.tiles()]


def rewrite(
    spill_store: SpillStore, tiles: Sequence[TileRef], at_open: Callable[[Tile], object] = lambda tile: None
) -> None:
    """Open and seal every tile in one sweep; call `at_open` with each tile in between."""
    with spill_store.sweep(tiles, writes=True) as sweep:
        for tile in sweep:
            tile.open()
            at_open(tile)
            tile.seal()


def flip(spill_store: SpillStore, offset: int) -> None:
    """Flip one bit of the real file (of one folder)."""
    path = Path(f"/proc/self/fd/{spill_store.file.fileno()}")
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
