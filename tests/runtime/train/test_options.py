"""Effects of the configuration and the checkpoint policy on the trainer, seen from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiers import with_slow_rows
from tests.support.trainer_runs import TrainerRun, config, job
from zerotrain.contract.train_spec import CheckpointPolicy
from zerotrain.runtime.checkpoint.names import committed
from zerotrain.runtime.train.checkpointing import is_due
from zerotrain.runtime.train.report import expected_interval

GPT = {"gpt": {"d_model": 16, "layers": 2, "heads": 2, "context": 8}}


@pytest.mark.ranks
@pytest.mark.slow(
    cheaper="tests/runtime/facade/test_activation_checkpointing.py::test_no_bit_changes_at_any_stage"
)
def test_activation_checkpointing_changes_no_loss(tmp_path: Path) -> None:
    losses = []
    for name, values in (("plain", config()), ("recomputed", config(activation_checkpointing={}))):
        run = TrainerRun(tmp_path / name, job(model=GPT, steps=3), config=values, world_size=2).start()
        run.finish()
        losses.append(run.losses())
    assert losses[0] == losses[1]
    assert sorted(losses[0]) == [1, 2, 3]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", with_slow_rows([0, 1, 2], quick=[1]))
def test_lower_stages_end_in_the_same_losses(tmp_path: Path, stage: int) -> None:
    expected = TrainerRun(tmp_path / "3", job(model=GPT, steps=3), world_size=2).start()
    expected.finish()
    run = TrainerRun(
        tmp_path / str(stage),
        job(model=GPT, steps=3),
        config=config(zero_optimization={"stage": stage}),
        world_size=2,
        checkpoint_dir=tmp_path / "c",
    ).start()
    run.finish()
    assert run.losses() == expected.losses()
    # A checkpoint of this stage also loads at stage 3.
    resumed = TrainerRun(
        tmp_path / "r", job(model=GPT, steps=4), world_size=2, attempt=2, checkpoint_dir=tmp_path / "c"
    ).start()
    assert "resumed from step 3" in resumed.finish()


@pytest.mark.ranks
@pytest.mark.parametrize("asynchronous", [False, True])
def test_last_step_is_always_saved_and_old_ones_go(tmp_path: Path, asynchronous: bool) -> None:
    spec = job(steps=7, checkpoint={"every_steps": 2, "keep_last": 2, "asynchronous": asynchronous})
    run = TrainerRun(tmp_path / "a", spec, world_size=2, checkpoint_dir=tmp_path / "c").start()
    log = run.finish()
    assert [item.step for item in committed(tmp_path / "c")] == [7, 6]
    assert "removed 1 older" in log


@pytest.mark.ranks
def test_checkpoints_by_time_are_rank_0s_decision(tmp_path: Path) -> None:
    spec = job(steps=5, checkpoint={"every_seconds": 1e-9, "keep_last": 10})
    TrainerRun(tmp_path / "a", spec, world_size=2, checkpoint_dir=tmp_path / "c").start().finish()
    assert [item.step for item in committed(tmp_path / "c")] == [5, 4, 3, 2, 1]


@pytest.mark.ranks
def test_run_without_a_checkpoint_folder(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path / "a", job(steps=3)).start()
    assert "durable" not in run.finish()


@pytest.mark.ranks
def test_log_lines_come_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    run = TrainerRun(tmp_path / "a", job(steps=7, log_every_steps=3)).start()
    run.finish()
    assert sorted(run.losses()) == [3, 6, 7]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("policy", "step", "time_up", "due"),
    [
        (CheckpointPolicy(), 10, True, False),
        (CheckpointPolicy(every_steps=5), 10, False, True),
        (CheckpointPolicy(every_steps=5), 11, True, False),
        (CheckpointPolicy(every_seconds=60), 11, True, True),
        (CheckpointPolicy(every_seconds=60), 11, False, False),
        (CheckpointPolicy(every_steps=5, every_seconds=60), 11, True, True),
    ],
)
def test_when_a_checkpoint_is_due(policy: CheckpointPolicy, step: int, time_up: bool, due: bool) -> None:
    assert is_due(policy, step=step, is_time_up=time_up) is due


@pytest.mark.unit
def test_expected_interval() -> None:
    assert expected_interval(CheckpointPolicy(), 2.0) == 0.0
    assert expected_interval(CheckpointPolicy(every_steps=20), 2.0) == 40.0
    assert expected_interval(CheckpointPolicy(every_steps=20, every_seconds=30), 2.0) == 30.0
