"""SIGKILL at any moment of a save: afterwards the old checkpoint or the new one loads as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoint_states import layout_for, make_state
from zerotrain.runtime import checkpoint
from zerotrain.runtime.checkpoint import Owner, SingleRank
from zerotrain.runtime.zero.state import whole

pytestmark = pytest.mark.ranks


ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests.support.checkpoint_states import layout_for, make_state
from zerotrain.runtime import checkpoint
from zerotrain.runtime.checkpoint import Owner, SingleRank

CALLS = ("posix_fallocate", "write", "fsync", "rename", "replace", "unlink")
folder, owner = Path(sys.argv[1]), Owner(attempt=1)
in_background = sys.argv[2] == "background"


def save(where, step):
    state = make_state(0, layout_for(1), salt=step)
    options = checkpoint.SaveOptions(owner=owner, keep_last=2)
    if in_background:
        checkpoint.begin(state, where, step=step, options=options, group=SingleRank()).finish()
    else:
        checkpoint.save(state, where, step=step, options=options, group=SingleRank())


def die_at(moment):
    # moment 2k: right before the k-th of the calls; 2k + 1: right after it
    count = [0]

    def wrap(real):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == moment // 2 and moment % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if count[0] == moment // 2 and moment % 2 == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


for moment in range(2, 400):
    where = folder / str(moment)
    for step in (10, 20):
        save(where, step)
    child = os.fork()
    if child == 0:
        die_at(moment)
        save(where, 30)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
print(moment)
"""


@pytest.mark.parametrize("how", ["at once", "background"])
def test_killed_at_every_system_call(tmp_path: Path, how: str) -> None:
    program = tmp_path / "crash.py"
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "runs"), how],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    last = int(result.stdout)
    assert last > 20, "the save made fewer calls than it can have"
    seen = set()
    for moment in range(2, last + 1):
        folder = tmp_path / "runs" / str(moment)
        checkpoint.open_attempt(folder, Owner(attempt=2))
        state = make_state(0, layout_for(1), filled=False)
        loaded = checkpoint.load(state, folder, group=SingleRank())
        assert loaded.rejected == ()
        assert loaded.step in (20, 30)
        expected = make_state(0, layout_for(1), salt=loaded.step)
        assert all(whole(state.streams[key]).equal(whole(expected.streams[key])) for key in expected.streams)
        assert not [path.name for path in folder.iterdir() if path.name.startswith((".tmp", ".trash"))]
        seen.add(loaded.step)
    assert seen == {20, 30}
