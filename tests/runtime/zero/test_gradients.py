"""Parameters that are frozen, unused, unrouted, or trained at their own rate; several backward passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import check_equal, config
from tests.support.ranks import run_ranks
from tests.support.training import whole_parameters, world

pytestmark = pytest.mark.ranks


WIDTH = 65  # a unit has more elements than the smallest shard, so that every rank owns some
UNITS = ["blocks.0", "blocks.1", "blocks.2"]


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, skip: int = -1) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != skip:
                hidden = torch.tanh(block(hidden))
        return hidden


def squared(model: Any, step: int, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(inputs(step, rank))
    return output.square().mean()


def test_unused_parameters_get_zero_gradients() -> None:
    check_equal(Blocks, squared, stages=(0, 1, 2, 3), unit_modules=[*UNITS, "unused"])


def partly_frozen() -> Blocks:
    model = Blocks()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].bias.requires_grad_(False)
    return model


def test_frozen_parameters_stay_and_pass_gradients_on() -> None:
    check_equal(partly_frozen, squared, stages=(0, 1, 2, 3), unit_modules=[*UNITS, "unused"])


def detached_middle(model: Any, step: int, rank: int) -> torch.Tensor:
    """Leave out the first module's part on rank 1: fewer units are in its backward."""
    hidden = inputs(step, rank)
    output: torch.Tensor = model(hidden.requires_grad_(rank == 0))
    return output.square().mean()


def test_ranks_may_differ_in_what_needs_gradients() -> None:
    check_equal(Blocks, detached_middle, unit_modules=[*UNITS, "unused"])


class Experts(nn.Module):
    """A block whose rank-dependent routing leaves experts without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: torch.Tensor, expert: int) -> torch.Tensor:
        result: torch.Tensor = self.experts[expert](hidden)
        return result


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, hidden: torch.Tensor, expert: int) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden, expert))
        return hidden


def routed(model: Any, step: int, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(inputs(step, rank), (step + rank) % 3)
    return output.square().mean()


def test_experts_without_tokens_on_some_ranks() -> None:
    check_equal(Routed, routed, stages=(2, 3), unit_modules=UNITS)


def two_backwards(stage: int) -> dict[str, np.ndarray[Any, Any]]:
    """Run backward on the two losses of one step, one by one."""
    torch.manual_seed(0)
    model = Blocks()
    engine, *_ = zt.initialize(model=model, config=config(stage), unit_modules=UNITS)
    rank, _ = world()
    for step in range(2):
        first = engine(inputs(step, rank))
        second = engine(inputs(step, rank) * 0.5)
        engine.backward(first.square().mean())
        engine.backward((second - 1).square().mean())
        engine.step()
    with zt.full_parameters(model):
        return whole_parameters(model)


def both_at_once(model: Any, step: int, rank: int) -> torch.Tensor:
    first, second = model(inputs(step, rank)), model(inputs(step, rank) * 0.5)
    loss: torch.Tensor = first.square().mean() + (second - 1).square().mean()
    return loss


def one_backward(stage: int) -> dict[str, np.ndarray[Any, Any]]:
    torch.manual_seed(0)
    model = Blocks()
    engine, *_ = zt.initialize(model=model, config=config(stage), unit_modules=UNITS)
    rank, _ = world()
    for step in range(2):
        engine.backward(both_at_once(engine, step, rank))
        engine.step()
    with zt.full_parameters(model):
        return whole_parameters(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_several_backward_passes_before_a_step_add_up(stage: int) -> None:
    apart, together = run_ranks(2, two_backwards, stage)[0], run_ranks(2, one_backward, stage)[0]
    for name, value in together.items():
        assert np.allclose(apart[name], value, rtol=0, atol=1e-5), name


def train_groups(stage: int) -> dict[str, np.ndarray[Any, Any]]:
    torch.manual_seed(0)
    model = Blocks()
    engine, optimizer, *_ = zt.initialize(
        model=model, config=config(stage), model_parameters=groups_of(model), unit_modules=UNITS
    )
    rank, _ = world()
    for step in range(3):
        engine.backward(squared(engine, step, rank))
        engine.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    with zt.full_parameters(model):
        return whole_parameters(model)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return matrices with decay at one rate, biases without decay at another."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": matrices, "lr": 2e-2, "weight_decay": 0.2, "betas": (0.8, 0.9)},
        {"params": biases, "lr": 5e-3, "weight_decay": 0.0},
    ]


def plain_groups(world_size: int) -> dict[str, np.ndarray[Any, Any]]:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(groups_of(model), eps=1e-4, foreach=False)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank in range(world_size):
            (squared(model, step, rank) / world_size).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    return whole_parameters(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_parameter_groups_keep_their_own_values(stage: int) -> None:
    reference = plain_groups(2)
    for parameters in run_ranks(2, train_groups, stage):
        for name, value in reference.items():
            assert np.allclose(parameters[name], value, rtol=0, atol=1e-5), name


def test_groups_must_cover_the_model_once() -> None:
    model = Blocks()
    with pytest.raises(ValueError, match=r"leaves out trainable parameters \['blocks.0.bias'"):
        zt.initialize(model=model, config=config(0), model_parameters=list(model.unused.parameters())[:1])
    twice: list[dict[str, Any]] = [{"params": model.parameters()}, {"params": [model.unused.bias]}]
    with pytest.raises(ValueError, match=r"'unused.bias' is in groups 0 and 1"):
        zt.initialize(model=model, config=config(0), model_parameters=twice)
