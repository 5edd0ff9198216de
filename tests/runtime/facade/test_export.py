"""Exports load in transformers with the same logits, at every stage, and appear atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import zerotrain.runtime as zt
from tests.support import resident
from tests.support.hf_folders import save, token_ids
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tiny_models import TinyGPT
from tests.support.training import whole_parameters, world
from zerotrain.runtime.weights.folder import TEMPORARY

pytestmark = pytest.mark.ranks


def config(stage: int, dtype: str = "fp32") -> dict[str, Any]:
    return {
        "train_batch_size": world()[1],
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }


def trained_and_exported(
    folder: str, out: str, stage: int, dtype: str, implementation: str
) -> dict[str, np.ndarray[Any, Any]]:
    """Train one step, save, and return the trained weights."""
    rank, world_size = world()
    model = zt.load_pretrained(folder, implementation=implementation)
    engine, *_ = zt.initialize(model=model, config=config(stage, dtype))
    ids = token_ids(batch=world_size)[rank : rank + 1]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_16bit_model(out, "pytorch_model.bin", max_shard_size="30KB")
    with zt.full_parameters(model):
        found = whole_parameters(model)
    engine.close()
    return found


@pytest.mark.parametrize(
    ("case", "stage", "dtype", "implementation"),
    [
        ("llama tied", 3, "bf16", "zerotrain"),
        ("qwen3", 3, "fp32", "transformers"),
        ("gpt2", 1, "bf16", "zerotrain"),
        ("mistral", 0, "fp32", "zerotrain"),
    ],
)
def test_transformers_loads_what_was_trained(
    case: str, stage: int, dtype: str, implementation: str, tmp_path: Path
) -> None:
    import transformers

    source, out = tmp_path / "in", tmp_path / "out"
    model = save(case, source)
    (source / "tokenizer.json").write_text("{}")
    trained = run_ranks(2, trained_and_exported, str(source), str(out), stage, dtype, implementation)[0]
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(out)
    name = "bfloat16" if dtype == "bf16" else "float32"
    assert loaded.dtype == getattr(torch, name)
    for key, value in loaded.named_parameters():
        assert np.array_equal(value.detach().float().cpu().numpy(), trained[key]), key
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.data = torch.from_numpy(trained[key]).to(loaded.dtype)
        assert torch.equal(loaded.eval()(token_ids()).logits, model(token_ids()).logits)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) == (case in ("qwen3", "mistral"))
    assert len(set(index["weight_map"].values())) > 1
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (out / TEMPORARY).exists()


class WithBuffers(nn.Module):
    """A model with a frozen and a tied parameter, whole numbers, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = TinyGPT(tied=True)
        self.frozen = nn.Parameter(torch.randn(7, 5), requires_grad=False)
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(tokens, targets)
        return loss


def saved_in_every_form(out: str, stage: int) -> dict[str, np.ndarray[Any, Any]]:
    torch.manual_seed(0)
    model = WithBuffers()
    engine, *_ = zt.initialize(model=model, config=config(stage, "bf16"))
    folder = Path(out)
    engine.save_16bit_model(folder / "plain")
    engine.save_16bit_model(folder / "fp32", dtype="fp32", save_filename="weights.safetensors")
    engine.save_16bit_model(folder / "trained", exclude_frozen_parameters=True)
    engine.save_checkpoint(folder / "checkpoints")
    engine.close()
    torch.manual_seed(0)
    return whole_parameters(WithBuffers())


@pytest.mark.parametrize("stage", [1, 3])
def test_own_models_are_exported_whole(stage: int, tmp_path: Path) -> None:
    expected = run_ranks(3, saved_in_every_form, str(tmp_path), stage)[0]
    again = WithBuffers()
    load_model(again, str(tmp_path / "fp32" / "weights.safetensors"))
    for name, value in whole_parameters(again).items():
        assert np.array_equal(value, expected[name] if name != "frozen" else _bf16(expected[name])), name
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert plain["steps"].tolist() == [0, 1, 2]
    assert "table" not in plain
    assert plain["gpt.embed.weight"].dtype is torch.bfloat16
    with safe_open(tmp_path / "plain" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "gpt.head.weight": "gpt.embed.weight"}
    assert set(plain) - set(load_file(tmp_path / "trained" / "model.safetensors")) == {"frozen"}


def _bf16(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return torch.from_numpy(value).bfloat16().float().cpu().numpy()


def export_big(out: str) -> int:
    """Return the growth of resident memory during an export of 64 MB of weights."""
    with zt.init_context(seed=0):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    engine, *_ = zt.initialize(model=model, config=config(3))
    engine.save_16bit_model(out)  # files and code that the first export needs
    before = resident.reset_peak()
    engine.save_16bit_model(out, dtype="bf16")
    grown = resident.peak_bytes() - before
    engine.close()
    return grown


def test_memory_is_that_of_a_tile(tmp_path: Path) -> None:
    for grown in run_ranks(2, export_big, str(tmp_path)):
        assert grown <= 16 << 20, f"{grown / 1e6:.1f} MB for 64 MB of weights"


def replaced(out: str, break_at: str) -> None:
    """Export over an earlier export; with `break_at`, rank 0 crashes inside that function."""
    torch.manual_seed(world()[0])
    first = nn.Linear(16, 16)
    model = nn.Sequential(first, nn.Linear(16, 16))
    engine, *_ = zt.initialize(model=model, config=config(3))
    engine.save_16bit_model(out, max_shard_size="1200")
    with zt.full_parameters(model, write=True), torch.no_grad():
        first.weight.fill_(5.0)
    if break_at and world()[0] == 0:
        original = getattr(os, break_at)

        def broken(source: Any, *rest: Any, **named: Any) -> Any:
            if break_at != "replace" or str(rest[0]).endswith("index.json"):
                raise OSError(28, "No space left on device", str(source))
            return original(source, *rest, **named)

        setattr(os, break_at, broken)
    engine.save_16bit_model(out, max_shard_size="1200")
    engine.close()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in index.items()}


@pytest.mark.parametrize("break_at", ["", "posix_fallocate", "pwrite", "replace"])
def test_old_weights_stay_until_the_new_ones_are_whole(break_at: str, tmp_path: Path) -> None:
    others = {tmp_path / "notes.txt", tmp_path / "model_ema-best-of-3.safetensors"}
    for path in others:
        path.write_text("mine")
    if break_at:
        with pytest.raises(RankFailed, match="CheckpointNoSpace"):
            run_ranks(2, replaced, str(tmp_path), break_at)
    else:
        run_ranks(2, replaced, str(tmp_path), break_at)
    found = weights_of(tmp_path)
    assert found["0.weight"].eq(5.0).all() == (not break_at)
    assert len(found) == 4
    assert {path.read_text() for path in others} == {"mine"}
    if not break_at:
        index = (tmp_path / "model.safetensors.index.json").read_text()
        assert {path.name for path in set(tmp_path.glob("*.safetensors")) - others} == set(
            json.loads(index)["weight_map"].values()
        ), "the old files are still there"


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    engine, *_ = zt.initialize(model=nn.Linear(2, 2), config=config(0))
    with pytest.raises(ValueError, match=r"max_shard_size must be a size such as 5GB.*'big'"):
        engine.save_16bit_model(tmp_path, max_shard_size="big")
    with pytest.raises(ValueError, match='dtype must be "bf16", "fp16" or "fp32"'):
        engine.save_16bit_model(tmp_path, dtype="int4")
    with pytest.raises(ValueError, match="save_filename must be a file's name inside the folder"):
        engine.save_16bit_model(tmp_path, "../model.safetensors")
    engine.close()
