"""The system refuses in the middle: memory in use is not given away, no space is kept uncounted."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from tests.support.forked import in_child
from tests.support.seccomp import Refusal, refuse
from zerotrain.runtime._native import SpillFile, aligned_buffer

pytestmark = pytest.mark.ranks


BLOCK = 4096
MIB = 1 << 20


def is_mapped(address: int) -> bool:
    """Return whether this process has memory at this address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, stop = line.split(maxsplit=1)[0].partition("-")
        if int(start, 16) <= address < int(stop, 16):
            return True
    return False


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal("openat", errno.EINVAL, argument=2, bits=os.O_DIRECT),
        Refusal("pwrite64", errno.EINVAL),  # that of the first transfer
    ],
)
def test_writes_without_o_direct_wait_for_the_drive(tmp_path: Path, refusal: Refusal) -> None:
    """Data are on the drive when a write returns: its error would otherwise come later and never be
    reported."""

    def work() -> list[object]:
        refuse([refusal])
        file = SpillFile([str(tmp_path)], BLOCK, engine="io_uring")
        flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        return [file.is_direct(), flags & os.O_DIRECT, flags & os.O_DSYNC, os.listdir(tmp_path)]

    assert in_child(work) == [False, 0, os.O_DSYNC, []]


@pytest.mark.parametrize(
    ("engine", "waits"),
    [
        ("io_uring", Refusal("io_uring_enter", errno.ENOMEM, argument=2, value=1)),
        ("libaio", Refusal("io_getevents", errno.ENOMEM, argument=1, value=1)),
    ],
)
def test_a_wait_that_fails_leaves_the_kernel_its_memory(tmp_path: Path, engine: str, waits: Refusal) -> None:
    """The buffer of a transfer that may be in flight stays mapped, even after its tensor is gone."""

    def work() -> list[object]:
        file = SpillFile([str(tmp_path)], 64 * MIB, engine=engine, queue_depth=4)
        buffer = aligned_buffer(64 * MIB)
        refuse([waits])
        # Most of the transfer is still in the queue: parts that ended by themselves are found without a wait.
        ticket, address = file.write(0, buffer), buffer.data_ptr()
        del buffer
        findings: list[object] = []
        try:
            file.wait(ticket)
        except OSError as error:
            findings.append(error.errno)
        findings.append(is_mapped(address))
        try:
            file.close()
        except OSError as error:
            findings.append(error.errno)
        findings.append(is_mapped(address))
        del file
        return [*findings, is_mapped(address)]

    assert in_child(work) == [errno.ENOMEM, True, errno.ENOMEM, True, True]


def test_an_engine_that_cannot_wait_gives_way(tmp_path: Path) -> None:
    """The probe is still in flight when the next engine is tried."""

    def work() -> list[object]:
        refuse(
            [
                Refusal("io_uring_enter", errno.ENOMEM, argument=2, value=1),
                Refusal("io_getevents", errno.EINVAL),
            ]
        )
        file = SpillFile([str(tmp_path)], 64 * BLOCK)
        file.wait(file.write(0, aligned_buffer(64 * BLOCK).fill_(3)))
        engine = file.engine
        file.close()
        return [engine]

    assert in_child(work) == ["threads"]


def test_a_failed_growth_over_several_folders_leaves_all_as_they_were(tmp_path: Path) -> None:
    """The second folder has no space left: the first gives back what it had taken."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()

    def work() -> list[object]:
        file = SpillFile([str(folder) for folder in folders], 3 * MIB, stripe_bytes=MIB)
        refuse([Refusal("fallocate", errno.ENOSPC, argument=2, value=MIB)])  # where the second goes on
        findings: list[object] = []
        try:
            file.resize(20 * MIB)
        except OSError as error:
            findings.append(error.errno)
        sizes = [os.fstat(file.fileno(i)).st_size for i in (0, 1)]
        return [*findings, sizes, file.num_bytes]

    assert in_child(work) == [errno.ENOSPC, [2 * MIB, MIB], 3 * MIB]


def map_at(address: int, num_bytes: int) -> int:
    """Map private memory at a free address and return its address."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    return int(libc.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0))


def test_a_buffer_that_a_child_drops_takes_nothing_of_the_childs() -> None:
    """A fork does not copy the buffer; whatever is mapped at its address there belongs to the child."""
    buffers = [aligned_buffer(4 * MIB)]

    def work() -> object:
        address = buffers[0].data_ptr()
        in_hole = map_at(address, 4 * MIB) == address
        buffers.clear()
        return [in_hole, is_mapped(address)]

    assert in_child(work) == [True, True]
