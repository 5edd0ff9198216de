"""Disk full, file limit, no permission: a named error on every rank, and nothing half-written remains."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoint_states import ThreadRanks, layout_for, make_state, on_ranks
from tests.support.private_mount import can_mount
from zerotrain.contract.exit_codes import NEVER_RETRIED, ExitCode
from zerotrain.runtime import checkpoint
from zerotrain.runtime.checkpoint import CheckpointNoSpace, CheckpointNotWritable, SingleRank

WORLD = 2


def save_on_ranks(folder: Path, step: int, before: Callable[[int], None] = lambda rank: None) -> list[object]:
    layout = layout_for(WORLD)

    def action(group: ThreadRanks) -> object:
        before(group.rank)
        return checkpoint.save(make_state(group.rank, layout), folder, step=step, group=group)

    return list(on_ranks(WORLD, action))


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


FAILING = ("os.posix_fallocate", "os.write", "os.fsync", "os.rename", "os.replace", "os.mkdir")


@pytest.mark.unit
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", FAILING)
def test_failure_at_every_call_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """The k-th use of a system call fails, for every k until a save needs fewer."""
    assert save_on_ranks(tmp_path, 10)[0]
    before = contents(tmp_path)
    real: Callable[..., object] = getattr(os, call.removeprefix("os."))
    for failing in range(1, 100):
        countdown = [failing]

        def sometimes(*args: object, left: list[int] = countdown, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(code, os.strerror(code), str(tmp_path))
            return real(*args, **kwargs)

        monkeypatch.setattr(call, sometimes)
        results = save_on_ranks(tmp_path, 20)
        monkeypatch.setattr(call, real)
        if countdown[0] > 0:
            break
        if not any(isinstance(result, Exception) for result in results):
            continue  # the failure did not matter: `mkdir` of a folder that exists
        assert len({str(result) for result in results}) == 1
        for result in results:
            assert isinstance(result, CheckpointNoSpace if code == errno.ENOSPC else CheckpointNotWritable)
            # Only the user can empty a full disk; a server that restarts recovers by itself.
            full = code == errno.ENOSPC
            assert result.exit_code == (ExitCode.CHECKPOINT_UNUSABLE if full else ExitCode.STORAGE_FAILED)
            assert (int(result.exit_code) in NEVER_RETRIED) is full
        left = [name for name in contents(tmp_path) if name not in before]
        # Once the rename is done the new checkpoint is whole; before that nothing of it may be there.
        assert left == [] or any(name.endswith("/COMMIT") for name in left), (failing, left)
        assert not [name for name in left if name.startswith(".tmp")]
        loaded = checkpoint.load(make_state(0, layout_for(1), filled=False), tmp_path, group=SingleRank())
        assert loaded.rejected == ()
        assert loaded.step == (20 if left else 10)
        shutil.rmtree(tmp_path / "step-0000000020-attempt-1", ignore_errors=True)
    assert failing > 1, "the call was never made"


def run_limited(program: str, folder: Path, **kwargs: object) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        **kwargs,  # type: ignore[call-overload]
    )
    assert result.returncode == 0, result.stderr
    return str(result.stdout)


SAVE_BIG = """
    import sys, torch
    from pathlib import Path
    from zerotrain.runtime import checkpoint
    from zerotrain.runtime.checkpoint import SingleRank
    from zerotrain.runtime.zero.layout import ModelLayout, ParameterFact, build_unit
    from zerotrain.runtime.zero.state import CheckpointState, TensorStream
    folder = Path(sys.argv[1])
    def state(numel):
        unit = build_unit(name="u", module="u", trainable=True, world_size=1,
                          parameters=[ParameterFact(fqn="w", shape=(numel,), dtype="fp32")])
        layout = ModelLayout(units=(unit,), world_size=1)
        return CheckpointState(layout=layout, rank=0, world_size=1,
                               streams={("u", "master"): TensorStream(torch.ones(unit.padded_numel))})
    checkpoint.save(state(10_000), folder, step=1, group=SingleRank())
    try:
        checkpoint.save(state(2_000_000), folder, step=2, group=SingleRank())
    except checkpoint.CheckpointNoSpace as error:
        print(type(error).__name__, error.errno, error.bytes_needed, error.bytes_free)
    print(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    print(checkpoint.load(state(10_000), folder, group=SingleRank()).step)
"""


@pytest.mark.ranks
def test_file_size_limit(tmp_path: Path) -> None:
    limit = 1 << 20
    output = run_limited(
        SAVE_BIG, tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    error, folders, step = output.splitlines()
    assert error.split()[:2] == ["CheckpointNoSpace", str(errno.EFBIG)]
    assert int(error.split()[2]) > 8_000_000
    assert (folders, step) == ("['step-0000000001-attempt-1']", "1")


@pytest.mark.ranks
def test_full_disk(tmp_path: Path) -> None:
    """The file system is really full: a tmpfs of 4 MiB in a private mount namespace."""
    if reason := can_mount():
        pytest.skip(f"no private mount here: {reason}")
    program = tmp_path / "save.py"
    program.write_text(textwrap.dedent(SAVE_BIG))
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size=4m none "$1" && exec "$2" "$3" "$1"'
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path / "disk"), sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    error, folders, step = result.stdout.splitlines()
    name, code, needed, free = error.split()
    assert (name, code) == ("CheckpointNoSpace", str(errno.ENOSPC))
    assert int(needed) > 8_000_000 > 4 << 20 > int(free)
    assert (folders, step) == ("['step-0000000001-attempt-1']", "1")


@pytest.mark.unit
def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotWritable, match="Not a directory") as caught:
        checkpoint.open_attempt(tmp_path / "file" / "checkpoints", group=SingleRank())
    assert caught.value.exit_code == ExitCode.CHECKPOINT_UNUSABLE


@pytest.mark.ranks
def test_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    program = """
        import os
        from zerotrain.runtime.checkpoint import CheckpointNotWritable, SingleRank, open_attempt
        os.getuid() or os.setuid(65534)  # root may write everywhere
        try:
            open_attempt("locked", group=SingleRank())
        except CheckpointNotWritable as error:
            print(error)
    """
    output = run_limited(program, folder, cwd=tmp_path)
    assert output.startswith("checkpoint folder locked: rank 0 cannot write (Permission denied: locked")
    assert contents(folder) == []


@pytest.mark.unit
@pytest.mark.parametrize("in_background", [False, True])
def test_ranks_that_do_not_share_the_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    layout = layout_for(WORLD)
    monkeypatch.setattr("zerotrain.runtime.checkpoint.background.VISIBLE_SECONDS", 0.2)

    def action(group: ThreadRanks) -> object:
        mine = tmp_path / f"host-{group.rank}"
        state = make_state(group.rank, layout)
        if in_background:
            return checkpoint.begin(state, mine, step=1, group=group).finish()
        return checkpoint.save(state, mine, step=1, group=group)

    for result in on_ranks(WORLD, action):
        assert isinstance(result, checkpoint.CheckpointError)
        assert "rank 1's file is not visible to rank 0" in str(result)
