"""A spill store that cannot fit is refused before any allocation, with the numbers and the remedy."""

from __future__ import annotations

import errno
import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest

from tests.support.forked import in_child
from tests.support.seccomp import Refusal, refuse
from tests.support.spill_stores import filled, make_spill_store, sizes
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.spill.errors import SpillDoesNotFit, SpillError
from zerotrain.runtime.spill.file import SpillLimit, SpillPlace, open_spill_file
from zerotrain.runtime.spill.seal import SpillIdentity

IDENTITY = SpillIdentity(job="a/../job", rank=1, world_size=2)


@pytest.mark.unit
def test_the_spill_stores_own_limit_is_kept(tmp_path: Path) -> None:
    """The limit holds at the start and for records that are added later; records that are dropped count no
    more."""
    spill_store = make_spill_store(tmp_path, limit_bytes=100 * 4096)
    spill_store.add("a", [4096] * 101)
    with pytest.raises(SpillDoesNotFit) as caught:
        spill_store.allocate()
    text = str(caught.value)
    assert "rank 3 needs 413696 bytes, its limit is 409600" in text
    assert "raise it by 4096 bytes a rank" in text
    assert "zero_optimization.spill.max_bytes" in text
    assert caught.value.exit_code is ExitCode.DOES_NOT_FIT
    assert list(tmp_path.iterdir()) == []

    spill_store = make_spill_store(tmp_path, limit_bytes=100 * 4096)
    first = spill_store.add("a", [4096] * 60)
    spill_store.allocate()
    before = spill_store.memory
    with pytest.raises(SpillDoesNotFit, match="needs 450560 bytes, its limit is 409600"):
        spill_store.add("b", [4096] * 50)
    assert spill_store.memory == before
    spill_store.forget(first)
    spill_store.add("b", [4096] * 100)
    assert spill_store.memory.file == 100 * 4096
    spill_store.close()


@pytest.mark.ranks
def test_a_growth_that_the_system_refuses_gives_the_limit_back(tmp_path: Path) -> None:
    """The folder that was made for it is private to this user."""

    def work() -> list[int]:
        os.umask(0)
        folder = tmp_path / "made"
        spill_store = make_spill_store(folder, limit_bytes=100 * 4096)
        spill_store.add("a", [4096] * 10)
        spill_store.allocate()
        refuse([Refusal("fallocate", errno.ENOSPC)])
        with pytest.raises(SpillDoesNotFit, match="No space left"):
            spill_store.add("b", [4096] * 10)
        assert spill_store.place.limit is not None
        used = spill_store.place.limit.used_bytes
        spill_store.close()
        return [used, spill_store.place.limit.used_bytes, folder.stat().st_mode & 0o777]

    assert in_child(work) == [10 * 4096, 0, 0o700]


@pytest.mark.unit
def test_two_files_share_one_limit(tmp_path: Path) -> None:
    """The first file that closes releases its part."""
    limit = SpillLimit(10 * 4096)
    place = SpillPlace(folders=(tmp_path,), limit=limit)
    file = open_spill_file(place, 6 * 4096, IDENTITY)
    with pytest.raises(SpillDoesNotFit, match="rank 1 needs 45056 bytes, its limit is 40960"):
        open_spill_file(place, 5 * 4096, IDENTITY)
    assert limit.used_bytes == 6 * 4096
    file.close()
    limit.give_back(6 * 4096)
    open_spill_file(place, 10 * 4096, IDENTITY).close()


