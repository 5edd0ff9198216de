"""The spill store of one rank: records of sealed chunks in a file without a name.

Made by `offload.spill`; state tiers and the parameters' tier share it. Records are added when units are
built, again when the layout changes; optimizer steps sweep over them, checkpoints and state access read
intervals. `docs/adr/0015-spill-store.md` has the reasons.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerotrain.runtime._native import SpillFile
from zerotrain.runtime.spill import file as spill
from zerotrain.runtime.spill.chunk_io import ChunkIO
from zerotrain.runtime.spill.chunks import Record, TileRef, check_chunks, largest_tile_bytes
from zerotrain.runtime.spill.errors import SpillError
from zerotrain.runtime.spill.extents import Extents
from zerotrain.runtime.spill.ring import Ring
from zerotrain.runtime.spill.seal import Sealer, SpillIdentity
from zerotrain.runtime.spill.secrecy import granted_text
from zerotrain.runtime.spill.tile_pipeline import Sweep, SweepLock, SweepStats

RING_TILES = 5
"""Number of tiles in the ring: two read ahead, one worked on, two written behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillInfo:
    """Properties of the file and the encryption, for the log and the metrics."""

    engine: str
    """I/O engine: "io_uring", "libaio" or "threads"."""

    engine_reason: str
    """Reason against a better engine; empty for the best."""

    is_direct: bool
    """Whether every folder uses O_DIRECT."""

    direct_reason: str
    """Reason against O_DIRECT; empty where it is used."""

    unlinked_by: str
    """Method by which the file lost its name."""

    allocation_reason: str
    """Reason why the bytes are not reserved; empty where they are."""

    encryption: str
    """Name of the cipher: "AES-256-GCM" or "None"."""

    backend: str
    """Name and version of the code that encrypts."""

    key_memory: str
    """Description of how the key is kept, with what the system refused of it."""

    secrecy: str
    """Whether memory is kept out of cores, with what the system refused; empty before `refuse_cores`."""

    folders: tuple[str, ...]
    file_bytes: int

    @property
    def reasons(self) -> str:
        """Reasons against a faster way, in one text."""
        return "; ".join(filter(None, (self.engine_reason, self.direct_reason, self.allocation_reason)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillMemory:
    """Memory and disk use of a spill store; in bytes, unless stated otherwise."""

    ring: int
    """Host memory of the sweeps' buffers."""

    tags: int
    """Host memory of tags, counters and generations."""

    file: int
    """Disk space of the spill file."""

    moved: int
    """Bytes read and written since the file was made."""

    rereads: int
    """Number of reads that had to be repeated."""


class RecordIO:
    """A read or a write of one whole record, under way. `wait` may be called by several threads."""

    def __init__(
        self, chunk_io: ChunkIO, ref: TileRef, data: torch.Tensor, ticket: int, *, is_read: bool
    ) -> None:
        self._chunk_io, self._ref, self._data = chunk_io, ref, data
        self._ticket: int | None = ticket
        self._is_read = is_read
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait until the record is written, or plain in the buffer. Raises SpillIOError,
        SpillIntegrityError."""
        with self._lock:
            if self._ticket is not None:
                ticket, self._ticket = self._ticket, None
                try:
                    self._chunk_io.wait(ticket, self._ref)
                    if self._is_read:
                        self._chunk_io.open(self._ref, self._data)
                except BaseException as error:
                    self._error = error
            if self._error is not None:
                raise self._error


class SpillStore:
    """Records in one spill file. One sweep at a time; single records may be moved meanwhile. Thread-safe."""

    def __init__(
        self,
        place: spill.SpillPlace,
        *,
        sealer: Sealer,
        identity: SpillIdentity,
    ) -> None:
        self.totals = SweepStats()
        """Sum of all sweeps that have ended."""
        self.probed = SweepStats()
        """The part of `totals` that `probe` made."""
        self.place = place
        """Location of the file."""
        self._identity = identity
        self._chunk_io = ChunkIO(sealer, identity)
        self.records: dict[int, Record] = {}
        """Records by the sealer's number; read-only for callers."""
        self.faults = self._chunk_io.faults
        """Counts of faults, valid also where the spill store has failed."""
        self._extents = Extents()
        self._ring = Ring(RING_TILES, 0)
        self._layout = threading.RLock()  # guards the records and the file's size
        self._sweep_lock = SweepLock()

    def add(self, name: str, chunk_bytes: Sequence[int], *, layout: str = "", swept: bool = True) -> Record:
        """Return a new record of chunks of these bytes (multiples of 4096, all equal but the last).

        `layout` describes the bytes and is authenticated with them. `swept=False`: the record is only moved
        whole, by start_read and start_write. Its chunks must be written before they can be read. Raises
        SpillDoesNotFit once the spill store is allocated.
        """
        check_chunks(name, chunk_bytes)
        with self._layout:
            sealed = self._chunk_io.sealer.add(name, chunk_bytes, layout=layout)
            record = Record(sealed, tuple(chunk_bytes), swept)
            if self._chunk_io.file is not None:
                try:
                    self._settle(record)
                except BaseException:
                    self._chunk_io.sealer.forget(sealed)
                    raise
            self.records[sealed.id] = record
            self._fit_ring()
            return record

    def allocate(self) -> None:
        """Create the file and place every record. A second call does nothing. Raises SpillDoesNotFit."""
        with self._layout:
            if self._chunk_io.file is not None:
                return
            extents = Extents()
            places = {key: extents.take(record.num_bytes) for key, record in self.records.items()}
            self._chunk_io.file = spill.open_spill_file(self.place, extents.end, self._identity)
            self._extents = extents
            for key, offset in places.items():
                self.records[key].offset = offset
            self._fit_ring()

    def forget(self, record: Record) -> None:
        """Remove a record. Its bytes may be overwritten; reading it is an error from here on."""
        with self._layout:
            if self.records.pop(record.sealed.id, None) is None:
                raise SpillError(f"record {record.name!r} is not in this spill store")
            self._chunk_io.sealer.forget(record.sealed)
            if record.offset >= 0:
                self._extents.give_back(record.offset, record.num_bytes)
                record.offset = -1
            self._fit_ring()

    def close(self) -> None:
        """Wipe the key, wait for requests under way and free the space. A second call does nothing."""
        if not self._chunk_io.is_owner:
            return
        with self._sweep_lock, self._layout:
            file, self._chunk_io.file = self._chunk_io.file, None
            try:
                if file is not None:
                    spill.close(file, self.place)
            finally:
                self._chunk_io.sealer.close()
                self._ring = Ring(RING_TILES, 0)
                self.records.clear()

    def sweep(self, tiles: Sequence[TileRef], *, writes: bool, reads: bool = True) -> Sweep:
        """Return a pass over the tiles in this order, as a context manager; it waits for another one to end.

        `reads=False` fills tiles that hold nothing yet: their data is whatever was in the buffer.
        """
        if writes and len({(ref.record.sealed.id, ref.first) for ref in tiles}) < len(tiles):
            raise ValueError(
                "a sweep that writes names a tile twice; it would read the first write's old bytes"
            )
        if not writes and not reads:
            raise ValueError("a sweep must read or write")
        return Sweep(
            self._chunk_io,
            tuple(tiles),
            reads=reads,
            writes=writes,
            lock=self._sweep_lock,
            ring=self._fit_ring,
            totals=self.totals,
        )

    def read_chunks(self, record: Record, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Return the plain bytes (uint8, 1-D) of the chunks `first` to `last` (exclusive), as a copy."""
        tiles = record.tiles(first, last)
        out = torch.empty(sum(ref.num_bytes for ref in tiles), dtype=torch.uint8)
        start = 0
        with self.sweep(tiles, writes=False) as sweep:
            for tile in sweep:
                tile.open()
                out[start : start + tile.data.numel()] = tile.data
                start += tile.data.numel()
        return out

    def write_chunks(self, record: Record, first: int, last: int | None, data: torch.Tensor) -> None:
        """Write plain bytes (uint8, 1-D) over the chunks `first` to `last` (exclusive)."""
        tiles = record.tiles(first, last)
        expected = sum(ref.num_bytes for ref in tiles)
        if data.dtype != torch.uint8 or data.numel() != expected:
            raise ValueError(
                f"these chunks of record {record.name!r} have {expected} bytes (uint8); "
                f"got {data.numel()} of {data.dtype}"
            )
        start = 0
        with self.sweep(tiles, writes=True, reads=False) as sweep:
            for tile in sweep:
                tile.data.copy_(data[start : start + tile.data.numel()])
                tile.seal()
                start += tile.data.numel()

    def start_read(self, record: Record, buffer: torch.Tensor) -> RecordIO:
        """Start to read the whole record into `buffer` (uint8, 1-D, page-aligned); also during a sweep."""
        ref, data = _whole(record, buffer)
        return RecordIO(self._chunk_io, ref, data, self._chunk_io.read(ref, data), is_read=True)

    def start_write(self, record: Record, buffer: torch.Tensor) -> RecordIO:
        """Seal the whole record in `buffer`, in place, and start to write it; also during a sweep."""
        ref, data = _whole(record, buffer)
        self._chunk_io.seal(ref, data)
        return RecordIO(self._chunk_io, ref, data, self._chunk_io.write(ref, data), is_read=False)

    @property
    def info(self) -> SpillInfo:
        """Properties of the spill store. Raises SpillError before `allocate`."""
        file, sealer = self._chunk_io.usable(), self._chunk_io.sealer.info
        each = range(file.num_folders)
        return SpillInfo(
            engine=file.engine,
            engine_reason=file.engine_reason,
            is_direct=all(file.is_direct(i) for i in each),
            direct_reason="; ".join(filter(None, (file.direct_reason(i) for i in each))),
            unlinked_by="; ".join(dict.fromkeys(file.unlinked_by(i) for i in each)),
            allocation_reason="; ".join(filter(None, (file.allocation_reason(i) for i in each))),
            encryption=sealer.name,
            backend=sealer.backend,
            key_memory=sealer.memory,
            secrecy=granted_text(),
            folders=tuple(map(str, self.place.folders)),
            file_bytes=file.num_bytes,
        )

    @property
    def memory(self) -> SpillMemory:
        """Exact bytes for the ledger."""
        file = self._chunk_io.file
        return SpillMemory(
            ring=self._ring.num_bytes,
            tags=self._chunk_io.sealer.table_bytes,
            file=0 if file is None else file.num_bytes,
            moved=0 if file is None else file.bytes_read + file.bytes_written,
            rereads=self._chunk_io.num_rereads,
        )

    @property
    def file(self) -> SpillFile:
        """The open file. Raises what every other call would raise."""
        return self._chunk_io.usable()

    def _settle(self, record: Record) -> None:
        file = self._chunk_io.usable()
        offset = self._extents.take(record.num_bytes)
        try:
            spill.grow(file, self.place, self._extents.end, self._identity)
        except BaseException:
            self._extents.give_back(offset, record.num_bytes)
            raise
        record.offset = offset

    def _fit_ring(self) -> Ring:
        """Return the ring, remade for the largest tile; a ring in use is remade for the next sweep."""
        with self._layout:
            tile_bytes = largest_tile_bytes(self.records.values())
            if (
                self._chunk_io.file is not None
                and self._ring.tile_bytes != tile_bytes
                and self._ring.is_whole
            ):
                self._ring = Ring(RING_TILES, tile_bytes)
            return self._ring


def _whole(record: Record, buffer: torch.Tensor) -> tuple[TileRef, torch.Tensor]:
    if buffer.dtype != torch.uint8 or buffer.numel() < record.num_bytes:
        raise ValueError(
            f"the buffer for record {record.name!r} must have {record.num_bytes} bytes (uint8); "
            f"got {buffer.numel()} of {buffer.dtype}"
        )
    return TileRef(record, 0, len(record.sizes)), buffer[: record.num_bytes]
