"""A run continues with compilation or recomputation switched on or off, and stores plain names."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import world
from tests.support.wrappers import WRAPPED
from zerotrain.runtime.zero.names import named_parameters

pytestmark = pytest.mark.ranks

STAGES = (0, 1, 2, 3)
CASES = [case for case in WRAPPED if case != "plain"]


def config(stage: int, dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }


def engine_of(case: str, stage: int, dtype: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = TinyGPT(layers=2, tied=True)
    model.register_buffer("steps", torch.arange(3.0) + seed)
    engine, *_ = zt.initialize(model=WRAPPED[case](model), config=config(stage, dtype))
    return engine


def train(engine: Any, first: int, last: int) -> list[float]:
    rank = world()[0]
    losses = []
    for tokens, targets in token_batches(last, size=4)[first:]:
        loss = engine(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def all_resumes(folder: str, dtype: str) -> dict[str, str]:
    """Save each case after two steps and load it into the plain run and another case; return errors."""
    found: dict[str, str] = {}
    stages = itertools.cycle(STAGES)
    for case, stage in zip(("plain", *CASES), stages, strict=False):
        torch.compiler.reset()
        engine = engine_of(case, stage, dtype)
        train(engine, 0, 2)
        engine.save_checkpoint(f"{folder}/{case}")
        engine.save_16bit_model(f"{folder}/{case}/export")
        expected = train(engine, 2, 4)
        state = engine.module_state_dict()
        engine.close()
        plain = TinyGPT(layers=2, tied=True).state_dict()
        if sorted(state) != sorted([*plain, "steps"]):
            found[f"{case} {stage} state dict"] = str(sorted(state)[:3])
        stored = load_file(f"{folder}/{case}/export/model.safetensors")
        if sorted(stored) != sorted({*plain, "steps"} - {"head.weight"}):
            found[f"{case} {stage} export"] = str(sorted(stored)[:3])
        for other in ("plain", CASES[(CASES.index(case) + 1) % len(CASES)] if case in CASES else CASES[0]):
            engine = engine_of(other, next(stages), dtype, seed=1)
            engine.load_checkpoint(f"{folder}/{case}")
            losses = train(engine, 2, 4)
            if not np.allclose(losses, expected, rtol=0, atol=1e-6 if dtype == "fp32" else 0.02):
                found[f"{case} {stage} -> {other}"] = f"{losses} {expected}"
            if engine.module_state_dict()["steps"].tolist() != [0.0, 1.0, 2.0]:
                found[f"{case} {stage} -> {other} buffer"] = "not loaded"
            engine.close()
    return found


def test_every_wrapper_resumes_every_other(tmp_path: Path) -> None:
    assert run_ranks(2, all_resumes, str(tmp_path), "fp32")[0] == {}


def loaded(folder: str) -> dict[str, list[str]]:
    """Return, by case, names of parameters whose values differ from the plain model's file."""
    found: dict[str, list[str]] = {}
    for case, stage in zip(WRAPPED, itertools.cycle(STAGES), strict=False):
        for file in ("plain", "wrapped"):
            with zt.init_context(seed=3):
                model = TinyGPT(layers=2)
            model = WRAPPED[case](model)
            zt.load_weights(model, f"{folder}/{file}.safetensors")
            engine, *_ = zt.initialize(model=model, config=config(stage, "fp32"))
            values = load_file(f"{folder}/plain.safetensors")
            with zt.full_parameters(model):
                wrong = [
                    name
                    for name, each in named_parameters(model)
                    if not torch.equal(each.cpu(), values[name])
                ]
            if wrong:
                found[f"{case} {file}"] = wrong
            engine.close()
    return found


def test_weights_of_files_load_into_every_wrapper(tmp_path: Path) -> None:
    """One file holds a compiled model's own state dict."""
    torch.manual_seed(5)
    state = TinyGPT(layers=2).state_dict()
    save_file(state, tmp_path / "plain.safetensors")
    save_file({f"_orig_mod.{name}": value for name, value in state.items()}, tmp_path / "wrapped.safetensors")
    assert run_ranks(2, loaded, str(tmp_path))[0] == {}


def replayed(case: str) -> dict[str, Any]:
    """Return values of a model that was built within init_context and wrapped afterwards."""
    with zt.init_context(seed=3):
        model = TinyGPT(layers=2, tied=True)
    model = WRAPPED[case](model)
    engine, *_ = zt.initialize(model=model, config=config(3, "fp32"))
    values = {name: value.numpy() for name, value in engine.module_state_dict().items()}
    engine.close()
    return values


def all_replayed() -> list[str]:
    expected = replayed("plain")
    return [
        case
        for case in CASES
        if (found := replayed(case)).keys() != expected.keys()
        or not all(np.array_equal(found[name], expected[name]) for name in expected)
    ]


def test_deferred_models_may_be_wrapped() -> None:
    assert run_ranks(2, all_replayed)[0] == []


def plain_state_into_wrapped() -> list[str]:
    """Return the cases in which a plain state dict does not load into the running model."""
    found = []
    for case, stage in zip(WRAPPED, itertools.cycle((0, 1, 2)), strict=False):
        engine = engine_of(case, stage, "bf16")
        other = engine_of("plain", stage, "bf16", seed=1)
        state = other.module_state_dict()
        other.close()
        engine.module.load_state_dict(state)
        after = engine.module_state_dict()
        if not all(torch.equal(after[name], state[name]) for name in state):
            found.append(case)
        engine.close()
    return found


def test_plain_state_dicts_load_into_a_running_model() -> None:
    assert run_ranks(2, plain_state_into_wrapped)[0] == []


def compiled_block(stage: int) -> tuple[int, int, list[float], list[float]]:
    """Return graphs that dynamo made of one compiled block, graph breaks, and losses with it and without."""
    from torch._dynamo.utils import counters

    losses = []
    for compiles in (False, True):
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        model = TinyGPT(layers=1)
        if compiles:
            model.blocks[0] = torch.compile(model.blocks[0], backend="aot_eager")  # type: ignore[assignment]
        engine, *_ = zt.initialize(model=model, config=config(stage, "fp32"))
        losses.append(train(engine, 0, 3))
        engine.close()
    plain, compiled = losses
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), plain, compiled


@pytest.mark.parametrize("stage", with_slow_rows([2, 3], quick=[3]))
def test_a_compiled_block_is_one_unit_without_a_graph_break(stage: int) -> None:
    graphs, breaks, plain, compiled = run_ranks(2, compiled_block, stage)[0]
    assert (graphs, breaks) == (1, 0)
    assert np.allclose(plain, compiled, rtol=0, atol=1e-6)
