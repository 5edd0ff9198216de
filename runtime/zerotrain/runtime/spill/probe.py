"""Measurement of the spill file's drive: a timed pass over some of the records at the start of a training.

The pass does what an optimizer step's passes do except the arithmetic: it reads, opens, seals and writes, a
few tiles ahead and behind. So if later passes wait for the drive and are much slower than this one, the drive
has become slower, or something else uses it. Called by the engine for its callers that report.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from zerotrain.runtime.spill.chunks import TileRef
from zerotrain.runtime.spill.store import SpillStore

PROBE_BYTES = 64 << 20
"""Bytes that the pass reads, and as many that it writes: less than a second of most drives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeSpace:
    """Bytes of the volumes that hold a spill file, each volume counted once."""

    free: int
    capacity: int


def probe(spill_store: SpillStore, *, max_bytes: int = PROBE_BYTES) -> float | None:
    """Return the bytes per second, read and written, of one pass; None where nothing is swept.

    Every record must have been written. The bytes stay the same. Raises SpillIOError, SpillIntegrityError.
    """
    tiles: list[TileRef] = []
    chosen = 0
    for record in list(spill_store.records.values()):
        for ref in record.tiles() if record.swept else ():
            if chosen < max_bytes:
                tiles.append(ref)
                chosen += ref.num_bytes
    if not tiles:
        return None
    with spill_store.sweep(tiles, writes=True) as sweep:
        for tile in sweep:
            tile.open()
            tile.seal()
    spill_store.probed.add(sweep.stats)
    return sweep.stats.num_bytes / sweep.stats.total_s


def space(spill_store: SpillStore) -> VolumeSpace:
    """Return the space of the volumes of the spill file's folders, which need not exist any more."""
    free = capacity = 0
    seen: set[int] = set()
    for folder in spill_store.place.folders:
        there = _existing(folder)
        device = there.stat().st_dev
        if device not in seen:
            seen.add(device)
            stat = os.statvfs(there)
            free += stat.f_bavail * stat.f_frsize
            capacity += stat.f_blocks * stat.f_frsize
    return VolumeSpace(free=free, capacity=capacity)


def _existing(folder: Path) -> Path:
    return next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("/"))
