"""Errors of the system are reported with their number and the offset in the file; engines give way by
name."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from tests.support.forked import in_child
from tests.support.seccomp import Refusal, refuse
from zerotrain.runtime._native import SpillFile, aligned_buffer

ENGINES = ("io_uring", "libaio", "threads")
BLOCK = 4096
O_TMPFILE_BIT = 0o20000000


def failure(file: SpillFile, ticket: int) -> OSError:
    with pytest.raises(OSError) as caught:
        file.wait(ticket)
    return caught.value


@pytest.mark.unit
@pytest.mark.parametrize("engine", ENGINES)
def test_a_truncated_file_is_a_short_read_with_its_offset(tmp_path: Path, engine: str) -> None:
    """The file is cut within a block: the blocks before are read, the rest is an error at the file's end."""
    file = SpillFile([str(tmp_path)], 64 * BLOCK, engine=engine, request_bytes=8 * BLOCK)
    file.wait(file.write(0, aligned_buffer(64 * BLOCK).fill_(7)))
    os.truncate(f"/proc/self/fd/{file.fileno()}", 21 * BLOCK + 123)
    buffer = aligned_buffer(64 * BLOCK).zero_()
    error = failure(file, file.read(0, buffer))
    assert error.errno == errno.ENODATA
    assert error.offset == 21 * BLOCK + 123  # type: ignore[attr-defined]
    assert "truncated" in str(error)
    assert bool((buffer[: 21 * BLOCK] == 7).all())
    # The part before the end is still read.
    file.wait(file.read(0, buffer[: 20 * BLOCK]))
    file.close()


@pytest.mark.unit
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("device", "is_write", "expected"),
    [("/proc/self/mem", False, errno.EIO), ("/dev/full", True, errno.ENOSPC)],
)
def test_an_error_of_the_device_is_reported_with_its_number(
    tmp_path: Path, engine: str, device: str, is_write: bool, expected: int
) -> None:
    """The descriptor is replaced: address 0 of a process cannot be read, and /dev/full not written."""
    file = SpillFile([str(tmp_path)], 64 * BLOCK, engine=engine, request_bytes=2 * BLOCK)
    spare = os.open(device, os.O_RDWR)
    os.dup2(spare, file.fileno())
    os.close(spare)
    buffer = aligned_buffer(4 * BLOCK)
    error = failure(file, file.write(BLOCK, buffer) if is_write else file.read(0, buffer))
    # libaio requests an operation that these two files do not have.
    assert error.errno == (errno.EINVAL if engine == "libaio" else expected)
    assert error.offset == (BLOCK if is_write else 0)  # type: ignore[attr-defined]
    assert f"[{engine}]" in str(error)
    file.close()


@pytest.mark.unit
@pytest.mark.parametrize("engine", ENGINES)
def test_a_closed_descriptor_is_an_error_and_not_a_hang(tmp_path: Path, engine: str) -> None:
    """libaio refuses at submission, the others at completion; both end the wait."""
    file = SpillFile([str(tmp_path)], 16 * BLOCK, engine=engine, queue_depth=2, request_bytes=BLOCK)
    spare = os.open("/dev/null", os.O_WRONLY)
    os.dup2(spare, file.fileno())
    os.close(spare)
    error = failure(file, file.read(0, aligned_buffer(16 * BLOCK)))
    assert error.errno == errno.EBADF
    file.close()


@pytest.mark.ranks
def test_an_error_in_the_middle_ends_all_of_the_transfer_first(tmp_path: Path) -> None:
    """The kernel's pread fails with EIO at one offset; the rest is read before the error is raised."""

    def read() -> list[object]:
        place = 24 * BLOCK
        refuse([Refusal("pread64", errno.EIO, argument=3, value=place)])
        file = SpillFile([str(tmp_path)], 64 * BLOCK, engine="threads", request_bytes=8 * BLOCK)
        file.wait(file.write(0, aligned_buffer(64 * BLOCK).fill_(9)))
        buffer = aligned_buffer(64 * BLOCK).zero_()
        try:
            file.wait(file.read(0, buffer))
        except OSError as error:
            rest = torch.cat([buffer[:place], buffer[place + 8 * BLOCK :]])
            return [error.errno, error.offset == place, bool((rest == 9).all())]  # type: ignore[attr-defined]
        return ["no error"]

    assert in_child(read) == [errno.EIO, True, True]


