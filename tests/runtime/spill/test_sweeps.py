"""A sweep hands out every tile once, in order, with its own bytes, and writes back the sealed ones."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.support.spill_stores import CHUNK, all_tiles, filled, make_spill_store, noise, sizes
from zerotrain.runtime._native import aligned_buffer
from zerotrain.runtime.spill.chunks import TileRef
from zerotrain.runtime.spill.errors import SpillError
from zerotrain.runtime.spill.store import SpillStore

pytestmark = pytest.mark.unit


def add_one(spill_store: SpillStore, tiles: list[TileRef]) -> list[tuple[str, int]]:
    """Add one to every byte; return the tiles in their order."""
    seen = []
    with spill_store.sweep(tiles, writes=True) as sweep:
        for tile in sweep:
            tile.open()
            tile.data.add_(1)
            tile.seal()
            seen.append((tile.ref.record.name, tile.ref.first))
    return seen


def open_all(spill_store: SpillStore, tiles: list[TileRef]) -> None:
    """Open all tiles and seal none."""
    with spill_store.sweep(tiles, writes=True) as sweep:
        for tile in sweep:
            tile.open()


@pytest.mark.parametrize(("encryption", "engine"), [("None", "auto"), ("AEAD", "auto"), ("AEAD", "threads")])
@pytest.mark.parametrize("num_folders", [1, 2])
def test_sweeps_change_every_byte_once(
    tmp_path: Path, encryption: str, engine: str, num_folders: int
) -> None:
    """Several sweeps over records of several tiles, of one, and of a part of one; also in another order."""
    folders = [tmp_path / str(i) for i in range(num_folders)]
    spill_store = make_spill_store(*folders, encryption=encryption, engine=engine)
    pairs = filled(spill_store, 64 * 9 + 5, 64, 1, 130)
    tiles = all_tiles(pairs)
    expected = [(ref.record.name, ref.first) for ref in tiles]
    for _ in range(3):
        assert add_one(spill_store, tiles) == expected
    assert add_one(spill_store, tiles[::-1]) == expected[::-1]
    for record, data in pairs:
        assert torch.equal(spill_store.read_chunks(record), data + 4)
    assert all(list(folder.iterdir()) == [] for folder in folders)
    spill_store.close()
    spill_store.close()


def test_intervals_of_chunks_are_read_and_written_alone(tmp_path: Path) -> None:
    """Intervals cross tiles and include the short last chunk; the chunks beside them stay."""
    spill_store = make_spill_store(tmp_path)
    [(record, data), (other, other_data)] = filled(spill_store, 150, 70)
    for first, last in [(0, 1), (63, 65), (10, 140), (149, 150), (64, 128), (5, 5)]:
        start, stop = record.starts[first], record.starts[last]
        assert torch.equal(spill_store.read_chunks(record, first, last), data[start:stop])
        new = noise(stop - start, seed=first)
        spill_store.write_chunks(record, first, last, new)
        data[start:stop] = new
    assert torch.equal(spill_store.read_chunks(record), data)
    assert torch.equal(spill_store.read_chunks(other), other_data)
    with pytest.raises(ValueError, match="chunks 3 to 151 are outside of record 'unit0', which has 150"):
        spill_store.read_chunks(record, 3, 151)
    with pytest.raises(ValueError, match=rf"have {2 * CHUNK} bytes \(uint8\); got 5 of torch.uint8"):
        spill_store.write_chunks(record, 0, 2, torch.zeros(5, dtype=torch.uint8))
    spill_store.close()


def test_reads_run_ahead_and_writes_behind(tmp_path: Path) -> None:
    """Two more tiles are read and up to two written while one is processed: five buffers, no more."""
    spill_store = make_spill_store(tmp_path, encryption="None")
    pairs = filled(spill_store, 64 * 12)
    tile_bytes = 64 * CHUNK
    assert spill_store.memory.ring == 5 * tile_bytes
    file = spill_store.file
    read, written = file.bytes_read, file.bytes_written
    ahead, behind = [], []
    with spill_store.sweep(all_tiles(pairs), writes=True) as sweep:
        for index, tile in enumerate(sweep):
            ahead.append(-(-(file.bytes_read - read) // tile_bytes) - index - 1)
            behind.append(index - (file.bytes_written - written) // tile_bytes)
            tile.open()
            tile.seal()
    assert ahead[:-2] == [2] * 10
    assert behind == [0] * 12  # each write was started before the next tile came
    last = 11 * tile_bytes + 63 * CHUNK + 4096
    assert (sweep.stats.num_tiles, sweep.stats.bytes_read, sweep.stats.bytes_written) == (12, last, last)
    assert 0 <= sweep.stats.wait_s <= sweep.stats.total_s
    assert spill_store.totals.bytes_written == last * 2  # the first fill as well
    spill_store.close()


def test_only_sealed_tiles_are_written(tmp_path: Path) -> None:
    """A tile that was only read stays as it is; one left open is an error."""
    spill_store = make_spill_store(tmp_path)
    pairs = filled(spill_store, 64 * 3)
    with spill_store.sweep(all_tiles(pairs), writes=True) as sweep:
        for tile in sweep:
            if tile.ref.first == 64:
                tile.open()
                tile.data.fill_(7)
                tile.seal()
    expected = pairs[0][1].clone()
    expected[64 * CHUNK : 128 * CHUNK] = 7
    assert torch.equal(spill_store.read_chunks(pairs[0][0]), expected)
    with spill_store.sweep(all_tiles(pairs), writes=False) as sweep:
        for tile in sweep:
            tile.open()
            with pytest.raises(SpillError, match="cannot be opened: it is OPEN"):
                tile.open()
            break
    with pytest.raises(SpillError, match="'unit0' was left open by a pass that writes"):
        open_all(spill_store, all_tiles(pairs))
    spill_store.close()


def test_one_sweep_at_a_time(tmp_path: Path) -> None:
    """Another thread's access waits for the sweep to end; the same thread's is an error, not a deadlock."""
    spill_store = make_spill_store(tmp_path)
    pairs = filled(spill_store, 64 * 2)
    record, data = pairs[0]
    started = threading.Event()
    results: list[torch.Tensor] = []

    def read() -> None:
        started.set()
        results.append(spill_store.read_chunks(record))

    thread = threading.Thread(target=read)
    with spill_store.sweep(all_tiles(pairs), writes=True) as sweep:
        for tile in sweep:
            if not thread.ident:
                thread.start()
                assert started.wait(180)
            tile.open()
            tile.data.add_(1)
            tile.seal()
            with pytest.raises(SpillError, match="inside of a sweep"):
                spill_store.read_chunks(record)
        assert results == []
    thread.join(180)
    assert torch.equal(results[0], data + 1)
    spill_store.close()


def test_a_record_moves_whole_during_a_sweep(tmp_path: Path) -> None:
    """The parameters' tier reads and writes its records while the states are being updated."""
    spill_store = make_spill_store(tmp_path)
    weights = spill_store.add("weights", sizes(100), swept=False)
    spill_store.allocate()
    assert spill_store.memory.ring == 0
    states = spill_store.add("states", sizes(64 * 4))
    assert spill_store.memory.ring == 5 * 64 * CHUNK
    spill_store.write_chunks(states, 0, None, noise(states.num_bytes, 1))
    data = noise(weights.num_bytes, 2)
    buffer = aligned_buffer(weights.num_bytes)
    with spill_store.sweep(states.tiles(), writes=True) as sweep:
        for index, tile in enumerate(sweep):
            buffer.copy_(data + index)
            spill_store.start_write(weights, buffer).wait()
            reading = spill_store.start_read(weights, buffer.zero_())
            tile.open()
            reading.wait()
            reading.wait()
            assert torch.equal(buffer, data + index)
            tile.seal()
    assert torch.equal(spill_store.read_chunks(states), noise(states.num_bytes, 1))
    with pytest.raises(ValueError, match=r"must have .* bytes"):
        spill_store.start_read(weights, buffer[:4096])
    spill_store.close()


