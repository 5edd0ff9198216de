"""The first error of a spill store names place, unit and rank, and is final: all later calls are refused."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.forked import in_child
from tests.support.spill_stores import CHUNK, all_tiles, filled, flip, make_spill_store, noise, rewrite
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime._native import aligned_buffer
from zerotrain.runtime.spill.chunks import TileRef
from zerotrain.runtime.spill.errors import SpillError, SpillIOError
from zerotrain.runtime.spill.seal import SpillIntegrityError
from zerotrain.runtime.spill.store import SpillStore
from zerotrain.runtime.spill.tile_pipeline import Tile


def everything_raises(spill_store: SpillStore, error: BaseException) -> None:
    """Check that every entry raises the same error."""
    for call in (
        lambda: spill_store.info,
        lambda: spill_store.file,
        lambda: spill_store.add("more", [4096]),
        lambda: spill_store.sweep([], writes=True).__enter__(),
    ):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error


@pytest.mark.unit
def test_a_flipped_bit_on_the_drive_is_final(tmp_path: Path) -> None:
    """Read twice, refused twice, nothing written afterwards; the error names the place."""
    spill_store = make_spill_store(tmp_path)
    pairs = filled(spill_store, 64 * 2, 64 * 3)
    record = pairs[1][0]
    offset = record.offset + 70 * CHUNK
    flip(spill_store, offset + 5)
    with pytest.raises(SpillIntegrityError) as caught:
        rewrite(spill_store, all_tiles(pairs))
    error = caught.value
    assert (error.unit, error.rank, error.chunk, error.file_offset) == ("unit1", 3, 70, offset)
    assert error.exit_code is ExitCode.SPILL_INTEGRITY
    assert spill_store.totals.num_tiles == 5 + 4  # the fill, and the pass up to the bad one
    assert spill_store.memory.rereads == 1
    everything_raises(spill_store, error)
    spill_store.close()


@pytest.mark.unit
def test_a_bit_that_was_flipped_on_the_way_is_read_once_more(tmp_path: Path) -> None:
    """The bytes on the drive are right: the second read passes and the pass continues."""
    spill_store = make_spill_store(tmp_path)
    pairs = filled(spill_store, 64 * 2)
    with spill_store.sweep(all_tiles(pairs), writes=True) as sweep:
        for tile in sweep:
            if tile.ref.first == 64:
                tile.data[CHUNK * 9 + 1] ^= 4
            tile.open()
            tile.data.add_(1)
            tile.seal()
    assert spill_store.memory.rereads == 1
    assert torch.equal(spill_store.read_chunks(pairs[0][0]), pairs[0][1] + 1)
    spill_store.close()


@pytest.mark.unit
def test_two_chunks_in_each_others_place_are_refused(tmp_path: Path) -> None:
    """Both are the spill store's own bytes, sealed by the same key."""
    spill_store = make_spill_store(tmp_path)
    record, _ = filled(spill_store, 20)[0]
    with Path(f"/proc/self/fd/{spill_store.file.fileno()}").open("r+b", buffering=0) as file:
        both = os.pread(file.fileno(), 2 * CHUNK, record.offset)
        os.pwrite(file.fileno(), both[CHUNK:] + both[:CHUNK], record.offset)
    with pytest.raises(SpillIntegrityError, match="chunk 0 of unit 'unit0'"):
        spill_store.read_chunks(record)
    spill_store.close()


@pytest.mark.unit
@pytest.mark.parametrize("is_late", [False, True])
def test_a_truncated_file_is_final(tmp_path: Path, is_late: bool) -> None:
    """The short read before or within a sweep names offset, unit and rank, and has no own exit code."""
    spill_store = make_spill_store(tmp_path)
    pairs = filled(spill_store, 64 * 2, 64 * 8)
    end = pairs[1][0].offset + 64 * CHUNK * 7
    if not is_late:
        os.truncate(f"/proc/self/fd/{spill_store.file.fileno()}", end)

    def truncate(tile: Tile) -> None:
        if is_late and tile.ref.first == 64:
            os.truncate(f"/proc/self/fd/{spill_store.file.fileno()}", end)

    with pytest.raises(SpillIOError) as caught:
        rewrite(spill_store, all_tiles(pairs), truncate)
    error = caught.value
    assert (error.errno, error.offset, error.unit, error.rank) == (errno.ENODATA, end, "unit1", 3)
    assert "unit 'unit1': read at file offset" in str(error)
    everything_raises(spill_store, error)
    spill_store.close()


@pytest.mark.unit
@pytest.mark.parametrize("device", ["/dev/full", "/dev/null"])
def test_a_failed_write_is_final(tmp_path: Path, device: str) -> None:
    """No space, and a descriptor that cannot be written: reported at the latest when the sweep is left."""
    spill_store = make_spill_store(tmp_path, engine="threads")
    pairs = filled(spill_store, 64 * 3)

    def spoil(tile: Tile) -> None:
        if tile.ref.first == 128:
            spare = os.open(device, os.O_RDWR if device == "/dev/full" else os.O_RDONLY)
            os.dup2(spare, spill_store.file.fileno())
            os.close(spare)

    with pytest.raises(SpillIOError) as caught:
        rewrite(spill_store, all_tiles(pairs), spoil)
    error = caught.value
    assert error.errno == (errno.ENOSPC if device == "/dev/full" else errno.EBADF)
    assert 0 <= error.offset < pairs[0][0].num_bytes  # an earlier tile may not have been written yet
    assert (error.unit, error.rank) == ("unit0", 3)
    everything_raises(spill_store, error)
    spill_store.close()


