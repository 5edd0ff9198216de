"""Tied weights: stored once, with the names recorded; files with one name or with all of them load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.runtime.weights.checkpoint_export import Request, export_checkpoint

pytestmark = pytest.mark.ranks


class Twice(nn.Module):
    """A model with tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.embed(x))
        return result


class Thrice(Twice):
    """A model with three names of one weight, and a block that comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(32, 64)
        self.second.weight = self.embed.weight
        self.blocks = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.blocks.append(self.blocks[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.head(hidden) + self.second(hidden)
        return result


class Partly(nn.Module):
    """Blocks that share one of their two weights, and a buffer of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        lasts = [nn.Linear(32, 32) for _ in range(3)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), last) for last in lasts)
        for last in lasts[1:]:
            last.weight = lasts[0].weight
        scale = torch.full((3,), 2.0)
        self.register_buffer("scale", scale)
        self.blocks[0].register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * self.get_buffer("scale")[0]


MODELS: dict[str, Callable[[], nn.Module]] = {"twice": Twice, "thrice": Thrice, "partly": Partly}
ONCE = {
    "twice": {"head.weight": "embed.weight"},
    "thrice": {
        "head.weight": "embed.weight",
        "second.weight": "embed.weight",
        "blocks.2.weight": "blocks.0.weight",
        "blocks.2.bias": "blocks.0.bias",
    },
    "partly": {"blocks.1.1.weight": "blocks.0.1.weight", "blocks.2.1.weight": "blocks.0.1.weight"},
}
BUFFERS = {"partly": {"blocks.0.scale": "scale"}}


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }


def written(folder: str, kind: str, stage: int) -> dict[str, Any]:
    """Train one step and store everything; return the state dict and its number of distinct tensors."""
    torch.manual_seed(0)
    engine, *_ = zt.initialize(model=MODELS[kind](), config=config(stage))
    engine.backward(engine(torch.arange(8)).square().mean())
    engine.step()
    engine.save_checkpoint(f"{folder}/checkpoints")
    engine.save_16bit_model(f"{folder}/export")
    state = engine.module_state_dict()
    engine.close()
    values: dict[str, Any] = {name: value.numpy() for name, value in state.items()}
    values["tensors"] = len({value.data_ptr() for value in state.values()})
    return values


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("stage", [1, 3])
def test_every_form_loads_where_it_should(kind: str, stage: int, tmp_path: Path) -> None:
    expected = run_ranks(2, written, str(tmp_path), kind, stage)[0]
    plain = MODELS[kind]().state_dict()
    ties = {**ONCE[kind], **BUFFERS.get(kind, {})}
    assert expected.pop("tensors") == len(plain) - len(ties)
    assert expected.keys() == plain.keys()

    (manifest,) = Path(tmp_path, "checkpoints").glob("step-*/manifest.json")
    record = json.loads(manifest.read_text())
    assert record["aliases"] == ONCE[kind]
    assert not ONCE[kind].keys() & record["tensors"].keys()

    exported = tmp_path / "export" / "model.safetensors"
    assert load_file(exported).keys() == plain.keys() - ties.keys()
    with safe_open(exported, "pt") as file:
        assert file.metadata() == {"format": "pt", **ties}
    by_library = MODELS[kind]()
    load_model(by_library, str(exported))
    assert_equal(by_library, expected)

    export_checkpoint(request(tmp_path, "all.safetensors", every_name=True))
    by_torch = MODELS[kind]()
    by_torch.load_state_dict(load_file(tmp_path / "all.safetensors"))
    assert_equal(by_torch, expected)
    for name in ("all.safetensors", "export"):
        ours = MODELS[kind]()
        zt.load_weights(ours, tmp_path / name)
        assert_equal(zt.materialize(ours), expected)


def request(folder: Path, output: str, *, every_name: bool) -> Request:
    return Request(
        checkpoint=folder / "checkpoints",
        output=folder / output,
        dtype=torch.float32,
        max_bytes=1 << 30,
        every_name=every_name,
    )


def assert_equal(model: nn.Module, expected: dict[str, Any]) -> None:
    for name, value in model.state_dict().items():
        assert np.array_equal(value.numpy(), expected[name]), name


def other_order(folder: str) -> list[str]:
    """Load into a model that names the head first, and into one without ties."""

    class HeadFirst(nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.head, self.embed = nn.Linear(32, 64, bias=False), nn.Embedding(64, 32)
            if tied:
                self.embed.weight = self.head.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.embed(x))
            return result

    wrong = []
    for tied in (True, False):
        torch.manual_seed(1)
        engine, *_ = zt.initialize(model=HeadFirst(tied=tied), config=config(3))
        engine.load_checkpoint(f"{folder}/checkpoints", load_optimizer_states=False)
        state = engine.module_state_dict()
        if not torch.equal(
            state["embed.weight"], load_file(f"{folder}/export/model.safetensors")["embed.weight"]
        ):
            wrong.append(f"embed {tied}")
        if not torch.equal(state["head.weight"], state["embed.weight"]):
            wrong.append(f"head {tied}")
        engine.close()
    return wrong


def test_ties_load_by_any_of_their_names(tmp_path: Path) -> None:
    run_ranks(2, written, str(tmp_path), "twice", 3)
    assert run_ranks(2, other_order, str(tmp_path))[0] == []


def test_a_file_needs_one_name_only(tmp_path: Path) -> None:
    values = torch.randn(64, 32)
    for name in ("embed.weight", "head.weight"):
        save_file({name: values}, tmp_path / "one.safetensors")
        model = Twice()
        zt.load_weights(model, tmp_path / "one.safetensors")
        assert torch.equal(zt.materialize(model).state_dict()["head.weight"], values)
    save_file({"embed.weight": values, "head.weight": torch.ones(3)}, tmp_path / "odd.safetensors")
    with pytest.raises(zt_error(), match=r"'head\.weight' has shape \[3\] in the file"):
        zt.load_weights(Twice(), tmp_path / "odd.safetensors")


def zt_error() -> type[Exception]:
    from zerotrain.runtime.weights import WeightsError

    return WeightsError
