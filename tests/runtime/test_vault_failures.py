"""The first error of a vault names place, unit and rank, and is final: no later call works on the rest."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.forked import in_child
from tests.support.vaults import CHUNK, all_tiles, filled, flip, make_vault, noise, rewrite
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime._native import aligned_buffer
from zerotrain.runtime.vault.chunks import TileRef
from zerotrain.runtime.vault.errors import SpillIOError, VaultError
from zerotrain.runtime.vault.seal import SpillIntegrityError
from zerotrain.runtime.vault.store import Vault
from zerotrain.runtime.vault.sweep import Tile


def everything_raises(vault: Vault, error: BaseException) -> None:
    """The same error, from every way in."""
    for call in (
        lambda: vault.info,
        lambda: vault.file,
        lambda: vault.add("more", [4096]),
        lambda: vault.sweep([], writes=True).__enter__(),
    ):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error


@pytest.mark.unit
def test_a_flipped_bit_on_the_drive_is_final(tmp_path: Path) -> None:
    """Read twice, refused twice, nothing written afterwards; the error says where."""
    vault = make_vault(tmp_path)
    pairs = filled(vault, 64 * 2, 64 * 3)
    record = pairs[1][0]
    offset = record.offset + 70 * CHUNK
    flip(vault, offset + 5)
    with pytest.raises(SpillIntegrityError) as caught:
        rewrite(vault, all_tiles(pairs))
    error = caught.value
    assert (error.unit, error.rank, error.chunk, error.file_offset) == ("unit1", 3, 70, offset)
    assert error.exit_code is ExitCode.SPILL_INTEGRITY
    assert vault.totals.num_tiles == 5 + 4  # the fill, and the pass up to the bad one
    assert vault.memory.rereads == 1
    everything_raises(vault, error)
    vault.close()


@pytest.mark.unit
def test_a_bit_that_was_flipped_on_the_way_is_read_once_more(tmp_path: Path) -> None:
    """The bytes on the drive are right: the second read passes and the pass goes on."""
    vault = make_vault(tmp_path)
    pairs = filled(vault, 64 * 2)
    with vault.sweep(all_tiles(pairs), writes=True) as sweep:
        for tile in sweep:
            if tile.ref.first == 64:
                tile.data[CHUNK * 9 + 1] ^= 4
            tile.open()
            tile.data.add_(1)
            tile.seal()
    assert vault.memory.rereads == 1
    assert torch.equal(vault.read_chunks(pairs[0][0]), pairs[0][1] + 1)
    vault.close()


@pytest.mark.unit
def test_two_chunks_in_each_others_place_are_refused(tmp_path: Path) -> None:
    """Both are the vault's own bytes, sealed by the same key."""
    vault = make_vault(tmp_path)
    record, _ = filled(vault, 20)[0]
    with Path(f"/proc/self/fd/{vault.file.fileno()}").open("r+b", buffering=0) as file:
        both = os.pread(file.fileno(), 2 * CHUNK, record.offset)
        os.pwrite(file.fileno(), both[CHUNK:] + both[:CHUNK], record.offset)
    with pytest.raises(SpillIntegrityError, match="chunk 0 of unit 'unit0'"):
        vault.read_chunks(record)
    vault.close()


@pytest.mark.unit
@pytest.mark.parametrize("is_late", [False, True])
def test_a_truncated_file_is_final(tmp_path: Path, is_late: bool) -> None:
    """Before a sweep and within one: a short read, with offset, unit and rank, and no exit code of ours."""
    vault = make_vault(tmp_path)
    pairs = filled(vault, 64 * 2, 64 * 8)
    end = pairs[1][0].offset + 64 * CHUNK * 7
    if not is_late:
        os.truncate(f"/proc/self/fd/{vault.file.fileno()}", end)

    def truncate(tile: Tile) -> None:
        if is_late and tile.ref.first == 64:
            os.truncate(f"/proc/self/fd/{vault.file.fileno()}", end)

    with pytest.raises(SpillIOError) as caught:
        rewrite(vault, all_tiles(pairs), truncate)
    error = caught.value
    assert (error.errno, error.offset, error.unit, error.rank) == (errno.ENODATA, end, "unit1", 3)
    assert "unit 'unit1': read at file offset" in str(error)
    everything_raises(vault, error)
    vault.close()


@pytest.mark.unit
@pytest.mark.parametrize("device", ["/dev/full", "/dev/null"])
def test_a_failed_write_is_final(tmp_path: Path, device: str) -> None:
    """No space, and a descriptor that cannot be written: told at the latest when the sweep is left."""
    vault = make_vault(tmp_path, engine="threads")
    pairs = filled(vault, 64 * 3)

    def spoil(tile: Tile) -> None:
        if tile.ref.first == 128:
            spare = os.open(device, os.O_RDWR if device == "/dev/full" else os.O_RDONLY)
            os.dup2(spare, vault.file.fileno())
            os.close(spare)

    with pytest.raises(SpillIOError) as caught:
        rewrite(vault, all_tiles(pairs), spoil)
    error = caught.value
    assert error.errno == (errno.ENOSPC if device == "/dev/full" else errno.EBADF)
    assert 0 <= error.offset < pairs[0][0].num_bytes  # a tile behind may not have been written yet
    assert (error.unit, error.rank) == ("unit0", 3)
    everything_raises(vault, error)
    vault.close()