@pytest.mark.unit
def test_a_writing_pass_that_was_broken_off_is_final(tmp_path: Path) -> None:
    """Some tiles are new and some old: no later call may mix them. A pass that only reads may be left."""
    spill_store = make_spill_store(tmp_path)
    pairs = filled(spill_store, 64 * 4)
    with spill_store.sweep(all_tiles(pairs), writes=False) as sweep:
        next(iter(sweep)).open()
    assert torch.equal(spill_store.read_chunks(pairs[0][0]), pairs[0][1])

    def stop(tile: Tile) -> None:
        if tile.ref.first == 128:
            raise ZeroDivisionError("by the caller")

    with pytest.raises(ZeroDivisionError):
        rewrite(spill_store, all_tiles(pairs), stop)
    with pytest.raises(
        SpillError, match="broken off after 3 of 4 tiles by ZeroDivisionError: by the"
    ) as caught:
        spill_store.read_chunks(pairs[0][0])
    everything_raises(spill_store, caught.value)
    spill_store.close()


@pytest.mark.unit
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("is_late", [True, False])
def test_an_interrupt_while_a_sweep_waits_releases_the_spill_store(
    tmp_path: Path, writes: bool, is_late: bool
) -> None:
    """Interrupts before or after the wait, while the sweep is left, release the lock and the key."""
    spill_store = make_spill_store(tmp_path)
    pairs = filled(spill_store, 64 * 3)
    wait, interrupts = spill_store._chunk_io.wait, [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted(ticket: int, ref: TileRef) -> None:
        if is_late:
            wait(ticket, ref)
        if interrupts:
            raise interrupts.pop()
        wait(ticket, ref)

    def leave_early() -> None:
        with (
            mock.patch.object(spill_store._chunk_io, "wait", side_effect=wait) as waiting,
            spill_store.sweep(all_tiles(pairs), writes=writes) as sweep,
        ):
            tile = next(iter(sweep))
            tile.open()
            if writes:
                tile.seal()
            waiting.side_effect = interrupted
            next(iter(sweep))

    with pytest.raises(KeyboardInterrupt):
        leave_early()
    if writes:
        with pytest.raises(SpillError, match="a pass that writes was broken off after"):
            spill_store.read_chunks(pairs[0][0])
    else:
        assert torch.equal(spill_store.read_chunks(pairs[0][0]), pairs[0][1])
        assert spill_store._ring.is_whole
    closing = threading.Thread(target=spill_store.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive(), "another thread waits for a sweep that has ended"


@pytest.mark.unit
def test_a_spill_store_that_cannot_be_closed_is_wiped_anyway(tmp_path: Path) -> None:
    """The key and the limit do not wait for the file."""
    spill_store = make_spill_store(tmp_path, limit_bytes=1 << 30)
    pairs = filled(spill_store, 64)
    limit = spill_store.place.limit
    assert limit is not None
    assert limit.used_bytes == spill_store.memory.file

    class Stuck:
        num_bytes = spill_store.memory.file

        def close(self) -> None:
            raise OSError(errno.ENOMEM, "wait")

    file, spill_store._chunk_io.file = spill_store._chunk_io.file, Stuck()  # type: ignore[assignment]
    with pytest.raises(OSError):
        spill_store.close()
    assert limit.used_bytes == 0
    ref = all_tiles(pairs)[0]
    with pytest.raises(RuntimeError, match="closed"):
        spill_store._chunk_io.sealer.seal(ref.batch(aligned_buffer(ref.num_bytes)))
    assert file is not None
    file.close()


@pytest.mark.unit
def test_an_error_during_a_sweep_ends_the_sweep(tmp_path: Path) -> None:
    """A single record's failed read is the spill store's error as well."""
    spill_store = make_spill_store(tmp_path)
    weights = spill_store.add("weights", [4096] * 4, swept=False)
    pairs = filled(spill_store, 64 * 4)
    buffer = aligned_buffer(weights.num_bytes)
    buffer.copy_(noise(weights.num_bytes, 1))
    spill_store.start_write(weights, buffer).wait()
    flip(spill_store, weights.offset)
    reading = spill_store.start_read(weights, buffer)

    def wait(tile: Tile) -> None:
        if tile.ref.first == 64:
            with pytest.raises(SpillIntegrityError, match="'weights'"):
                reading.wait()

    with pytest.raises(SpillIntegrityError, match="'weights'") as caught:
        rewrite(spill_store, all_tiles(pairs), wait)
    with pytest.raises(SpillIntegrityError):
        reading.wait()
    everything_raises(spill_store, caught.value)
    spill_store.close()


@pytest.mark.ranks
def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    """Every entry is refused, and closing does nothing there: the parent's spill store is intact."""
    spill_store = make_spill_store(tmp_path)
    pairs = filled(spill_store, 64 * 2)

    def child() -> list[str]:
        texts = []
        for call in (lambda: spill_store.read_chunks(pairs[0][0]), lambda: spill_store.info):
            try:
                call()
            except SpillError as error:
                texts.append(str(error))
        spill_store.close()
        return texts

    assert (
        in_child(child)
        == ["the spill store belongs to the process that made it; a forked child cannot use it"] * 2
    )
    assert torch.equal(spill_store.read_chunks(pairs[0][0]), pairs[0][1])
    spill_store.close()
