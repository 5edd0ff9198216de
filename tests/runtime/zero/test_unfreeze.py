"""Parameters that are frozen and unfrozen between steps behave as in plain torch, at every stage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import world
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.ledger import MemoryKind

pytestmark = pytest.mark.ranks


Weights = dict[str, np.ndarray[Any, Any]]

LR, EPS = 1e-2, 1e-4
PHASES: tuple[tuple[str, ...], ...] = (
    ("head", "norm"),
    ("head", "norm", "blocks.1", "blocks.0.up"),
    ("head", "blocks.1.qkv", "blocks.0", "embed"),
)
"""Modules that are trained, two steps each."""


def set_trained(model: nn.Module, modules: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(name.startswith(f"{module}.") for module in modules))


def build() -> TinyGPT:
    torch.manual_seed(4)
    return TinyGPT(layers=2)


def parts(batch: tuple[torch.Tensor, torch.Tensor], rank: int, world_size: int) -> list[torch.Tensor]:
    return [part.chunk(world_size)[rank] for part in batch]


def reference(world_size: int) -> Weights:
    """Train all with torch.optim.AdamW; a parameter whose state was dropped on freezing starts anew."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1, foreach=False)
    batches = iter(token_batches(2 * len(PHASES), size=4))
    for phase in PHASES:
        set_trained(model, phase)
        for parameter in model.parameters():
            parameter.grad = None
            if not parameter.requires_grad:
                optimizer.state.pop(parameter, None)
        for _ in range(2):
            optimizer.zero_grad()
            batch = next(batches)
            for rank in range(world_size):
                (model(*parts(batch, rank, world_size)) / world_size).backward()
            optimizer.step()
    return {name: value.detach().cpu().numpy().copy() for name, value in model.named_parameters()}


def weights(model: nn.Module) -> Weights:
    with zt.full_parameters(model):
        return {name: value.detach().float().cpu().numpy().copy() for name, value in model.named_parameters()}


def configuration(stage: int, **extra: Any) -> dict[str, Any]:
    params = {"lr": LR, "eps": EPS, "weight_decay": 0.1, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "optimizer": {"type": "AdamW", "params": params},
        **extra,
    }


def phased(stage: int) -> Weights:
    model = build()
    set_trained(model, PHASES[0])
    engine, *_ = zt.initialize(model=model, config=configuration(stage))
    batches = iter(token_batches(2 * len(PHASES), size=4))
    rank, world_size = world()
    for phase in PHASES:
        set_trained(model, phase)
        for _ in range(2):
            engine.backward(engine(*parts(next(batches), rank, world_size)))
            engine.step()
    found = weights(model)
    assert engine.memory.transient_bytes == 0
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_torch(stage: int) -> None:
    expected = reference(2)
    for got in run_ranks(2, phased, stage):
        for name, value in expected.items():
            assert np.abs(got[name] - value).max() < 2e-5, name


