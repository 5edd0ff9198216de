"""DeepSpeed's names exist, return the truth, and docs/deepspeed.md lists all of them and no others."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.tiny_models import TinyGPT, token_batches
from zerotrain.runtime import deepspeed
from zerotrain.runtime.deepspeed import add_config_arguments, zero
from zerotrain.runtime.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.facade.deepspeed_names import DeepSpeedNames
from zerotrain.runtime.facade.module_names import ModuleNames

pytestmark = pytest.mark.unit


DOCUMENT = (Path(__file__).parents[3] / "docs" / "deepspeed.md").read_text()


def engine_with(**extra: Any) -> Engine:
    torch.manual_seed(0)
    engine, *_ = zt.initialize(model=TinyGPT(layers=1), config=config(0, **extra))
    return engine


def train(engine: Engine, steps: int) -> None:
    for batch in token_batches(steps, size=1):
        engine.backward(engine(*batch))
        engine.step()


def section(title: str) -> str:
    return DOCUMENT.split(f"## {title}\n")[1].split("\n## ")[0]


def names_in_table(title: str) -> list[str]:
    """Return the names in the first column."""
    rows = [line for line in section(title).splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])]


def test_every_function_of_the_table_exists() -> None:
    names = names_in_table("Functions")
    assert len(names) > 25
    for name in names:
        package, _, attribute = name.removeprefix("deepspeed.").rpartition(".")
        module = importlib.import_module(".".join(filter(None, ["zerotrain.runtime.deepspeed", package])))
        assert hasattr(module, attribute), name
    ours = re.findall(r"^\|[^|]*\| `(\w+)` \|", section("Functions"), flags=re.MULTILINE)
    assert set(ours) <= set(zt.__all__)


def alias_modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(deepspeed.__path__, f"{deepspeed.__name__}.")
    return [deepspeed, *(importlib.import_module(item.name) for item in found if item.name[-6:] != "absent")]


def test_every_alias_is_in_the_table() -> None:
    names = set(names_in_table("Functions"))
    modules = alias_modules()
    assert len(modules) > 20
    for module in modules:
        path = module.__name__.removeprefix("zerotrain.runtime.")
        own = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
        assert {f"{path}.{name}" for name in own if name != "logger"} - names == set()


def test_every_alias_module_answers_unknown_names() -> None:
    for module in alias_modules():
        with pytest.raises(AttributeError, match=r"docs/deepspeed\.md"):
            module.surely_unknown  # noqa: B018


def test_every_difference_has_a_test() -> None:
    rows = [row for row in re.split(r"^- ", section("What differs"), flags=re.MULTILINE) if row.strip()]
    assert len(rows) > 20
    for row in rows:
        links = re.findall(r"\]\((\.\./tests/[\w/]+\.py)\)", row)
        assert links, f"names no test: {row.strip()[:80]}"
        assert all((Path(__file__).parents[3] / "docs" / link).is_file() for link in links), row


def test_the_engines_names_are_those_of_the_table() -> None:
    listed = set(names_in_table("The engine"))
    engine = engine_with()
    assert [name for name in listed if not hasattr(engine, name)] == []
    kinds = (DeepSpeedNames, ModuleNames)
    public = {name for kind in kinds for name in vars(kind) if not name.startswith("_")}
    assert public <= listed, public - listed
    engine.close()


def test_values_of_the_configuration() -> None:
    engine = engine_with(gradient_accumulation_steps=2, gradient_clipping=0.5, bf16={"enabled": True})
    assert engine.get_batch_info() == (2, 1, 2)
    assert (engine.gradient_clipping(), engine.zero_optimization_stage()) == (0.5, 0)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled(), engine.zero_optimization()) == (
        True,
        False,
        False,
    )
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (1.0, False)
    assert engine.optimizer_name() == "AdamW"
    assert (engine.optimizer_params() or {})["weight_decay"] == 0.1
    assert (engine.scheduler_name(), engine.scheduler_params()) == (None, None)
    assert (engine.get_lr(), engine.get_mom()) == ([0.01], [(0.9, 0.999)])
    engine.close()


def test_what_changes_while_training() -> None:
    engine = engine_with(gradient_accumulation_steps=2)
    assert engine.get_global_grad_norm() is None
    assert not engine.was_step_applied()
    train(engine, 3)
    assert not engine.was_step_applied(), "the third micro-batch only accumulates"
    train(engine, 1)
    assert engine.was_step_applied()
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (2, 4, 4)
    assert engine.get_global_grad_norm() == engine.last_step.grad_norm  # type: ignore[union-attr]
    batch = token_batches(1, size=1)[0]
    engine.backward(engine.forward(*batch) * float("inf"))
    engine.step()
    train(engine, 1)
    assert not engine.was_step_applied(), "a gradient that is not finite"
    engine.close()


def test_a_number_is_a_tag(tmp_path: Path) -> None:
    engine = engine_with()
    for tag in (5, 0.25):
        saved = engine.save_checkpoint(tmp_path, tag)
        assert engine.load_checkpoint(tmp_path, tag)[0] == saved.path == tmp_path / str(tag)
    engine.close()


def test_the_batch_can_change_between_steps() -> None:
    engine = engine_with(gradient_accumulation_steps=2)
    train(engine, 2)
    engine.set_train_batch_size(3)
    train(engine, 2)
    assert engine.global_steps == 1
    with pytest.raises(RuntimeError, match="between the micro-batches of a step"):
        engine.set_train_batch_size(2)
    train(engine, 1)
    assert (engine.global_steps, engine.global_samples) == (2, 5)
    engine.set_train_micro_batch_size(4)
    assert engine.get_batch_info() == (12, 4, 3)
    with pytest.raises(ValueError, match=r"must be a multiple of 4 \(micro batch 4 times 1 ranks\); got 6"):
        engine.set_train_batch_size(6)
    engine.close()


def test_other_names_are_the_models() -> None:
    engine = engine_with()
    assert engine.checkpointing is None  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="neither the engine nor its model has an attribute 'nothing'"):
        engine.nothing  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(engine, "_private")
    state = engine.module_state_dict()
    assert torch.equal(state["head.weight"], engine.module.get_parameter("head.weight"))
    engine.destroy()


def test_optimizers_and_arguments_under_deepspeeds_names() -> None:
    layer = nn.Linear(2, 2)
    assert type(FusedAdam(layer.parameters(), lr=0.1)) is torch.optim.AdamW
    assert type(DeepSpeedCPUAdam(layer.parameters(), adamw_mode=False)) is torch.optim.Adam
    with pytest.raises(ValueError, match="bias_correction=False is not an option"):
        FusedAdam(layer.parameters(), bias_correction=False)
    import argparse

    parsed = add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed_config", "x.json"])
    assert (parsed.deepspeed, parsed.deepspeed_config) == (False, "x.json")
    with zero.Init(enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta
    with zero.Init():
        layer = nn.Linear(2, 2)
    assert layer.weight.is_meta