@pytest.mark.unit
def test_a_full_disk_is_known_before_anything_is_allocated(tmp_path: Path) -> None:
    """One GiB more than is free is refused, over two folders of the same disk as well."""
    stat = os.statvfs(tmp_path)
    too_much = (stat.f_bavail * stat.f_frsize // 4096 * 4096) + (1 << 30)
    for folders in ((tmp_path,), (tmp_path / "a", tmp_path / "b")):
        with pytest.raises(SpillDoesNotFit) as caught:
            open_spill_file(SpillPlace(folders=folders), too_much, IDENTITY)
        text = str(caught.value)
        assert f"rank 1 needs {too_much} more bytes in {folders[0]}, where" in text
        assert "are free; free " in text
        assert "zero_optimization.spill.paths" in text
        assert caught.value.exit_code is ExitCode.DOES_NOT_FIT


@pytest.mark.ranks
def test_a_refusal_by_the_system_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    """The process's file size limit: the allocation itself fails, after all checks; ours is as before."""

    def work() -> list[object]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        limit = SpillLimit(1 << 30)
        try:
            open_spill_file(SpillPlace(folders=(tmp_path,), limit=limit), 2 << 20, IDENTITY)
        except SpillDoesNotFit as error:
            return [str(error), limit.used_bytes, int(error.exit_code)]
        return ["no error"]

    answer = in_child(work)
    assert isinstance(answer, list)
    text, used, code = answer
    assert "needs 2097152 bytes in" in text
    assert "the system refused them: fallocate: File too large" in text
    assert (used, code) == (0, ExitCode.DOES_NOT_FIT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_growing_past_what_the_system_gives_keeps_the_spill_store(tmp_path: Path) -> None:
    """A record that has no place is refused; the others are read as before."""

    def work() -> list[object]:
        spill_store = make_spill_store(tmp_path)
        pairs = filled(spill_store, 20)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        before = spill_store.memory
        try:
            spill_store.add("more", sizes(200))
        except SpillDoesNotFit:
            same = bool((spill_store.read_chunks(pairs[0][0]) == pairs[0][1]).all())
            return [spill_store.memory.file == before.file, spill_store.memory.tags == before.tags, same]
        return ["no error"]

    assert in_child(work) == [True, True, True]


@pytest.mark.ranks
def test_without_nameless_files_a_private_folder_is_made_and_gone(tmp_path: Path) -> None:
    """The file is created, and unlinked, in a folder that only this user may enter; neither remains."""

    def work() -> list[object]:
        modes = []
        make = tempfile.mkdtemp

        def noted(**options: str) -> str:
            folder = make(**options)
            modes.append(os.stat(folder).st_mode & 0o777)
            return folder

        tempfile.mkdtemp = noted  # type: ignore[assignment]
        refuse([Refusal("openat", errno.EOPNOTSUPP, argument=2, bits=os.O_TMPFILE & ~os.O_DIRECTORY)])
        file = open_spill_file(SpillPlace(folders=(tmp_path,)), 4096, IDENTITY)
        return [modes, file.unlinked_by()[:14], os.listdir(tmp_path)]

    assert in_child(work) == [[0o700], "O_CREAT|O_EXCL", []]


@pytest.mark.unit
def test_folders_are_made_and_gone(tmp_path: Path) -> None:
    """Missing folders are made; nothing is in them while the file is open."""
    folder = tmp_path / "not" / "there"
    file = open_spill_file(SpillPlace(folders=(folder,)), 4096, IDENTITY)
    assert list(folder.iterdir()) == []
    file.close()
    (tmp_path / "taken").write_text("")
    with pytest.raises(SpillError, match=r"taken cannot be made: .*; give a folder on a local disk"):
        open_spill_file(SpillPlace(folders=(tmp_path / "taken",)), 4096, IDENTITY)


@pytest.mark.unit
def test_the_engine_can_be_forced_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch for comparisons; the configuration's own value takes precedence."""
    monkeypatch.setenv("ZEROTRAIN_SPILL_ENGINE", "threads")
    spill_store = make_spill_store(tmp_path)
    spill_store.allocate()
    assert (spill_store.info.engine, spill_store.info.engine_reason) == ("threads", "asked for by name")
    assert (spill_store.info.encryption, spill_store.info.folders) == ("AES-256-GCM", (str(tmp_path),))
    spill_store.close()
    spill_store = make_spill_store(tmp_path, engine="libaio", encryption="None")
    spill_store.allocate()
    assert (spill_store.info.engine, spill_store.info.encryption) == ("libaio", "None")
    spill_store.close()
