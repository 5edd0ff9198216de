"""SIGKILL at any moment leaves nothing of the spill store: no name, no space, and no copy of the key."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from pathlib import Path

import pytest
import torch

from zerotrain.runtime.spill.file import SpillPlace
from zerotrain.runtime.spill.seal import Encryption, SpillIdentity
from zerotrain.runtime.spill.sealers import create_sealer
from zerotrain.runtime.spill.store import SpillStore

pytestmark = pytest.mark.ranks


KILLS = 100
CHUNK_BYTES = 160 << 10
NUM_CHUNKS = 400
"""Chunks of a spill store of 64 MB: a hundred that remain would show beside other programs' writes."""

SWEPT_CHUNKS = 24
LIFE_S = 0.06
"""Seconds longer than a spill store takes to start and to sweep a few times."""


def test_a_hundred_kills_leave_no_name_and_no_space(tmp_path: Path) -> None:
    shuffle = random.Random(3)
    free_before = _free_bytes(tmp_path)
    sweeps = 0
    for kill in range(KILLS):
        pid, pipe = _start(tmp_path)
        if kill % 2:
            _wait_for_first_sweep(pipe)
        time.sleep(shuffle.random() * LIFE_S)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        sweeps += len(os.read(pipe, 4096))
        os.close(pipe)
        assert not list(tmp_path.iterdir()), f"after kill {kill}"
    assert sweeps >= KILLS // 2, "the spill stores did not live long enough to be killed at work"
    lost = free_before - _free_bytes(tmp_path)
    assert lost < KILLS * CHUNK_BYTES * NUM_CHUNKS // 2, f"{lost} bytes of the disk are gone"


def test_a_spill_file_in_use_has_no_name(tmp_path: Path) -> None:
    """The control of the test above: the space is taken while the process lives, and no name shows it."""
    free_before = _free_bytes(tmp_path)
    children = [_start(tmp_path) for _ in range(8)]
    for _, pipe in children:
        _wait_for_first_sweep(pipe)
    taken = free_before - _free_bytes(tmp_path)
    names = list(tmp_path.iterdir())
    for pid, pipe in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipe)
    assert taken > 4 * CHUNK_BYTES * NUM_CHUNKS
    assert names == []


def _free_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bfree * stat.f_frsize


def _start(folder: Path) -> tuple[int, int]:
    """A forked process with a spill store of its own in `folder`, and where it reports its sweeps."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        try:
            _sweep_for_ever(folder, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    return pid, read_end


def _wait_for_first_sweep(pipe: int) -> None:
    ready, _, _ = select.select([pipe], [], [], 60)
    assert ready, "a spill store did not sweep within a minute"


def _sweep_for_ever(folder: Path, pipe: int) -> None:
    identity = SpillIdentity(job="kills", rank=0, world_size=1)
    sealer = create_sealer(Encryption.AEAD, identity)
    spill_store = SpillStore(SpillPlace(folders=(folder,)), sealer=sealer, identity=identity)
    record = spill_store.add("block.0", [CHUNK_BYTES] * NUM_CHUNKS)
    spill_store.allocate()
    swept = record.tiles(0, SWEPT_CHUNKS)
    spill_store.write_chunks(
        record, 0, SWEPT_CHUNKS, torch.ones(SWEPT_CHUNKS * CHUNK_BYTES, dtype=torch.uint8)
    )
    while True:
        os.write(pipe, b".")
        with spill_store.sweep(swept, writes=True) as sweep:
            for tile in sweep:
                tile.open()
                tile.data.add_(1)
                tile.seal()
