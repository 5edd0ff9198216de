"""A spill file leaves nothing behind when its process ends, and a forked child cannot use it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.support.forked import in_child
from zerotrain.runtime._native import SpillFile, aligned_buffer

pytestmark = pytest.mark.ranks


BLOCK = 4096
MIB = 1 << 20


def test_a_killed_process_leaves_neither_name_nor_space(tmp_path: Path) -> None:
    """The folder is empty after SIGKILL with writes in flight, and the disk soon has its space back."""
    reader, writer = os.pipe()
    before = os.statvfs(tmp_path)
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # torch's own threads exist in the parent only
        try:
            file = SpillFile([str(tmp_path)], 512 * MIB)
            file.write(0, aligned_buffer(64 * MIB).fill_(1))
            os.write(writer, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    during = os.statvfs(tmp_path)
    assert os.listdir(tmp_path) == []
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    # Other processes use this disk as well; half of the file's size is far above their changes.
    assert (before.f_bfree - during.f_bfree) * before.f_frsize > 256 * MIB
    # The kernel dismantles a ring in the background and releases its files only then.
    deadline = time.monotonic() + 180
    while (os.statvfs(tmp_path).f_bfree - during.f_bfree) * before.f_frsize < 256 * MIB:
        assert time.monotonic() < deadline, "the space of a killed process's file did not come back"
        time.sleep(0.05)
    assert os.listdir(tmp_path) == []


def test_the_file_can_never_be_given_a_name(tmp_path: Path) -> None:
    """Linking it through /proc fails, too."""
    file = SpillFile([str(tmp_path)], BLOCK)
    if file.unlinked_by() != "O_TMPFILE":
        pytest.skip(f"no O_TMPFILE here: {file.unlinked_by()}")
    # With a folder's descriptor Python calls linkat(AT_SYMLINK_FOLLOW), without one link(), which never
    # follows.
    root = os.open("/", os.O_PATH)
    with pytest.raises(FileNotFoundError):
        os.link(f"/proc/self/fd/{file.fileno()}", tmp_path / "name", src_dir_fd=root, follow_symlinks=True)
    os.close(root)
    assert os.listdir(tmp_path) == []
    assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
    assert os.fstat(file.fileno()).st_nlink == 0
    file.close()


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "threads"])
def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path, engine: str) -> None:
    """Requests are in flight at the fork, and the child frees its copies when it ends."""
    file = SpillFile([str(tmp_path)], 256 * BLOCK, engine=engine, queue_depth=2, request_bytes=BLOCK)
    written = aligned_buffer(256 * BLOCK).fill_(5)
    ticket = file.write(0, written)

    def child() -> list[str]:
        texts = []
        for call in (lambda: file.wait(ticket), lambda: file.read(0, written), file.close):
            try:
                call()
                texts.append("no error")
            except RuntimeError as error:
                texts.append(str(error))
        return texts

    texts = in_child(child)
    assert isinstance(texts, list)
    assert all("belongs to the process that made it" in text for text in texts), texts
    file.wait(ticket)
    back = aligned_buffer(256 * BLOCK).zero_()
    file.wait(file.read(0, back))
    assert bool((back == 5).all())
    file.close()
