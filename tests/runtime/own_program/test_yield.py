"""A user's program is asked to yield and continues: the operator's next attempt depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launch.test_http import TOKEN, token_file
from tests.support.launcher import RunningLauncher, eventually
from tests.support.own_programs import is_held, launched_program, open_gate, wait_for
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.worker_http import bearer, yield_body
from zerotrain.runtime.checkpoint.names import committed

pytestmark = pytest.mark.ranks


PROGRAM = """
TOTAL = {total}
with zt.ProgressReporter(total_steps=TOTAL) as reporter:
    reporter.stop_on_sigterm()
    hold("watch", ranks=(0, 1))
    engine = build()
    reporter.watch(engine)
    engine.load_checkpoint(CHECKPOINTS)
    while engine.global_steps < TOTAL and not engine.stop_agreed:
        reporter.step(train(engine))
        if engine.global_steps == 2:
            engine.save_checkpoint(CHECKPOINTS)
        hold("stepped")
        time.sleep(0.01)
    engine.save_checkpoint(CHECKPOINTS)
    engine.close()
    sys.exit(0 if engine.global_steps >= TOTAL else 75)
"""


def launched_attempt(tmp_path: Path, attempt: int, *, total: int) -> Any:
    folder = tmp_path / str(attempt)
    folder.mkdir()
    return launched_program(
        folder,
        PROGRAM.format(total=total),
        attempt=3 if attempt == 1 else 3 + attempt,
        checkpoint_dir=tmp_path / "checkpoints",
        token_path=token_file(folder),
    )


def meets(launcher: RunningLauncher, folder: Path, gate: str, rank: int = 1) -> None:
    """Wait until the rank is at the gate."""

    def is_there() -> bool:
        if launcher.popen.poll() is not None:
            raise AssertionError(f"the program ended:\n{launcher.finish()[1]}")
        return is_held(folder, gate, rank)

    eventually(is_there, what=f"rank {rank} stands at {gate}")


def yields(launcher: RunningLauncher) -> None:
    assert launcher.request("/yield", body=yield_body(3), headers=bearer(TOKEN))[0] == 202


def test_the_last_words_name_the_checkpoint_and_the_next_attempt_goes_on_from_it(tmp_path: Path) -> None:
    with launched_attempt(tmp_path, 1, total=100_000) as launcher:
        for gate in ("watch", "stepped"):
            open_gate(tmp_path / "1", gate)
        eventually(lambda: launcher.report()["ranks"][0]["step"] > 3, what="it trains")
        yields(launcher)
        code, output = launcher.finish()
        assert code == ExitCode.YIELDED, output
        newest, _ = committed(tmp_path / "checkpoints")
        ended = launcher.termination
        assert ended.checkpoint is not None
        assert (ended.checkpoint.step, ended.checkpoint.path) == (newest.step, str(newest.path))
        assert ended.step == newest.step > 3

    with launched_attempt(tmp_path, 2, total=newest.step + 1) as launcher:
        open_gate(tmp_path / "2", "watch")
        meets(launcher, tmp_path / "2", "stepped")
        progress = wait_for(launcher, 0, step=newest.step + 1)  # its phase goes on to the last checkpoint's
        assert progress["resumed_from"] == newest.step
        assert progress["rejected_checkpoints"] == []
        open_gate(tmp_path / "2", "stepped")
        assert launcher.wait() == 0
        assert launcher.termination.step == newest.step + 1

    last = committed(tmp_path / "checkpoints")[0]
    file = next(last.path.glob("rank-00001*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with launched_attempt(tmp_path, 3, total=100_000) as launcher:
        open_gate(tmp_path / "3", "watch")
        meets(launcher, tmp_path / "3", "stepped")
        progress = wait_for(launcher, 0, phase="step", resumed_from=newest.step)
        assert [item["path"] for item in progress["rejected_checkpoints"]] == [str(last.path)]
        assert progress["checkpoint"]["path"] == str(newest.path)


def test_a_request_before_the_engine_is_there_is_kept(tmp_path: Path) -> None:
    with launched_attempt(tmp_path, 1, total=100_000) as launcher:
        for rank in (0, 1):
            meets(launcher, tmp_path / "1", "watch", rank)
        yields(launcher)
        for gate in ("watch", "stepped"):
            open_gate(tmp_path / "1", gate)
        code, output = launcher.finish()
        assert code == ExitCode.YIELDED, output
        assert launcher.termination.step == 1
