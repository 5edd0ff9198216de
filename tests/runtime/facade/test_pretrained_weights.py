"""Weights of Hugging Face folders reach the engine exactly, at every stage; misfits are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zerotrain.runtime as zt
from tests.support.hf_folders import model_of, save, token_ids
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.weights import WeightsError


def config(stage: int, world_size: int, dtype: str = "fp32") -> dict[str, Any]:
    return {
        "train_batch_size": world_size,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    }


def losses(folder: str, stage: int, implementation: str) -> list[float]:
    """Return the mean losses over ranks of three steps on one batch."""
    rank, world_size = world()
    model = zt.load_pretrained(folder, config(stage, world_size), implementation=implementation)
    engine, *_ = zt.initialize(model=model, config=config(stage, world_size))
    ids = token_ids(batch=world_size)[rank : rank + 1]
    found = []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        rows = engine.comm.gather_record([loss.item()])
        found.append(sum(row[0] for row in rows) / world_size)
    engine.close()
    return found


RUNS = {
    "llama tied": ((0, "zerotrain"), (3, "transformers")),
    "qwen3": ((2, "transformers"), (3, "zerotrain")),
}


def all_losses(folders: dict[str, str]) -> dict[str, list[float]]:
    return {
        f"{case} {stage} {kind}": losses(folders[case], stage, kind)
        for case, runs in RUNS.items()
        for stage, kind in runs
    }


def reference_losses(case: str, world_size: int) -> list[float]:
    model = model_of(case).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        parts = [model(input_ids=ids[None], labels=ids[None]).loss for ids in token_ids(batch=world_size)]
        loss = torch.stack(parts).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.ranks
def test_training_goes_as_with_the_library_alone(tmp_path: Path) -> None:
    folders = {}
    for case in RUNS:
        folders[case] = str(tmp_path / case)
        save(case, Path(folders[case]), max_shard_size="20KB")
        assert (tmp_path / case / "model.safetensors.index.json").is_file(), (
            "one file: the index is not tested"
        )
    for run, found in run_ranks(2, all_losses, folders)[0].items():
        case = run.rsplit(maxsplit=2)[0]
        np.testing.assert_allclose(found, reference_losses(case, 2), rtol=2e-4, err_msg=run)


def fitted(folder: str, stage: int) -> dict[str, Any]:
    """Return bf16 weights that are stored in fp32, and masters, after the start."""
    _, world_size = world()
    with zt.init_context():
        model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 40))
    files = zt.load_weights(model, Path(folder) / "any.safetensors").files
    engine, *_ = zt.initialize(model=model, config=config(stage, world_size, "bf16"))
    unit = engine.core.units[0]
    master = engine.optimizer.states[unit.name].read("master", 0, 100).tolist()
    with zt.full_parameters(model):
        weights = {name: value.float().tolist() for name, value in model.state_dict().items()}
    engine.close()
    return {"weights": weights, "master": master, "read": files.bytes_read}


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.float16), (3, torch.float32), (3, torch.float64)])
def test_values_are_cast(stage: int, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored = {
        name: value.to(dtype)
        for name, value in nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 40)).state_dict().items()
    }
    save_file(stored, tmp_path / "any.safetensors")
    answers = run_ranks(2, fitted, str(tmp_path), stage)
    for answer in answers:
        for name, value in stored.items():
            assert answer["weights"][name] == value.float().bfloat16().float().tolist()
    assert answers[0]["master"] == stored["0.weight"].float().view(-1)[:100].tolist()
    assert sum(answer["read"] for answer in answers) == sum(value.nbytes for value in stored.values())


class Tied(nn.Module):
    """Two names of one parameter, a persistent and a derived buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3))


def saved(folder: Path, **changes: torch.Tensor | None) -> Path:
    tensors = {"embed.weight": torch.randn(8, 4), "count": torch.ones(3)}
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


def deferred() -> Tied:
    with zt.init_context():
        return Tied()


@pytest.mark.unit
def test_tied_parameters_need_one_name(tmp_path: Path) -> None:
    for changes in ({}, {"head__weight": torch.ones(8, 4), "embed__weight": None}):
        folder = saved(tmp_path, **changes)
        model = deferred()
        zt.load_weights(model, folder)
        zt.materialize(model)
        assert model.head.weight is model.embed.weight
        stored = load_file(folder / "model.safetensors")
        name = "embed.weight" if "embed.weight" in stored else "head.weight"
        assert torch.equal(model.embed.weight, stored[name])
        assert model.get_buffer("count").tolist() == [1.0] * 3


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed__weight": None}, "missing 'embed.weight'"),
        ({"count": None}, "missing 'count'"),
        ({"other": torch.ones(1)}, "unexpected 'other'"),
        ({"embed__weight": torch.ones(8, 5)}, r"'embed.weight' has shape \[8, 5\] in the file, \[8, 4\]"),
        ({"embed__weight": torch.ones(8, 4).int()}, "'embed.weight' is torch.int32 in the file"),
        (
            {"embed__weight": torch.ones(8, 4, dtype=torch.float8_e4m3fn)},
            "'embed.weight' is torch.float8_e4m3fn in the file, torch.float32 in the model",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=message):
        zt.load_weights(deferred(), saved(tmp_path, **changes))


@pytest.mark.unit
def test_without_strictness_the_constructors_values_stay(tmp_path: Path) -> None:
    model = deferred()
    report = zt.load_weights(model, saved(tmp_path, count=None, other=torch.ones(1)), strict=False)
    assert (report.missing, report.unexpected) == (("count",), ("other",))
    assert zt.materialize(model).get_buffer("count").tolist() == [0.0] * 3


@pytest.mark.unit
def test_files_without_the_base_prefix_load(tmp_path: Path) -> None:
    """The first GPT-2 folders have no prefix, and masks that models compute today."""
    original = save("gpt2", tmp_path)
    tensors = {
        name.removeprefix("transformer."): value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    model = zt.materialize(zt.load_pretrained(tmp_path, implementation="zerotrain"))
    for name, value in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.unit
def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"only pickled weights \(pytorch_model.bin\).*save_pretrained"):
        zt.load_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="are pickled"):
        zt.load_weights(deferred(), tmp_path / "pytorch_model.bin")


@pytest.mark.unit
def test_damaged_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        zt.load_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=r"holds no \.safetensors file"):
        zt.load_weights(deferred(), tmp_path)
    with pytest.raises(WeightsError, match="does not exist"):
        zt.load_weights(deferred(), tmp_path / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embed.weight": "../secret.safetensors"}}))
    with pytest.raises(WeightsError, match="is not a file beside it"):
        zt.load_weights(deferred(), tmp_path)
    save_file({"count": torch.ones(3)}, tmp_path / "a.safetensors")
    index.write_text(json.dumps({"weight_map": {"embed.weight": "a.safetensors"}}))
    with pytest.raises(WeightsError, match=r"names 'embed.weight' in a.safetensors, which does not hold it"):
        zt.load_weights(deferred(), tmp_path)
    index.write_text("{")
    with pytest.raises(WeightsError, match="cannot be read"):
        zt.load_weights(deferred(), tmp_path)
