"""The numbers of every step reach trackers through their own libraries, in one run over all attempts."""

from __future__ import annotations

import csv
import importlib.util
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.contract.config import ConfigError
from zerotrain.runtime.trackers import monitor
from zerotrain.runtime.trackers.run import run_of_process

pytestmark = pytest.mark.ranks

PATIENCE_S = 120.0
"""Time that the end of an engine waits here: on a busy machine a library may take long to start."""
FILES = {"enabled": True, "output_path": "board", "job_name": "gpt"}
UID = "5f0c8a4e-0000-4000-8000-00000000abcd"


def environment(folder: Path, attempt: int, *, uid: str = UID) -> dict[str, str]:
    """Return what a launcher sets for one rank of an attempt."""
    return {
        "ZEROTRAIN_JOB": "gpt",
        "ZEROTRAIN_JOB_UID": uid,
        "ZEROTRAIN_ATTEMPT": str(attempt),
        "ZEROTRAIN_CHECKPOINT_DIR": str(folder),
        "ZEROTRAIN_CONFIG": "unused.json",
        "NODE_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "WANDB_MODE": "offline",
    }


def train(folder: str, trackers: dict[str, Any], attempt: int, first: int, steps: int) -> list[float]:
    """Train `steps` steps from step `first` on; return the losses of this rank."""
    os.environ |= environment(Path(folder), attempt)
    monitor.CLOSE_TIMEOUT_S = PATIENCE_S
    torch.manual_seed(0)
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    engine, *_ = zt.initialize(model=nn.Linear(4, 1), config=config | trackers)
    engine.global_steps = first
    losses = []
    for _ in range(steps):
        loss = engine(torch.ones(2, 4)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.monitor.enabled
    engine.monitor.write_events([("eval/accuracy", 0.5, engine.global_steps)])
    engine.close()
    assert engine.monitor.dropped == 0
    return losses


def attempts(folder: Path, trackers: dict[str, Any]) -> list[float]:
    """Run five steps, and in a second attempt the fourth step and more; return rank 0's losses by step."""
    first, _ = run_ranks(2, train, str(folder), trackers, 1, 0, 5)
    second, _ = run_ranks(2, train, str(folder), trackers, 2, 3, 4)
    return [*first[:3], *second]


def test_tensorboard_s_reader_finds_each_step_once(tmp_path: Path) -> None:
    losses = attempts(tmp_path, {"tensorboard": FILES})
    found = EventAccumulator(str(tmp_path / "board" / "gpt"))
    found.Reload()
    points = found.Scalars("train/loss")
    assert [point.step for point in points] == list(range(1, 8))
    assert [point.value for point in points] == pytest.approx(losses)
    assert [point.value for point in found.Scalars("train/restarts")] == [0, 0, 0, 1, 1, 1, 1]
    names = set(found.Tags()["scalars"])
    assert {f"train/{name}" for name in ("lr", "grad_norm", "memory_peak_bytes", "step_seconds")} < names
    assert "eval/accuracy" in names
    (text,) = found.Tensors("run/text_summary")[-1].tensor_proto.string_val
    assert b"zerotrain report gpt" in text
    assert UID.replace("-", "").encode() in text


def test_csv_files_hold_each_step_once(tmp_path: Path) -> None:
    losses = attempts(tmp_path, {"csv_monitor": FILES})
    with (tmp_path / "board" / "gpt" / "train_loss.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "train/loss"]
    assert [int(step) for step, _ in rows] == list(range(1, 8))
    assert [float(value) for _, value in rows] == pytest.approx(losses)


def test_mlflow_s_store_has_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = attempts(tmp_path, {"mlflow": {"enabled": True, "project": "texts"}})
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("texts")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(run.info.run_id, "train/loss")
    last = {point.step: point.value for point in sorted(points, key=lambda point: point.timestamp)}
    assert [last[step] for step in range(1, 8)] == pytest.approx(losses)
    assert run.data.tags["zerotrain.report"] == "zerotrain report gpt"
    assert run.info.status == "FINISHED"


def test_wandb_offline_keeps_one_id(tmp_path: Path) -> None:
    attempts(tmp_path, {"wandb": {"enabled": True, "project": "texts", "group": "nightly"}})
    runs = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert len(runs) == 2
    for run in runs:
        (file,) = run.glob(f"run-{UID.replace('-', '')}.wandb")
        assert file.stat().st_size > 0
        assert b"train/loss" in file.read_bytes()


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "zerotrain.runtime.trackers.libraries.find_spec",
        lambda name: None if name == "tensorboard" else find(name),
    )
    config = {"train_batch_size": 1, "tensorboard": {"enabled": True}}
    with pytest.raises(
        ConfigError, match=r"tensorboard\.enabled: needs .* pip install 'zerotrain\[tensorboard\]'"
    ):
        zt.initialize(model=nn.Linear(1, 1), config=config)


def test_an_api_key_is_not_read_from_the_configuration() -> None:
    config = {"train_batch_size": 1, "comet": {"enabled": True, "api_key": "secret-word"}}
    with pytest.raises(ConfigError, match=r"COMET_API_KEY") as raised:
        zt.initialize(model=nn.Linear(1, 1), config=config)
    assert "secret-word" not in str(raised.value)


def test_the_run_of_a_local_job_is_that_of_its_checkpoint_folder(tmp_path: Path) -> None:
    def local(attempt: int, folder: Path) -> str:
        environ = environment(folder, attempt, uid="local")
        return run_of_process(samples_per_step=1, environ=environ).id

    assert local(1, tmp_path) == local(2, tmp_path) != local(1, tmp_path / "other")


def test_without_a_tracker_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine, *_ = zt.initialize(model=nn.Linear(4, 1), config={"train_batch_size": 1})
    engine.backward(engine(torch.ones(1, 4)).mean())
    engine.step()
    engine.monitor.write_events([("loss", math.nan, 1)])
    engine.close()
    assert not engine.monitor.enabled
    assert not list(tmp_path.iterdir())