@pytest.mark.unit
def test_a_writing_pass_that_was_broken_off_is_final(tmp_path: Path) -> None:
    """Some tiles are new and some old: no later call may mix them. A pass that only reads may be left."""
    vault = make_vault(tmp_path)
    pairs = filled(vault, 64 * 4)
    with vault.sweep(all_tiles(pairs), writes=False) as sweep:
        next(iter(sweep)).open()
    assert torch.equal(vault.read_chunks(pairs[0][0]), pairs[0][1])

    def stop(tile: Tile) -> None:
        if tile.ref.first == 128:
            raise ZeroDivisionError("by the caller")

    with pytest.raises(ZeroDivisionError):
        rewrite(vault, all_tiles(pairs), stop)
    with pytest.raises(
        VaultError, match="broken off after 3 of 4 tiles by ZeroDivisionError: by the"
    ) as caught:
        vault.read_chunks(pairs[0][0])
    everything_raises(vault, caught.value)
    vault.close()


@pytest.mark.unit
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("is_late", [True, False])
def test_an_interrupt_while_a_sweep_waits_lets_go_of_the_vault(
    tmp_path: Path, writes: bool, is_late: bool
) -> None:
    """Before or after the wait itself, while the sweep is left: the turn and the key are given back."""
    vault = make_vault(tmp_path)
    pairs = filled(vault, 64 * 3)
    wait, interrupts = vault._port.wait, [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted(ticket: int, ref: TileRef) -> None:
        if is_late:
            wait(ticket, ref)
        if interrupts:
            raise interrupts.pop()
        wait(ticket, ref)

    def leave_early() -> None:
        with (
            mock.patch.object(vault._port, "wait", side_effect=wait) as waiting,
            vault.sweep(all_tiles(pairs), writes=writes) as sweep,
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
        with pytest.raises(VaultError, match="a pass that writes was broken off after"):
            vault.read_chunks(pairs[0][0])
    else:
        assert torch.equal(vault.read_chunks(pairs[0][0]), pairs[0][1])
        assert vault._ring.is_whole
    closing = threading.Thread(target=vault.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive(), "another thread waits for a sweep that has ended"


@pytest.mark.unit
def test_a_vault_that_cannot_be_closed_is_wiped_all_the_same(tmp_path: Path) -> None:
    """The key and the limit do not wait for the file."""
    vault = make_vault(tmp_path, limit_bytes=1 << 30)
    pairs = filled(vault, 64)
    limit = vault.place.limit
    assert limit is not None
    assert limit.used_bytes == vault.memory.file

    class Stuck:
        num_bytes = vault.memory.file

        def close(self) -> None:
            raise OSError(errno.ENOMEM, "wait")

    file, vault._port.file = vault._port.file, Stuck()  # type: ignore[assignment]
    with pytest.raises(OSError):
        vault.close()
    assert limit.used_bytes == 0
    ref = all_tiles(pairs)[0]
    with pytest.raises(RuntimeError, match="closed"):
        vault._port.sealer.seal(ref.batch(aligned_buffer(ref.num_bytes)))
    assert file is not None
    file.close()


@pytest.mark.unit
def test_an_error_beside_a_sweep_ends_the_sweep(tmp_path: Path) -> None:
    """A single record's failed read is the vault's error as well."""
    vault = make_vault(tmp_path)
    weights = vault.add("weights", [4096] * 4, swept=False)
    pairs = filled(vault, 64 * 4)
    buffer = aligned_buffer(weights.num_bytes)
    buffer.copy_(noise(weights.num_bytes, 1))
    vault.start_write(weights, buffer).wait()
    flip(vault, weights.offset)
    reading = vault.start_read(weights, buffer)

    def wait(tile: Tile) -> None:
        if tile.ref.first == 64:
            with pytest.raises(SpillIntegrityError, match="'weights'"):
                reading.wait()

    with pytest.raises(SpillIntegrityError, match="'weights'") as caught:
        rewrite(vault, all_tiles(pairs), wait)
    with pytest.raises(SpillIntegrityError):
        reading.wait()
    everything_raises(vault, caught.value)
    vault.close()


@pytest.mark.ranks
def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    """Every way in, and closing does nothing there: the parent's vault is whole."""
    vault = make_vault(tmp_path)
    pairs = filled(vault, 64 * 2)

    def child() -> list[str]:
        texts = []
        for call in (lambda: vault.read_chunks(pairs[0][0]), lambda: vault.info):
            try:
                call()
            except VaultError as error:
                texts.append(str(error))
        vault.close()
        return texts

    assert (
        in_child(child) == ["the vault belongs to the process that made it; a forked child cannot use it"] * 2
    )
    assert torch.equal(vault.read_chunks(pairs[0][0]), pairs[0][1])
    vault.close()
