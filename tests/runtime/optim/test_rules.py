"""Update rules against torch's optimizers, bit for bit, and Lion against its formula."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from zerotrain.contract.config import OptimizerConfig
from zerotrain.runtime.optim.groups import Hyper
from zerotrain.runtime.optim.rules import rule_of
from zerotrain.runtime.optim.update import tiles

pytestmark = pytest.mark.unit


HYPER = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "momentum": 0.9}

TORCH: list[tuple[OptimizerConfig, type[torch.optim.Optimizer], dict[str, Any]]] = [
    (OptimizerConfig(type="AdamW"), torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6}),
    (
        OptimizerConfig(type="Adam", decoupled_weight_decay=False),
        torch.optim.Adam,
        {"betas": (0.8, 0.95), "eps": 1e-6},
    ),
    (OptimizerConfig(type="SGD"), torch.optim.SGD, {}),
    (OptimizerConfig(type="SGD", momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    (
        OptimizerConfig(type="SGD", momentum=0.9, params={"nesterov": True}),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    (
        OptimizerConfig(type="AdamW", params={"amsgrad": True}),
        torch.optim.AdamW,
        {"betas": (0.8, 0.95), "eps": 1e-6, "amsgrad": True},
    ),
    (OptimizerConfig(type="Adagrad"), torch.optim.Adagrad, {"eps": 1e-6}),
    (
        OptimizerConfig(type="Adagrad", params={"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
        torch.optim.Adagrad,
        {"eps": 1e-6, "lr_decay": 0.1, "initial_accumulator_value": 0.5},
    ),
]


@pytest.mark.parametrize(("config", "reference", "options"), TORCH, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("numel", [1, 7, 2048, 5000])
def test_rules_equal_torch_bit_for_bit(
    config: OptimizerConfig, reference: type[torch.optim.Optimizer], options: dict[str, Any], numel: int
) -> None:
    generator = torch.Generator().manual_seed(numel)
    mine = torch.randn(numel, generator=generator)
    theirs = torch.nn.Parameter(mine.clone())
    optimizer = reference([theirs], lr=1e-2, weight_decay=0.1, foreach=False, **options)  # type: ignore[call-arg]
    rule = rule_of(config)
    states = {kind: torch.zeros(numel) for kind in rule.kinds}
    for step in range(1, 6):
        grad = torch.randn(numel, generator=generator)
        theirs.grad = grad.clone()
        optimizer.step()
        rule.update(mine, grad, states, Hyper(**HYPER), step)  # type: ignore[arg-type]
        assert torch.equal(mine, theirs.detach()), f"step {step}"


def test_tiles_cover_the_interval() -> None:
    pieces = list(tiles(3, 400_000, torch.device("cpu")))
    assert pieces[0].start == 3
    assert pieces[-1].stop == 400_000
    assert all(before.stop == after.start for before, after in pairwise(pieces))


def test_lion_is_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, momentum = torch.randn(1000, generator=generator), torch.zeros(1000)
    mine, states = weight.clone(), {"exp_avg": torch.zeros(1000)}
    for step in range(1, 6):
        grad = torch.randn(1000, generator=generator)
        # Algorithm 2 of the paper: decay, then the sign of the mix; the momentum follows with the other beta.
        weight = weight * (1 - 0.1 * 1e-2) - 1e-2 * torch.sign(0.8 * momentum + 0.2 * grad)
        momentum = 0.95 * momentum + 0.05 * grad
        rule_of(OptimizerConfig(type="Lion")).update(mine, grad, states, Hyper(**HYPER), step)  # type: ignore[arg-type]
    assert torch.allclose(mine, weight, rtol=0, atol=1e-6)
    assert torch.allclose(states["exp_avg"], momentum, rtol=0, atol=1e-6)
