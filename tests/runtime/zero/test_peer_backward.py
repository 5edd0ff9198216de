"""The user's own backward calls.

They cover non-scalar outputs, several losses over one graph, unused outputs, gradients of inputs,
checkpointed segments, and two engines in one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerotrain.runtime as zt
from tests.support.free_form import EPS, LR, config
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import whole_parameters, world

pytestmark = pytest.mark.ranks


WIDTH, STEPS = 65, 3  # a unit has more elements than the smallest shard, so that every rank owns some
UNITS = ["blocks.0", "blocks.1", "blocks.2", "side"]
Weights = dict[str, np.ndarray[Any, Any]]
Script = Callable[[Any, torch.Tensor, float], None]
"""Forward and every backward of one step: (model or engine, inputs, factor on each loss)."""


class Net(nn.Module):
    """A model that returns its result and a side output, which a caller may leave unused."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, segment: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        def inner(value: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](value))))

        hidden = inner(hidden) if segment is None else checkpoint(inner, hidden, use_reentrant=segment)
        return self.blocks[2](hidden), self.side(hidden)


def non_scalar(model: Any, batch: torch.Tensor, factor: float) -> None:
    output, side = model(batch)
    torch.autograd.backward([output, side], [output.detach() * factor, torch.ones_like(side) * factor])


def unused_output(model: Any, batch: torch.Tensor, factor: float) -> None:
    (model(batch)[0].square().mean() * factor).backward()


def only_the_side(model: Any, batch: torch.Tensor, factor: float) -> None:
    (model(batch)[1].square().mean() * factor).backward()


def two_losses_of_one_graph(model: Any, batch: torch.Tensor, factor: float) -> None:
    output, side = model(batch)
    (output.square().mean() * factor).backward(retain_graph=True)
    (side.abs().mean() * factor).backward()


def the_same_graph_twice(model: Any, batch: torch.Tensor, factor: float) -> None:
    loss = model(batch)[0].square().mean() * factor
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards_backward_in_forward_order(model: Any, batch: torch.Tensor, factor: float) -> None:
    first, second = model(batch)[0], model(batch * 0.5)[1]
    (first.square().mean() * factor).backward()
    (second.square().mean() * factor).backward()


def gradients_of_inputs(model: Any, batch: torch.Tensor, factor: float) -> None:
    batch.requires_grad_()
    loss = model(batch)[0].square().mean()
    loss.backward(gradient=torch.tensor(factor))
    assert batch.grad is not None
    (model(batch.detach() + batch.grad.sign() * 0.1)[0].square().mean() * factor).backward()


def checkpointed_segment(model: Any, batch: torch.Tensor, factor: float, *, reentrant: bool) -> None:
    output, side = model(batch.requires_grad_(), reentrant)
    ((output.square().mean() + side.abs().mean()) * factor).backward()


def reentrant_segment(model: Any, batch: torch.Tensor, factor: float) -> None:
    checkpointed_segment(model, batch, factor, reentrant=True)


def saved_segment(model: Any, batch: torch.Tensor, factor: float) -> None:
    checkpointed_segment(model, batch, factor, reentrant=False)


SCRIPTS: tuple[Script, ...] = (
    non_scalar,
    unused_output,
    only_the_side,
    two_losses_of_one_graph,
    the_same_graph_twice,
    two_forwards_backward_in_forward_order,
    gradients_of_inputs,
    reentrant_segment,
    saved_segment,
)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def built() -> Net:
    torch.manual_seed(3)
    return Net()


def with_engine(script: Script, stage: int) -> Weights:
    model = built()
    engine, *_ = zt.initialize(model=model, config=config(stage), unit_modules=UNITS)
    for step in range(STEPS):
        script(engine, inputs(step, world()[0]), 1.0)
        engine.step()
        assert engine.memory.transient_bytes == 0, script.__name__
    with zt.full_parameters(model):
        weights = whole_parameters(model)
    engine.close()
    return weights


def all_scripts(stage: int) -> list[Weights]:
    return [with_engine(script, stage) for script in SCRIPTS]


def plain_optimizer(*models: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for model in models for parameter in model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, eps=EPS, foreach=False)


def reference(script: Script, world_size: int) -> Weights:
    model = built()
    optimizer = plain_optimizer(model)
    for step in range(STEPS):
        for rank in range(world_size):
            script(model, inputs(step, rank), 1.0 / world_size)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return whole_parameters(model)


def check(got: Weights, wanted: Weights, what: str) -> None:
    for name, value in wanted.items():
        assert np.allclose(got[name], value, rtol=0, atol=1e-5), f"{what}: {name}"


@pytest.mark.parametrize("stage", with_slow_rows([0, 1, 2, 3], quick=[1, 3]))
@pytest.mark.usefixtures("each_transport")
def test_every_way_of_calling_backward(stage: int) -> None:
    for per_script in run_ranks(2, all_scripts, stage):
        for script, weights in zip(SCRIPTS, per_script, strict=True):
            check(weights, reference(script, 2), f"{script.__name__}, stage {stage}")


def chained(stage: int) -> tuple[Weights, Weights]:
    """Chain two engines; one backward reaches both, called on either or on neither."""
    models = built(), built()
    first, second = (
        zt.initialize(model=model, config=config(stage), unit_modules=UNITS)[0] for model in models
    )
    for step in range(STEPS):
        loss = second(torch.tanh(first(inputs(step, world()[0]))[0]))[0].square().mean()
        calls: list[Callable[[torch.Tensor], object]] = [
            second.backward,
            first.backward,
            torch.Tensor.backward,
        ]
        calls[step](loss)
        first.step()
        second.step()
    weights = []
    for model in models:
        with zt.full_parameters(model):
            weights.append(whole_parameters(model))
    return weights[0], weights[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_two_engines_in_one_graph(stage: int) -> None:
    models = built(), built()
    optimizer = plain_optimizer(*models)
    for step in range(STEPS):
        for rank in range(2):
            loss = models[1](torch.tanh(models[0](inputs(step, rank))[0]))[0].square().mean()
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    for got in run_ranks(2, chained, stage):
        for index, model in enumerate(models):
            check(got[index], whole_parameters(model), f"engine {index}, stage {stage}")
