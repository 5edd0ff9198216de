"""A forked child holds no descriptor of a spill file and no ring of it.

The disk gets its space back when the process that made the file ends, however long its children live.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.support.forked import in_child
from zerotrain.runtime._native import SpillFile, aligned_buffer

pytestmark = pytest.mark.ranks

BLOCK = 4096
MIB = 1 << 20


def opened() -> list[str]:
    """Return the targets of this process's descriptors."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def of_spill(folder: Path) -> list[str]:
    """Return descriptors and mappings of spill files in `folder`, and of rings."""
    with open("/proc/self/maps") as maps:
        mapped = [line.split(maxsplit=5)[-1].strip() for line in maps]
    return [name for name in [*opened(), *mapped] if str(folder) in name or "io_uring" in name]


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "threads"])
def test_a_child_has_neither_file_nor_ring(engine: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    files = [
        SpillFile([str(tmp_path), str(other)], 64 * BLOCK, engine=engine, stripe_bytes=BLOCK),
        SpillFile([str(tmp_path)], BLOCK, engine=engine),
    ]
    ticket = files[0].write(0, aligned_buffer(64 * BLOCK).fill_(3))  # in flight at the fork
    assert of_spill(tmp_path), "the parent's own are not found: this checks nothing"
    assert in_child(lambda: of_spill(tmp_path)) == []
    assert in_child(lambda: in_child(lambda: of_spill(tmp_path))) == []
    files[0].wait(ticket)
    back = aligned_buffer(64 * BLOCK).zero_()
    files[0].wait(files[0].read(0, back))
    assert bool((back == 3).all())
    for file in files:
        file.close()
    assert of_spill(tmp_path) == []


def test_a_file_that_a_child_opens_under_the_same_number_is_left_alone(tmp_path: Path) -> None:
    """The child's copy of the object is freed after another file has taken the number."""
    file = SpillFile([str(tmp_path)], BLOCK)
    number = file.fileno()

    def child() -> int:
        nonlocal file
        mine = os.open(os.devnull, os.O_RDONLY)
        os.dup2(mine, number)
        del file
        return os.fstat(number).st_mode

    assert in_child(child)
    file.close()


def test_forks_of_another_thread_inherit_nothing(tmp_path: Path) -> None:
    """Files are made and closed while another thread forks children."""
    over = threading.Event()

    def make() -> None:
        while not over.is_set():
            SpillFile([str(tmp_path)], BLOCK).close()

    thread = threading.Thread(target=make)
    thread.start()
    try:
        found = [in_child(lambda: of_spill(tmp_path)) for _ in range(60)]
    finally:
        over.set()
        thread.join()
    assert found == [[]] * 60


def test_space_is_free_once_the_maker_is_dead_though_its_child_lives(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    before = os.statvfs(tmp_path)
    maker = os.fork()
    if maker == 0:
        torch.set_num_threads(1)  # torch's own threads exist in the parent only
        try:
            file = SpillFile([str(tmp_path)], 512 * MIB)
            file.wait(file.write(0, aligned_buffer(MIB).fill_(1)))
            child = os.fork()
            if child == 0:
                time.sleep(600)
            os.write(writer, child.to_bytes(8, "little"))
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    child = int.from_bytes(os.read(reader, 8), "little")
    assert child
    try:
        during = os.statvfs(tmp_path)
        os.kill(maker, signal.SIGKILL)
        os.waitpid(maker, 0)
        assert (before.f_bfree - during.f_bfree) * before.f_frsize > 256 * MIB
        deadline = time.monotonic() + 180
        # Half of the file's size is far above the changes by other processes on this disk.
        while (os.statvfs(tmp_path).f_bfree - during.f_bfree) * before.f_frsize < 256 * MIB:
            assert time.monotonic() < deadline, "a child keeps the space"
            time.sleep(0.05)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reader)
