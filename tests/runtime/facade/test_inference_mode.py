"""Engines are made, and take steps, within `torch.inference_mode()` as outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WIDTH = 40


def weights(stage: int, precision: dict[str, Any], within: bool) -> list[float]:
    """Train with `initialize` and `step` within inference mode, or outside."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    with torch.inference_mode(within):
        engine, *_ = zt.initialize(model=model, config=config(stage, **precision))
    x = torch.ones(2, WIDTH) * (1 + engine.rank)
    x = x.bfloat16() if precision else x
    for _ in range(2):
        with torch.inference_mode():
            engine(x)
        engine.backward(engine(x).float().square().mean())
        with torch.inference_mode(within):
            engine.step()
            if within:
                assert torch.is_inference_mode_enabled()
    with zt.full_parameters(model):
        found = [float(value.detach().double().sum()) for value in model.parameters()]
    engine.close()
    return found


def both(stage: int) -> list[bool]:
    return [
        weights(stage, precision, True) == weights(stage, precision, False)
        for precision in ({}, {"bf16": {"enabled": True}})
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_inference_mode_changes_nothing(stage: int) -> None:
    for world_size in (1, 2):
        assert run_ranks(world_size, both, stage) == [[True, True]] * world_size