def memory_after(stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes by kind after unfreezing everything, and those of an engine that was made like that."""
    found = []
    for late in (True, False):
        model = build()
        if late:
            set_trained(model, PHASES[0])
        engine, *_ = zt.initialize(model=model, config=configuration(stage, bf16={"enabled": True}))
        for phase in range(2):
            if phase:
                set_trained(model, ("embed", "blocks", "norm", "head"))
            engine.backward(engine(*parts(token_batches(1, size=4)[0], *world())))
            engine.step()
        found.append({str(kind): engine.memory.live_bytes(kind) for kind in MemoryKind})
        engine.close()
    return found[0], found[1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_memory_is_that_of_the_new_layout(stage: int) -> None:
    got, expected = run_ranks(2, memory_after, stage)[0]
    assert got == expected


def states_of(engine: Engine, fqn: str) -> list[np.ndarray[Any, Any]]:
    parameter = engine.module.get_parameter(fqn)
    kinds = ("exp_avg", "exp_avg_sq")
    return [
        zt.get_full_fp32(parameter).cpu().numpy().copy(),
        *(zt.get_full_optimizer_state(parameter, kind).cpu().numpy().copy() for kind in kinds),
    ]


def kept_states(stage: int) -> None:
    """Check states of bf16, where masters hold more than the weights.

    A kept neighbour has its old bits, a new one zeros.
    """
    model = build()
    model.blocks[0].up.requires_grad_(False)
    engine, *_ = zt.initialize(model=model, config=configuration(stage, bf16={"enabled": True}))
    batch = parts(token_batches(1, size=4)[0], *world())
    for _ in range(2):
        engine.backward(engine(*batch))
        engine.step()
    before = states_of(engine, "blocks.0.down.weight")
    assert np.abs(before[1]).max() > 0
    model.blocks[0].up.requires_grad_(True)
    engine(*batch)
    after = states_of(engine, "blocks.0.down.weight")
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    assert not np.any(states_of(engine, "blocks.0.up.weight")[1:])
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_states_are_kept_bit_for_bit(stage: int) -> None:
    run_ranks(2, kept_states, stage)


def saved_and_loaded(folder: str, stage: int) -> tuple[Weights, Weights]:
    """Return weights through a checkpoint written after the change, and without one."""
    batch = parts(token_batches(1, size=4)[0], *world())

    def train(engine: Engine, steps: int) -> None:
        for _ in range(steps):
            engine.backward(engine(*batch))
            engine.step()

    model = build()
    set_trained(model, PHASES[0])
    engine, *_ = zt.initialize(model=model, config=configuration(stage))
    train(engine, 1)
    set_trained(model, PHASES[1])
    train(engine, 2)
    engine.save_checkpoint(folder)
    train(engine, 1)
    straight = weights(model)
    engine.close()
    other = build()
    set_trained(other, PHASES[1])
    resumed, *_ = zt.initialize(model=other, config=configuration(stage))
    assert resumed.load_checkpoint(folder)[0] is not None
    train(resumed, 1)
    found = weights(other)
    resumed.close()
    return straight, found


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_after_a_change(stage: int, tmp_path: Path) -> None:
    for straight, resumed in run_ranks(2, saved_and_loaded, str(tmp_path), stage):
        assert all(np.array_equal(resumed[name], value) for name, value in straight.items())


def disagreeing(stage: int, module: str) -> None:
    """Unfreeze the embedding on rank 0, and another module or nothing on rank 1; "frozen": freeze the norm on
    rank 0 alone."""
    os.environ["ZEROTRAIN_WATCHDOG_SECONDS"] = "2"
    model = build()
    set_trained(model, PHASES[0])
    engine, *_ = zt.initialize(model=model, config=configuration(stage))
    batch = parts(token_batches(1, size=4)[0], *world())
    engine.backward(engine(*batch))
    engine.step()
    set_trained(model, (*PHASES[0], "embed" if world()[0] == 0 else module))
    if module == "frozen":
        set_trained(model, ("head",) if world()[0] == 0 else PHASES[0])
    engine.backward(engine(*batch))
    engine.step()


@pytest.mark.parametrize(
    ("stage", "module"), [(1, "blocks.0"), (1, "nothing"), (3, "nothing"), (1, "frozen"), (3, "frozen")]
)
def test_ranks_that_disagree_get_a_named_error(stage: int, module: str) -> None:
    with pytest.raises(RankFailed, match="requires_grad"):
        run_ranks(2, disagreeing, stage, module)


def outside_the_groups() -> None:
    model = build()
    set_trained(model, PHASES[0])
    trained = [{"params": [value for value in model.parameters() if value.requires_grad]}]
    engine, *_ = zt.initialize(model=model, config=configuration(0), model_parameters=trained)
    set_trained(model, PHASES[1])
    engine(*token_batches(1, size=1)[0])


def all_frozen() -> None:
    model = build()
    engine, *_ = zt.initialize(model=model, config=configuration(0))
    model.requires_grad_(False)
    engine(*token_batches(1, size=1)[0])
    engine.step()


def moved() -> None:
    model = build()
    set_trained(model, PHASES[0])
    engine, *_ = zt.initialize(model=model, config=configuration(0))
    model.blocks = nn.ModuleList(reversed(model.blocks))
    set_trained(model, PHASES[1])
    engine(*token_batches(1, size=1)[0])


def test_what_cannot_be_followed_is_named() -> None:
    with pytest.raises(RankFailed, match=r"blocks\.0\..* no longer under the names that they had"):
        run_ranks(1, moved)
    with pytest.raises(RankFailed, match="in no parameter group"):
        run_ranks(1, outside_the_groups)
    with pytest.raises(RankFailed, match=r"every parameter is frozen.* leave step\(\) out"):
        run_ranks(1, all_frozen)
