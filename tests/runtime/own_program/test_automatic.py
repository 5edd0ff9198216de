"""A program that knows of no launcher: steps, pauses and checkpoints are reported from its engine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launch.test_http import TOKEN, token_file
from tests.support.launcher import RANK_PRELUDE, RunningLauncher, eventually, launched
from tests.support.own_programs import PRELUDE, is_held, open_gate, wait_for
from tests.support.ports import free_port
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.history import HISTORY_DIR, read_folder
from zerotrain.contract.worker_http import bearer, yield_body
from zerotrain.runtime.checkpoint.names import committed

pytestmark = pytest.mark.ranks
PROGRAM = """
from zerotrain.runtime.train import automatic_events

automatic_events.PAUSE_AFTER_SECONDS = 0.0


class Words(Model):
    def forward(self, input_ids):
        return super().forward(input_ids)


def one_step(engine):
    for _ in range(2):
        loss = engine(input_ids=torch.ones(2, 8))
        engine.backward(loss)
        engine.step()


reference = build()  # of a model that nobody froze
engine = zt.initialize(model=Words(), config=config(gradient_accumulation_steps=2))[0]
engine.load_checkpoint(CHECKPOINTS)
hold("first", ranks=(0, 1))
one_step(engine)
hold("stepped", ranks=(0, 1))
with torch.no_grad():
    for _ in range(3):
        engine(input_ids=torch.ones(2, 8))
    hold("evaluates", ranks=(0, 1))
while engine.global_steps < STEPS:
    one_step(engine)
    if engine.global_steps % 3 == 0:
        engine.save_checkpoint(CHECKPOINTS)
    time.sleep(0.01)
"""

OWN = """
engine = build()
with zt.ProgressReporter(total_steps=7) as reporter:
    reporter.watch(engine)
    reporter.step(train(engine))
    hold("own", ranks=(0, 1))
"""


def program(folder: Path, text: str, **changes: Any) -> Any:
    """Run two ranks of a script under a launcher, as a job with `zerotrain launch` does."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(RANK_PRELUDE + PRELUDE + text)
    return launched(
        folder,
        "",
        command=["zerotrain", "launch", str(script)],
        master_port=free_port(),
        checkpoint_dir=folder.parent / "checkpoints",
        token_path=token_file(folder),
        **changes,
    )


def all_at(launcher: RunningLauncher, folder: Path, gate: str) -> None:
    """Wait until both ranks are at the gate."""

    def are_there() -> bool:
        if launcher.popen.poll() is not None:
            raise AssertionError(f"the program ended:\n{launcher.finish()[1]}")
        return all(is_held(folder, gate, rank) for rank in (0, 1))

    eventually(are_there, what=f"both ranks are at {gate}")


def test_steps_pauses_and_checkpoints_are_reported_and_a_stop_ends_after_the_next_save(
    tmp_path: Path,
) -> None:
    first = tmp_path / "1"
    with program(first, f"STEPS = 100000\n{PROGRAM}") as launcher:
        all_at(launcher, first, "first")
        wait_for(launcher, 0, phase="init", step=0, resumed_from=None)
        open_gate(first, "first")
        all_at(launcher, first, "stepped")
        for rank in (0, 1):
            progress = wait_for(launcher, rank, phase="step", step=1)
            assert progress["loss"] > 0
            assert progress["tokens_per_second"] > 0
        open_gate(first, "stepped")
        all_at(launcher, first, "evaluates")
        for rank in (0, 1):
            assert wait_for(launcher, rank, phase="checkpoint", step=1)["checkpoint"] is None
        open_gate(first, "evaluates")
        eventually(lambda: launcher.report()["ranks"][0]["step"] > 3, what="it trains on")
        assert launcher.request("/yield", body=yield_body(3), headers=bearer(TOKEN))[0] == 202
        code, output = launcher.finish()
        assert code == ExitCode.YIELDED, output
        ended, newest = launcher.termination, committed(tmp_path / "checkpoints")[0]
        assert ended.checkpoint is not None
        assert (ended.step, ended.checkpoint.path) == (newest.step, str(newest.path))
        assert newest.step % 3 == 0

    second = tmp_path / "2"
    with program(second, f"STEPS = {newest.step + 2}\n{PROGRAM}", attempt=4) as launcher:
        for gate in ("stepped", "evaluates"):
            open_gate(second, gate)
        all_at(launcher, second, "first")
        wait_for(launcher, 0, phase="init", resumed_from=newest.step)
        open_gate(second, "first")
        code, output = launcher.finish()
        assert code == ExitCode.DONE, output
        assert launcher.termination.step == newest.step + 2
        histories = read_folder(tmp_path / "checkpoints" / HISTORY_DIR, job_uid="uid-1").attempts
        assert [history.record.resumed_from for history in histories] == [None, newest.step]
        assert histories[1].points[-1].step == newest.step + 2
        assert histories[1].points[-1].tokens == 2 * 2 * 2 * 8


def test_a_reporter_of_the_program_takes_over(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    with program(folder, OWN) as launcher:
        all_at(launcher, folder, "own")
        wait_for(launcher, 0, phase="step", step=1, total_steps=7)
        open_gate(folder, "own")
        code, output = launcher.finish()
        assert code == ExitCode.DONE, output
