"""Changes of a model between `from_pretrained` and `initialize` have the same result as without stage 3."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support import hf_families
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime import deepspeed
from zerotrain.runtime.construct.pending import is_pending

pytestmark = pytest.mark.ranks


def resized(model: Any) -> Any:
    model.resize_token_embeddings(101, mean_resizing=False)
    return model


def resized_by_means(model: Any) -> Any:
    model.resize_token_embeddings(90)
    model.resize_token_embeddings(99)
    return model


def written(model: Any) -> Any:
    model.lm_head.weight.data.mul_(2)
    model.lm_head.weight.data[3:5] = 0.5
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(model.model.layers[1].mlp.up_proj.weight.data)
    return model


def tied(model: Any) -> Any:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


def frozen(model: Any) -> Any:
    model.model.requires_grad_(False)
    return model


def in_bf16(model: Any) -> Any:
    return model.to(torch.bfloat16)


def copied(model: Any) -> Any:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    return twin


def loaded(model: Any) -> Any:
    state = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def gathered(model: Any) -> Any:
    weights = [model.lm_head.weight, model.model.norm.weight]
    is_plain = not is_pending(weights[0])
    with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
        if is_plain or world()[0] == 0:
            weights[0].data.mul_(3)
    with deepspeed.zero.GatheredParameters(weights):
        model.model.norm.weight.data.add_(weights[0].mean())
    return model


def adapted(model: Any, **options: Any) -> Any:
    import peft

    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def adapted_by_norms(model: Any) -> Any:
    return adapted(model, use_dora=True)


def adapted_with_head(model: Any) -> Any:
    return adapted(model, modules_to_save=["lm_head"])


def adapted_at_the_same_size(model: Any) -> Any:
    model.resize_token_embeddings(96)
    return adapted(model)


CHANGES: dict[Callable[[Any], Any], int | None] = {
    resized: 2,
    resized_by_means: 2,
    written: 2,
    tied: 0,
    frozen: 0,
    in_bf16: 0,
    copied: 0,
    loaded: None,
    gathered: 2,
    adapted: 0,
    adapted_by_norms: 0,
    adapted_with_head: 0,
    adapted_at_the_same_size: 0,
}
"""Number of the folder's parameters that are in memory afterwards; None = all."""


def prepared(folder: str) -> dict[str, Any]:
    """Return, for each change, what differs from the same without stage 3, and what is in memory."""
    hf_families.use_stage_3()
    found: dict[str, Any] = {}
    for change in CHANGES:
        torch.manual_seed(5)
        expected = change(hf_families.class_of("llama").from_pretrained(folder))
        with hf_families.stage_3(world()[1]):
            torch.manual_seed(5)
            model = change(hf_families.class_of("llama").from_pretrained(folder))
            own = [value for name, value in model.named_parameters() if "lora_" not in name]
            held = sum(not is_pending(value) for value in own)
            engine, *_ = zt.initialize(model=model, config=hf_families.config(world()[1]))
        found[change.__name__] = {
            "differing": hf_families.differing(
                expected.state_dict(), engine.module_state_dict(), in_fp32=change is in_bf16
            ),
            "frozen": [p.requires_grad for p in expected.parameters()]
            == [p.requires_grad for p in model.parameters()],
            "held": None if held == len(own) else held,
        }
        engine.close()
    return found


def test_changes_give_the_values_of_plain_models(tmp_path: Path) -> None:
    hf_families.save("llama", tmp_path)
    for report in run_ranks(2, prepared, str(tmp_path)):
        assert {name: row["differing"] for name, row in report.items() if row["differing"]} == {}
        assert all(row["frozen"] for row in report.values())
        held = {change: report[change.__name__]["held"] for change in CHANGES}
        assert held == CHANGES


def parted(folder: str) -> dict[str, Any]:
    """Use a parameter on one rank alone, change another there, and build with other seeds."""
    rank, world_size = world()
    hf_families.use_stage_3()
    found: dict[str, Any] = {}
    auto = hf_families.class_of("bert classes")
    plain = auto.from_pretrained(folder)
    with hf_families.stage_3(world_size):
        model = auto.from_pretrained(folder)
        inner = model.bert.encoder.layer[0]
        if rank == 0:
            inner.output.dense.weight.numpy(force=True)
        else:
            inner.attention.self.query.weight.data.zero_()
        engine, *_ = zt.initialize(model=model, config=hf_families.config(world_size))
        found["used"] = hf_families.differing(plain.state_dict(), engine.module_state_dict())
        engine.close()
        torch.manual_seed(7 + rank)
        built = auto.from_config(hf_families.config_of("bert classes"))
        engine, *_ = zt.initialize(model=built, config=hf_families.config(world_size))
    torch.manual_seed(7)
    expected = auto.from_config(hf_families.config_of("bert classes"))
    found["seeds"] = hf_families.differing(expected.state_dict(), engine.module_state_dict())
    engine.close()
    return found


def test_values_of_rank_0_count(tmp_path: Path) -> None:
    hf_families.save("bert classes", tmp_path)
    assert run_ranks(2, parted, str(tmp_path)) == [{"used": [], "seeds": []}] * 2


def incomplete(folder: str) -> dict[str, Any]:
    """Load files that lack keys, or have both of a tied pair, or other shapes."""
    rank, world_size = world()
    hf_families.use_stage_3()
    import transformers

    cases: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "missing": (transformers.AutoModelForSequenceClassification, "bert masked", {"num_labels": 5}),
        "base": (transformers.AutoModel, "bert masked", {}),
        "mismatched": (
            transformers.AutoModelForCausalLM,
            "llama",
            {"ignore_mismatched_sizes": True, "vocab_size": 70},
        ),
        "dtype": (transformers.AutoModelForCausalLM, "mixtral", {"dtype": torch.bfloat16}),
        "dtype by name": (transformers.AutoModelForSeq2SeqLM, "t5", {"dtype": "float16"}),
        "untied": (transformers.AutoModelForCausalLM, "both", {"tie_word_embeddings": True}),
    }
    found: dict[str, Any] = {}
    for name, (auto, family, options) in cases.items():
        torch.manual_seed(9)
        plain = auto.from_pretrained(f"{folder}/{family}", **options)
        with hf_families.stage_3(world_size):
            torch.manual_seed(9 + rank)
            model = auto.from_pretrained(f"{folder}/{family}", **options)
            engine, *_ = zt.initialize(model=model, config=hf_families.config(world_size))
        found[name] = hf_families.differing(plain.state_dict(), engine.module_state_dict(), in_fp32=True)
        engine.close()
    return found


def test_missing_tied_and_mismatched_keys(tmp_path: Path) -> None:
    for family in ("bert masked", "llama", "mixtral", "t5"):
        hf_families.save(family, tmp_path / family)
    hf_families.save("llama", tmp_path / "both")  # not tied, so both tensors are stored
    for report in run_ranks(2, incomplete, str(tmp_path)):
        assert {name: each for name, each in report.items() if each} == {}