def test_records_come_and_go(tmp_path: Path) -> None:
    """A new layout takes the bytes of the forgotten one; the file grows only where they do not suffice."""
    spill_store = make_spill_store(tmp_path)
    pairs = filled(spill_store, 30, 20, 10)
    before = spill_store.memory
    assert before.file == sum(record.num_bytes for record, _ in pairs)
    assert before.tags == 28 * 60
    spill_store.forget(pairs[1][0])
    with pytest.raises(SpillError, match="'unit1' has no place in the spill store"):
        spill_store.read_chunks(pairs[1][0])
    with pytest.raises(SpillError, match="'unit1' is not in this spill store"):
        spill_store.forget(pairs[1][0])
    small = spill_store.add("small", sizes(12))
    large = spill_store.add("large", sizes(40))
    assert spill_store.memory.file == before.file + large.num_bytes
    assert spill_store.memory.tags == 28 * (60 - 20 + 12 + 40)
    with pytest.raises(ValueError, match="never sealed"):
        spill_store.read_chunks(small)  # the bytes of another record are there
    for seed, record in enumerate((small, large)):
        spill_store.write_chunks(record, 0, None, noise(record.num_bytes, 50 + seed))
    for seed, record in enumerate((small, large)):
        assert torch.equal(spill_store.read_chunks(record), noise(record.num_bytes, 50 + seed))
    for record, data in (pairs[0], pairs[2]):
        assert torch.equal(spill_store.read_chunks(record), data)
    for record in (pairs[0][0], pairs[2][0], small, large):
        spill_store.forget(record)
    again = spill_store.add("again", sizes(90))
    assert again.offset == 0
    assert spill_store.memory.ring == 5 * 64 * CHUNK
    spill_store.close()


def test_misuse_is_named(tmp_path: Path) -> None:
    """Chunks that are not whole blocks, tiles twice, sweeps that do nothing, a spill store without a file."""
    spill_store = make_spill_store(tmp_path)
    with pytest.raises(ValueError, match="record 'a': chunk 1 has 100 bytes; give multiples of 4096"):
        spill_store.add("a", [4096, 100])
    with pytest.raises(ValueError, match="record 'a': it has no chunks"):
        spill_store.add("a", [])
    record = spill_store.add("a", [4096])
    with pytest.raises(SpillError, match="no file: it is not allocated yet"):
        spill_store.read_chunks(record)
    spill_store.allocate()
    with pytest.raises(ValueError, match="names a tile twice"):
        spill_store.sweep([*record.tiles(), *record.tiles()], writes=True)
    with pytest.raises(ValueError, match="must read or write"):
        spill_store.sweep(record.tiles(), writes=False, reads=False)
    spill_store.close()
    with pytest.raises(SpillError, match="closed"):
        spill_store.read_chunks(record)
