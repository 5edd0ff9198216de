"""A whole training without a cluster: job file, launcher, engine, checkpoint; a killed rank changes no
bit.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.launcher import eventually
from tests.support.local_jobs import RunningCommand, running

pytestmark = pytest.mark.ranks


pytest.importorskip("torch", reason="needs the runtime extra")

STEPS = 30
JOB: dict[str, Any] = {
    "apiVersion": "zerotrain.dev/v1alpha1",
    "kind": "ZeroTrainingJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "workers": 2,
        "image": "example.org/image:1",
        "model": {"gpt": {"dModel": 32, "layers": 2, "heads": 2, "context": 32}},
        "data": {"path": "builtin:python-stdlib"},
        "steps": STEPS,
        "logEverySteps": 1,
        "checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "c"}}, "everySteps": 4},
        "config": {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    },
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that trains on the source of one module of the standard library."""
    (tmp_path / "text.py").write_text(inspect.getsource(inspect))
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(JOB))
    return path


def rank_lines(command: RunningCommand, attempt: int) -> str:
    path = command.run_dir / "attempts" / str(attempt) / "output.log"
    return path.read_text() if path.exists() else ""


def test_killed_rank_costs_steps_but_changes_no_loss(job: Path, tmp_path: Path) -> None:
    data = ("--data", str(tmp_path / "text.py"))
    with running(job, tmp_path / "undisturbed", *data) as command:
        code, output = command.finish()
        assert code == 0, output
        expected = command.last_report(1)

    with running(job, tmp_path / "disturbed", *data) as command:
        ranks = command.ranks(1)
        eventually(lambda: "checkpoint of step 4 is durable" in rank_lines(command, 1), what="checkpoint")
        os.kill(ranks[1], signal.SIGKILL)
        code, output = command.finish()
        assert code == 0, output
        assert "attempt 1 ended with 137" in output
        actual = command.last_report(2)

    assert actual.ranks[0].resumed_from is not None
    assert actual.ranks[0].resumed_from >= 4
    for before, after in zip(expected.ranks, actual.ranks, strict=True):
        assert (after.step, after.loss, after.grad_norm) == (STEPS, before.loss, before.grad_norm)


def test_unreadable_data_ends_the_job_once_with_a_next_step(job: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with running(job, tmp_path / "run", "--data", str(empty)) as command:
        code, output = command.finish()
    assert code == 65, output
    assert "attempts:   1\n" in output
    assert str(empty) in output
    assert not (tmp_path / "run" / "checkpoints" / "tiny" / "latest").exists()