def opened(refusals: list[Refusal], folder: Path, engine: str = "auto") -> dict[str, object]:
    """Return what a spill file reports of itself in a process with these calls refused, and its bytes."""

    def work() -> dict[str, object]:
        refuse(refusals)
        try:
            file = SpillFile([str(folder)], 16 * BLOCK, engine=engine)
        except OSError as error:
            return {"errno": error.errno, "text": str(error)}
        names = sorted(os.listdir(folder))
        buffer = aligned_buffer(16 * BLOCK)
        file.wait(file.write(0, buffer.fill_(3)))
        file.wait(file.read(0, buffer.zero_()))
        return {
            "engine": file.engine,
            "reason": file.engine_reason,
            "direct": file.is_direct(),
            "direct_reason": file.direct_reason(),
            "unlinked_by": file.unlinked_by(),
            "allocation": file.allocation_reason(),
            "names": names,
            "same": bool((buffer == 3).all()),
        }

    answer = in_child(work)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.ranks
def test_engines_give_way_with_the_reason(tmp_path: Path) -> None:
    """A container's filter refuses io_uring, then libaio; an engine chosen by name is not replaced."""
    uring = Refusal("io_uring_setup", errno.EPERM)
    answer = opened([uring], tmp_path)
    assert (answer["engine"], answer["same"]) == ("libaio", True)
    assert answer["reason"] == "io_uring refused: io_uring_setup: Operation not permitted"
    answer = opened([uring, Refusal("io_setup", errno.ENOSYS)], tmp_path)
    assert (answer["engine"], answer["same"]) == ("threads", True)
    assert "libaio refused: io_setup: Function not implemented" in str(answer["reason"])
    answer = opened([uring], tmp_path, engine="io_uring")
    assert answer["errno"] == errno.EPERM
    assert "io_uring refused" in str(answer["text"])


@pytest.mark.ranks
def test_an_engine_that_moves_nothing_is_not_taken(tmp_path: Path) -> None:
    """The probe is a real write and read, so threads whose pwrite fails are not a usable engine."""
    refusals = [
        Refusal("io_uring_setup", errno.EPERM),
        Refusal("io_setup", errno.EAGAIN),
        Refusal("pwrite64", errno.EIO),
    ]
    answer = opened(refusals, tmp_path)
    assert answer["errno"] == errno.EIO


@pytest.mark.unit
def test_an_engine_of_another_name_is_refused(tmp_path: Path) -> None:
    """The error lists the known names."""
    with pytest.raises(ValueError, match="engine 'psync' is not known; give auto, io_uring, libaio, threads"):
        SpillFile([str(tmp_path)], BLOCK, engine="psync")


@pytest.mark.ranks
def test_missing_features_of_the_file_system_are_named(tmp_path: Path) -> None:
    """A lack of O_TMPFILE, O_DIRECT, both, or fallocate is reported, and none leaves a name."""
    no_unnamed = Refusal("openat", errno.EOPNOTSUPP, argument=2, bits=O_TMPFILE_BIT)
    no_direct = Refusal("openat", errno.EINVAL, argument=2, bits=os.O_DIRECT)
    answer = opened([no_unnamed], tmp_path)
    assert answer["direct"]
    assert answer["unlinked_by"] == (
        "O_CREAT|O_EXCL, unlinked before the first write (O_TMPFILE: Operation not supported)"
    )
    assert answer["names"] == []
    answer = opened([no_direct], tmp_path)
    assert (answer["direct"], answer["unlinked_by"]) == (False, "O_TMPFILE")
    assert answer["direct_reason"] == "open with O_DIRECT: Invalid argument"
    answer = opened([no_unnamed, no_direct], tmp_path)
    assert (answer["direct"], answer["names"], answer["same"]) == (False, [], True)
    assert str(answer["unlinked_by"]).startswith("O_CREAT|O_EXCL")
    answer = opened([Refusal("fallocate", errno.EOPNOTSUPP)], tmp_path)
    assert answer["allocation"] == "fallocate: Operation not supported"
    assert answer["same"]


@pytest.mark.ranks
def test_a_file_system_in_memory_works() -> None:
    """tmpfs: supported features are detected, no file has a name, and the bytes are intact."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm cannot be written")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        answer = opened([], Path(folder))
        assert (answer["names"], answer["same"]) == ([], True)
