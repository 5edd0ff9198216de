"""Every engine moves the right bytes to the right place at any division, depth and order of requests."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from zerotrain.runtime._native import SpillFile, aligned_buffer

pytestmark = pytest.mark.unit


ENGINES = ("io_uring", "libaio", "threads")
BLOCK = 4096


def noise(num_blocks: int, seed: int = 1) -> torch.Tensor:
    buffer = aligned_buffer(num_blocks * BLOCK)
    return buffer.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def make(folders: list[Path], num_bytes: int, engine: str, **options: int) -> SpillFile:
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return SpillFile([str(folder) for folder in folders], num_bytes, engine=engine, **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("num_folders", "depth"), [(1, 1), (1, 32), (3, 2)])
def test_bytes_come_back_from_where_they_went(
    tmp_path: Path, engine: str, num_folders: int, depth: int
) -> None:
    """Requests smaller than the transfers, more of them than the queue holds, uneven numbers of blocks."""
    folders = [tmp_path / str(i) for i in range(num_folders)]
    file = make(
        folders, 1024 * BLOCK, engine, queue_depth=depth, request_bytes=3 * BLOCK, stripe_bytes=5 * BLOCK
    )
    assert file.engine == engine
    assert file.num_folders == num_folders
    written = noise(1000)
    sizes = [1, 2, 7, 61, 129, 800]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pieces = [
        ((start + 11) * BLOCK, slice(start * BLOCK, (start + size) * BLOCK))
        for start, size in zip(starts, sizes, strict=True)
    ]
    for ticket in [file.write(offset, written[piece]) for offset, piece in pieces]:
        file.wait(ticket)
    read = aligned_buffer(1000 * BLOCK).zero_()
    tickets = [file.read(offset, read[piece]) for offset, piece in reversed(pieces)]
    for ticket in reversed(tickets):
        file.wait(ticket)
    assert torch.equal(read, written)
    # Read in one transfer as well.
    whole = aligned_buffer(1000 * BLOCK).zero_()
    file.wait(file.read(11 * BLOCK, whole))
    assert torch.equal(whole, written)
    assert file.bytes_written == 1000 * BLOCK
    assert file.bytes_read == 2000 * BLOCK
    file.close()


def test_stripes_rotate_over_the_folders(tmp_path: Path) -> None:
    """Each of three files holds every third stripe, and no more than its share is allocated."""
    folders = [tmp_path / str(i) for i in range(3)]
    file = make(folders, 10 * BLOCK, "threads", stripe_bytes=2 * BLOCK)
    written = noise(10)
    file.wait(file.write(0, written))
    sizes = [os.fstat(file.fileno(i)).st_size // BLOCK for i in range(3)]
    assert sizes == [4, 4, 2]
    for index, stripes in enumerate([(0, 3), (1, 4), (2,)]):
        # Through /proc, as the file has no name and its own descriptor may be a direct one.
        bytes_there = Path(f"/proc/self/fd/{file.fileno(index)}").read_bytes()
        expected = torch.cat([written[2 * s * BLOCK : 2 * (s + 1) * BLOCK] for s in stripes])
        assert bytes_there == expected.numpy().tobytes()
    file.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_share_a_file(tmp_path: Path, engine: str) -> None:
    """Concurrent waits of several threads end, each with its own bytes."""
    file = make([tmp_path], 256 * BLOCK, engine, queue_depth=4, request_bytes=BLOCK)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for repeat in range(20):
                mine = noise(64, seed=100 * index + repeat)
                file.wait(file.write(index * 64 * BLOCK, mine))
                back = aligned_buffer(64 * BLOCK).zero_()
                file.wait(file.read(index * 64 * BLOCK, back))
                assert torch.equal(back, mine)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    file.close()


def test_a_file_grows_and_keeps_its_bytes(tmp_path: Path) -> None:
    """Every file of several folders gets its new share; a smaller size changes nothing."""
    file = make([tmp_path / "a", tmp_path / "b"], 6 * BLOCK, "auto", stripe_bytes=BLOCK)
    written = noise(6)
    file.wait(file.write(0, written))
    file.resize(21 * BLOCK)
    file.resize(2 * BLOCK)
    assert file.num_bytes == 21 * BLOCK
    more = noise(15, seed=2)
    file.wait(file.write(6 * BLOCK, more))
    back = aligned_buffer(21 * BLOCK)
    file.wait(file.read(0, back))
    assert torch.equal(back, torch.cat([written, more]))
    file.close()


def test_what_cannot_be_direct_is_refused(tmp_path: Path) -> None:
    """Offsets, sizes and addresses that are not whole blocks, and ranges outside of the file, are named."""
    file = make([tmp_path], 4 * BLOCK, "auto")
    buffer = aligned_buffer(4 * BLOCK)
    with pytest.raises(ValueError, match="offset 100 is not a multiple of 4096"):
        file.read(100, buffer[:BLOCK])
    with pytest.raises(ValueError, match="size 5000 is not a multiple"):
        file.write(0, buffer[:5000])
    with pytest.raises(ValueError, match=r"address \d+ is not a multiple"):
        file.write(0, buffer[1 : BLOCK + 1])
    with pytest.raises(ValueError, match="8192 bytes at offset 12288 are not inside"):
        file.read(3 * BLOCK, buffer[: 2 * BLOCK])
    ticket = file.read(0, buffer)
    file.wait(ticket)
    with pytest.raises(ValueError, match=f"ticket {ticket} is not open"):
        file.wait(ticket)
    file.close()
    with pytest.raises(RuntimeError, match="closed"):
        file.read(0, buffer)


def test_closing_waits_for_what_is_under_way(tmp_path: Path) -> None:
    """The kernel must not write into freed buffers."""
    for engine in ENGINES:
        file = make([tmp_path], 512 * BLOCK, engine, queue_depth=2, request_bytes=BLOCK)
        written = noise(512)
        file.wait(file.write(0, written))
        back = aligned_buffer(512 * BLOCK).zero_()
        file.read(0, back)
        file.close()
        assert bool((back.view(512, BLOCK).sum(dim=1) > 0).all())


@pytest.mark.parametrize("engine", ENGINES)
def test_closing_while_another_thread_waits(tmp_path: Path, engine: str) -> None:
    """The thread gets its bytes, or an error that the file is closed."""
    file = make([tmp_path], 512 * BLOCK, engine, queue_depth=1, request_bytes=BLOCK)
    file.wait(file.write(0, noise(512)))
    back = aligned_buffer(512 * BLOCK).zero_()
    ticket = file.read(0, back)
    outcomes: list[str] = []

    def wait() -> None:
        try:
            file.wait(ticket)
            outcomes.append("read" if torch.equal(back, noise(512)) else "wrong bytes")
        except RuntimeError as error:
            outcomes.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    file.close()
    thread.join(30)
    assert outcomes in (["read"], ["the spill file is closed"])


def test_buffers_are_on_page_borders_and_out_of_cores() -> None:
    """Decrypted bytes pass through these buffers, so neither core files nor forks contain them."""
    buffer = aligned_buffer(3 * BLOCK)
    assert buffer.data_ptr() % BLOCK == 0
    flags = _flags_at(buffer.data_ptr())
    assert {"dd", "dc"} <= flags, flags


def _flags_at(address: int) -> set[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()
