"""Parameter groups with their own rates, decay and betas equal torch's, even when added later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import (
    EPS,
    GLOBAL_BATCH,
    Case,
    Outcome,
    largest_difference,
    micro_batches,
    whole_parameters,
    world,
)
from zerotrain.runtime.optim.groups import GroupError

pytestmark = pytest.mark.ranks


STEPS, ADDED_AT = 5, 2
LATE = "blocks.1."
"""Modules that are frozen at first and form a group of their own from step `ADDED_AT` on."""


def model() -> TinyGPT:
    made = Case().model()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not name.startswith(LATE))
    return made


def groups_of(made: nn.Module) -> list[dict[str, Any]]:
    early = [(name, value) for name, value in made.named_parameters() if value.requires_grad]
    return [
        {"params": [p for name, p in early if p.dim() > 1], "lr": 3e-3, "weight_decay": 0.2, "eps": EPS},
        {"params": [p for name, p in early if p.dim() == 1], "lr": 1e-2, "betas": (0.7, 0.9), "eps": EPS},
    ]


def late_group(made: nn.Module) -> dict[str, Any]:
    late = [parameter for name, parameter in made.named_parameters() if name.startswith(LATE)]
    for parameter in late:
        parameter.requires_grad_(True)
    return {"params": late, "lr": 5e-3, "weight_decay": 0.1, "eps": EPS}


def train(stage: int) -> Outcome:
    rank, world_size = world()
    made = model()
    config = Case(stage=stage).config(world_size)
    config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True, "weight_decay": 0.01}}
    engine, optimizer, *_ = zt.initialize(model=made, config=config, model_parameters=groups_of(made))
    for step, batch in enumerate(token_batches(STEPS, size=GLOBAL_BATCH)):
        if step == ADDED_AT:
            optimizer.add_param_group(late_group(made))
        if step == STEPS - 1:
            optimizer.param_groups[0]["lr"] = 1e-3
        engine.backward(engine(*micro_batches(batch, world_size=world_size, accumulation=1)[0][rank]))
        engine.step()
    with zt.full_parameters(made):
        return Outcome([], [], whole_parameters(made))


def reference(world_size: int) -> Outcome:
    made = model()
    optimizer = torch.optim.AdamW(groups_of(made), foreach=False)
    for step, batch in enumerate(token_batches(STEPS, size=GLOBAL_BATCH)):
        if step == ADDED_AT:
            optimizer.add_param_group(late_group(made))
        if step == STEPS - 1:
            optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.zero_grad()
        for part in micro_batches(batch, world_size=world_size, accumulation=1)[0]:
            (made(*part) / world_size).backward()
        optimizer.step()
    return Outcome([], [], whole_parameters(made))


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 0), (2, 1), (2, 3)])
def test_groups_equal_torchs(world_size: int, stage: int) -> None:
    outcome = run_ranks(world_size, train, stage)[0]
    assert largest_difference(outcome, reference(world_size)) < (1e-5 if world_size > 1 else 1e-30)


def test_a_parameter_has_one_group() -> None:
    made = nn.Linear(4, 4)
    _, optimizer, *_ = zt.initialize(model=made, config={"train_batch_size": 1})
    with pytest.raises(GroupError, match="'weight' is in groups 0 and 1"):
        optimizer.add_param_group({"params": made.weight})
    with pytest.raises(GroupError, match="not part of the model"):
        optimizer.add_param_group({"params": nn.Linear(1, 1).weight})
    assert len(optimizer.param_groups) == 1
