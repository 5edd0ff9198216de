"""`get_extra_state` of modules is in checkpoints and is restored through `set_extra_state`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.runtime.checkpoint import CheckpointError, CheckpointMismatch
from zerotrain.runtime.weights.checkpoint_export import Request, export_checkpoint

pytestmark = pytest.mark.ranks

STATES: dict[str, Any] = {
    "numbers": {"history": [1, 2], 3: (4.5, None)},
    "tensor": torch.arange(5, dtype=torch.uint8),
    "tensors within": {"scale": torch.tensor([0.5]), "names": {"a"}},
    "bytes": b"\0\1",
}


class Counting(nn.Linear):
    def __init__(self, state: Any = None) -> None:
        super().__init__(40, 40)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Net(nn.Module):
    def __init__(self, state: Any = None, *, counts: bool = True) -> None:
        super().__init__()
        inner = Counting(state) if counts else nn.Linear(40, 40)
        self.inner = nn.Sequential(inner, nn.Linear(40, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def start(model: nn.Module, stage: int = 1) -> Any:
    return zt.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD"},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )[0]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and any(isinstance(value, torch.Tensor) for value in left.values()):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def kept(folder: str, stage: int) -> list[str]:
    changed = []
    for name, state in STATES.items():
        for in_background in (False, True):
            engine = start(Net(state), stage)
            engine.save_checkpoint(Path(folder) / name, asynchronous=in_background)
            engine.close()
            model = Net("other")
            engine = start(model, stage)
            engine.load_checkpoint(Path(folder) / name, load_module_only=in_background)
            if not same(model.inner[0].state, state):
                changed.append(name)
            engine.close()
    return changed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_comes_back(tmp_path: Path, stage: int) -> None:
    assert run_ranks(2, kept, str(tmp_path), stage) == [[], []]


def refused(folder: str) -> list[str]:
    texts = []
    engine = start(Net({"model": nn.Linear(1, 1)} if torch.distributed.get_rank() else {}))
    try:
        engine.save_checkpoint(folder)
    except CheckpointError as error:
        texts.append(str(error))
    assert not Path(folder).exists()
    engine.comm.gather_record([0.0])
    return texts


def test_what_cannot_be_stored_is_refused_on_every_rank_by_its_name(tmp_path: Path) -> None:
    first, second = run_ranks(2, refused, str(tmp_path / "run"))
    assert first == second
    assert "extra_state.inner.0._extra_state.model is of type torch.nn.modules.linear.Linear" in first[0]


def test_a_load_is_strict_about_it(tmp_path: Path) -> None:
    start(Net({"a": 1})).save_checkpoint(tmp_path / "with")
    start(Net(counts=False)).save_checkpoint(tmp_path / "without")
    model = Net({"a": 2})
    engine = start(model)
    with pytest.raises(CheckpointMismatch, match=r"holds no 'inner\.0\._extra_state'"):
        engine.load_checkpoint(tmp_path / "without")
    engine.load_checkpoint(tmp_path / "without", load_module_strict=False)
    assert model.inner[0].state == {"a": 2}
    plain = start(Net(counts=False))
    with pytest.raises(CheckpointMismatch, match=r"holds 'inner\.0\._extra_state' .*no get_extra_state"):
        plain.load_checkpoint(tmp_path / "with")
    plain.load_checkpoint(tmp_path / "with", load_module_strict=False)


@pytest.mark.parametrize("name", ["tensor", "numbers"])
def test_exports_hold_tensors_and_name_what_they_leave_out(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(Net(STATES[name]))
    engine.save_checkpoint(tmp_path / "run", tag="a")
    with caplog.at_level(logging.WARNING, "zerotrain"):
        engine.save_16bit_model(tmp_path / "16bit")
    export_checkpoint(
        Request(
            checkpoint=tmp_path / "run",
            output=tmp_path / "fp32.safetensors",
            dtype=torch.float32,
            max_bytes=1 << 40,
        )
    )
    for file in (tmp_path / "16bit" / "model.safetensors", tmp_path / "fp32.safetensors"):
        found = load_file(file)
        if name == "tensor":
            Net().load_state_dict(found)
            assert torch.equal(found["inner.0._extra_state"], STATES[name])
        else:
            assert "inner.0._extra_state" not in found
    assert ("inner.0._extra_state" in caplog.text) is (name != "tensor")
