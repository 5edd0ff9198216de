"""`zerotrain config check`: each key is run, explained or refused, and the exit code says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.local_jobs import job_file
from zerotrain.cli.main import app

pytestmark = pytest.mark.unit


def check(file: Path, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = CliRunner().invoke(app, ["config", "check", str(file), "-o", "json", *options])
    return done.exit_code, {row["key"]: row for row in json.loads(done.output)}


def written(folder: Path, **values: Any) -> Path:
    file = folder / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **values}))
    return file


def test_what_runs_and_what_is_explained(tmp_path: Path) -> None:
    zero = {"stage": 2, "cpu_offload": True, "contiguous_gradients": True}
    code, rows = check(written(tmp_path, zero_optimization=zero))
    assert code == 0
    assert rows["zero_optimization.stage"]["outcome"] == "run"
    assert rows["zero_optimization.cpu_offload"]["outcome"] == "explained"
    assert "offload_optimizer" in rows["zero_optimization.cpu_offload"]["why"]


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"tensor_parallel": {"tp_size": 8}}, "tensor_parallel.tp_size", "postponed"),
        ({"zero_optimisation": {}}, "zero_optimisation", "zero_optimization"),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage", "must be one of"),
        (
            {"train_batch_size": 7, "gradient_accumulation_steps": 2},
            "train_batch_size",
            "must be train_micro_batch",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, values: dict[str, Any], key: str, words: str) -> None:
    code, rows = check(written(tmp_path, **values))
    assert (code, rows[key]["outcome"]) == (64, "refused")
    assert words in rows[key]["why"]


def test_a_job_file_is_resolved_for_its_own_ranks(tmp_path: Path) -> None:
    job = job_file(tmp_path, config={"train_batch_size": 6}).rename(tmp_path / "job.yaml")
    assert check(job)[0] == 0
    assert check(job, "--world-size", "5")[0] == 64


def test_texts_of_the_file_are_not_markup_and_drive_no_terminal(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["config", "check", str(written(tmp_path, **{"[red]\x1b[2Jx": 1}))])
    assert done.exit_code == 64
    assert "\x1b[2J" not in done.output
    assert "[red]" in done.output.replace("\n", "")
