"""A relative folder is resolved when it is given: a later chdir changes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.runtime.zero.sharded_model import used_spill_store

pytestmark = pytest.mark.ranks


def start(stage: int = 1, **zero: Any) -> Any:
    return zt.initialize(
        model=nn.Linear(64, 64),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": stage, **zero},
        },
    )[0]


def train(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 64)).mean())
    engine.step()


def moved_during_a_save(folder: str) -> list[str]:
    os.chdir(Path(folder) / "here")
    engine = start()
    train(engine)
    promised = engine.save_checkpoint("run", asynchronous=True)
    os.chdir(Path(folder) / "there")
    engine.wait_for_checkpoint()
    assert promised.path == engine.last_save.path
    os.chdir(Path(folder) / "here")
    path, _ = engine.load_checkpoint("run")
    exported = engine.save_16bit_model("model")
    return [str(engine.last_save.path), str(path), str(exported)]


def test_saves_loads_and_exports(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    for saved, loaded, exported in run_ranks(2, moved_during_a_save, str(tmp_path)):
        assert saved == loaded == str(tmp_path / "here" / "run" / Path(saved).name)
        assert exported == str(tmp_path / "here" / "model")
    assert not any((tmp_path / "there").iterdir())


def moved_while_spilling(folder: str, key: str) -> list[str]:
    os.chdir(Path(folder) / "here")
    zero: dict[str, Any] = {"offload_optimizer": {"device": "nvme", "nvme_path": "spill"}}
    if key == "paths":
        zero = {"offload_optimizer": {"device": "nvme"}, "spill": {"paths": ["spill"]}}
    engine = start(2, **zero)
    train(engine)
    os.chdir(Path(folder) / "there")
    train(engine)
    spill_store = used_spill_store(engine.core)
    assert spill_store is not None
    assert engine.spill_space() is not None
    return [str(folder) for folder in spill_store.place.folders]


@pytest.mark.parametrize("key", ["nvme_path", "paths"])
def test_a_spill(tmp_path: Path, key: str) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    found = run_ranks(2, moved_while_spilling, str(tmp_path), key)
    assert found == [[str(tmp_path / "here" / "spill")]] * 2
    assert (tmp_path / "here" / "spill").is_dir()
    assert not any((tmp_path / "there").iterdir())
