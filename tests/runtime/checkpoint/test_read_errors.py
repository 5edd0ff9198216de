"""A volume that fails while a checkpoint is read is no evidence of damage to the checkpoint.

No older one is loaded and no note is written. Every rank ends with a code after which another attempt may
follow.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoint_states import ThreadRanks, layout_for, make_state, on_ranks
from tests.support.private_mount import can_mount
from zerotrain.contract.exit_codes import NEVER_RETRIED, ExitCode
from zerotrain.runtime import checkpoint
from zerotrain.runtime.checkpoint import CheckpointDamaged, CheckpointError, CheckpointUnreadable
from zerotrain.runtime.checkpoint.inspect import survey, verify
from zerotrain.runtime.checkpoint.names import COMMIT, MANIFEST
from zerotrain.runtime.checkpoint.retention import retain

WORLD = 2
NEWEST = "step-0000000020-attempt-1"

PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
READING = ("os.open", "os.fstat", "os.pread", "os.preadv", "os.scandir")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two whole checkpoints."""
    layout = layout_for(WORLD)
    for step in (10, 20):

        def action(group: ThreadRanks, step: int = step) -> object:
            return checkpoint.save(make_state(group.rank, layout), tmp_path, step=step, group=group)

        on_ranks(WORLD, action)
    return tmp_path


def load_on_ranks(folder: Path, before: Callable[[int], None] = lambda rank: None) -> list[object]:
    layout = layout_for(WORLD)

    def action(group: ThreadRanks) -> object:
        before(group.rank)
        return checkpoint.load(make_state(group.rank, layout, filled=False), folder, group=group)

    return list(on_ranks(WORLD, action))


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.unit
@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", READING)
def test_a_volume_that_fails_at_any_call_is_not_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """The k-th use of a system call fails, for every k until a load needs fewer."""
    before = contents(folder)
    real: Callable[..., object] = getattr(os, call.removeprefix("os."))
    for failing in range(1, 100):
        left = [failing]

        def sometimes(*args: object, left: list[int] = left, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(code, os.strerror(code), str(args[0]))
            return real(*args, **kwargs)

        monkeypatch.setattr(call, sometimes)
        results = load_on_ranks(folder)
        monkeypatch.setattr(call, real)
        if left[0] > 0:
            break
        assert len({str(result) for result in results}) == 1
        for result in results:
            assert isinstance(result, CheckpointUnreadable), result
            assert result.exit_code is ExitCode.STORAGE_FAILED
            assert int(result.exit_code) not in NEVER_RETRIED
            assert os.strerror(code) in str(result)
        assert contents(folder) == before, "a whole checkpoint was marked"
    assert failing > 1, "the call was never made"
    assert [result.step for result in load_on_ranks(folder)] == [20, 20]  # type: ignore[attr-defined]


@pytest.mark.unit
def test_a_failing_volume_outweighs_the_damage_that_another_rank_met(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damage that one rank sees may be the same failure."""
    first, second = sorted((folder / NEWEST).glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    real = os.open

    def fails(path: object, *args: object, **kwargs: object) -> int:
        if str(path) == str(second):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", fails)
    for result in load_on_ranks(folder):
        assert isinstance(result, CheckpointUnreadable)
        assert f"{second.name} cannot be read: Input/output error (found by rank 1)" in str(result)


@pytest.mark.unit
def test_real_damage_is_still_passed_over_and_marked(folder: Path) -> None:
    file = next((folder / NEWEST).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    for result in load_on_ranks(folder):
        assert result.step == 10  # type: ignore[attr-defined]
    (folder / "step-0000000010-attempt-1" / MANIFEST).write_text("{}")
    for result in load_on_ranks(folder):
        assert isinstance(result, CheckpointDamaged)
        assert result.exit_code is ExitCode.CHECKPOINT_UNUSABLE


@pytest.mark.unit
def test_a_folder_that_may_not_be_read_ends_every_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: object) -> object:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", refused)
    for result in load_on_ranks(folder):
        assert isinstance(result, CheckpointError)
        assert result.exit_code is ExitCode.CHECKPOINT_UNUSABLE
        assert "cannot be read: Permission denied" in str(result)


@pytest.mark.unit
def test_retention_removes_nothing_while_the_volume_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, before = os.open, contents(folder)

    def fails(path: object, *args: object, **kwargs: object) -> int:
        if str(path).endswith(f"{NEWEST}/{COMMIT}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", fails)
    assert retain(folder, keep_last=1) == ()
    assert contents(folder) == before
    for look in (lambda: verify(folder / NEWEST, lambda size: None), lambda: survey(folder)):
        with pytest.raises(OSError, match="Input/output error"):
            look()


LOAD = """
import sys
from tests.support.checkpoint_states import layout_for, make_state
from zerotrain.runtime import checkpoint
try:
    state = make_state(0, layout_for(1), filled=False)
    checkpoint.load(state, sys.argv[1], group=checkpoint.SingleRank())
except checkpoint.CheckpointUnreadable as error:
    print(int(error.exit_code), error)
"""


@pytest.mark.ranks
def test_the_kernels_own_input_output_error(folder: Path) -> None:
    """No byte of the file can be read, in a private mount namespace: nothing is patched."""
    if reason := can_mount():
        pytest.skip(f"no private mount here: {reason}")
    script = 'mount --bind /proc/$$/mem "$1" && exec "$2" -c "$3" "$4"'
    arguments = [str(folder / NEWEST / COMMIT), sys.executable, LOAD, str(folder)]
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("85 the volume failed while")
    assert "Input/output error" in result.stdout
