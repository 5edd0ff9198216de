"""A Trainer script in a job stops with a whole checkpoint and goes on from it, without a line of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launch.test_http import TOKEN, token_file
from tests.support.launcher import eventually, launched
from tests.support.ports import free_port
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.worker_http import bearer, yield_body

pytestmark = pytest.mark.ranks

SLOW = pytest.mark.slow(
    cheaper="tests/runtime/own_program/test_automatic.py::"
    "test_steps_pauses_and_checkpoints_are_reported_and_a_stop_ends_after_the_next_save"
)
SCRIPTS = Path(__file__).parent / "scripts"


def attempt(tmp_path: Path, number: int, script: str, *arguments: str) -> Any:
    """Run an attempt under the launcher, as a job with `zerotrain launch` does."""
    folder = tmp_path / str(number)
    folder.mkdir()
    return launched(
        folder,
        "",
        command=["zerotrain", "launch", str(SCRIPTS / script), *arguments],
        attempt=number,
        master_port=free_port(),
        checkpoint_dir=tmp_path / "job",
        token_path=token_file(folder),
    )


def trainer(tmp_path: Path, number: int, *, steps: int, **arguments: object) -> Any:
    """Run an attempt of a Trainer script that saves nothing by itself."""
    given = json.dumps({"save_steps": 1_000_000, **arguments})
    return attempt(tmp_path, number, "job_trainer.py", "--steps", str(steps), "--arguments", given)


@SLOW
def test_a_stop_saves_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "job" / "script" / "out"
    with trainer(tmp_path, 1, steps=100_000, eval_strategy="epoch", save_only_model=True) as launcher:
        launcher.wait_for_ranks()
        progress = launcher.report()["ranks"][0]
        assert (progress["total_steps"], progress["phase"]) == (100_000, "step")
        assert progress["loss"] > 0
        assert progress["tokens_per_second"] > 0
        assert launcher.request("/yield", body=yield_body(1), headers=bearer(TOKEN))[0] == 202
        code, output = launcher.finish()
        assert code == ExitCode.YIELDED, output
        ended = launcher.termination
        assert ended.checkpoint is not None
        assert ended.checkpoint.path == str(out / f"checkpoint-{ended.step}")

    with trainer(tmp_path, 2, steps=ended.step + 2) as launcher:
        eventually(
            lambda: all(rank["resumed_from"] == ended.step for rank in launcher.report()["ranks"]),
            what="both ranks resume",
        )
        assert launcher.report()["ranks"][0]["checkpoint"]["path"] == ended.checkpoint.path
        code, output = launcher.finish()
        assert code == ExitCode.DONE, output
        assert launcher.termination.step == ended.step + 2


@SLOW
def test_a_loop_over_accelerate_ends_after_its_next_save_and_goes_on_from_it(tmp_path: Path) -> None:
    states = tmp_path / "job" / "script" / "states"
    with attempt(tmp_path, 1, "job_loop.py", "100000") as launcher:
        launcher.wait_for_ranks()
        assert launcher.request("/yield", body=yield_body(1), headers=bearer(TOKEN))[0] == 202
        code, output = launcher.finish()
        assert code == ExitCode.YIELDED, output
        ended = launcher.termination
        assert ended.checkpoint is not None
        assert ended.checkpoint.path == str(states / str(ended.step))
        assert ended.step % 5 == 0

    with attempt(tmp_path, 2, "job_loop.py", str(ended.step + 2)) as launcher:
        eventually(lambda: launcher.report()["ranks"][0]["resumed_from"] == ended.step, what="it resumes")
        assert launcher.report()["ranks"][0]["checkpoint"]["path"] == ended.checkpoint.path
        code, output = launcher.finish()
        assert code == ExitCode.DONE, output


def test_the_best_model_at_the_end_leaves_the_reported_step_as_it_is(tmp_path: Path) -> None:
    """The evaluation after step 2 is the best by this measure, and its checkpoint is loaded after step 6."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    with trainer(tmp_path, 1, steps=6, **best, eval_strategy="steps", eval_steps=2, save_steps=2) as launcher:
        code, output = launcher.finish()
    assert code == ExitCode.DONE, output
    state = json.loads(
        (tmp_path / "job" / "script" / "out" / "checkpoint-6" / "trainer_state.json").read_text()
    )
    assert state["best_global_step"] == 2
    assert launcher.termination.step == 6
