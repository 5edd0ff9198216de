"""A model may be entered by any of its modules, by a method, or by its parameters.

Training and evaluation equal plain torch's at every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import world

pytestmark = pytest.mark.ranks

STAGES = (0, 1, 2, 3)
STEPS, MICRO_BATCHES = 2, 2
WIDTH = 64


def squares(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean()


class Backbone(nn.Module):
    """A model with small modules in its own unit, blocks and head as units, and one weight used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 32)
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        normed: torch.Tensor = self.norm(x)
        return normed * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(x))
        return logits

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return squares(self(x))

    def inner_loss(self, x: torch.Tensor) -> torch.Tensor:
        return squares(self.head(self.features(x)))

    def by_parameters(self, x: torch.Tensor) -> torch.Tensor:
        """Use only parameters; a view of one is taken long before its use."""
        weight = self.head.weight.t()
        x = F.linear(x, self.inp.weight, self.inp.bias)
        for block in self.blocks:
            x = torch.tanh(x @ block.get_parameter("weight") + self.scale)
        return (x @ weight).square().mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.value = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squares(self.value(self.backbone(x)))

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone.inner_loss(x) + squares(self.value(self.backbone(x)))


def module_by_module(model: Model, x: torch.Tensor) -> torch.Tensor:
    hidden = model.backbone.inp(x)
    for _ in range(2):
        for block in model.backbone.blocks:
            hidden = torch.tanh(block(hidden))
    return squares(model.backbone.head(model.backbone.norm(hidden)))


def own_head(model: Model, x: torch.Tensor) -> torch.Tensor:
    hidden = model.backbone.features(x)
    return squares(F.linear(hidden, model.backbone.head.weight, model.backbone.head.bias))


def recomputed(model: Model, x: torch.Tensor, *, use_reentrant: bool) -> torch.Tensor:
    features = checkpoint(model.backbone.features, x.requires_grad_(), use_reentrant=use_reentrant)
    return squares(model.backbone.head(features))


def penalty(model: Model, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)
    for parameter in model.parameters():
        loss = loss + 1e-2 * parameter.square().sum()
    return loss


Entry = Callable[[Any, torch.Tensor], torch.Tensor]

ENTRIES: dict[str, Entry] = {
    "the model": lambda model, x: model(x),
    "a module": lambda model, x: model.backbone(x).square().mean(),
    "a module and another head": lambda model, x: (
        model.value(model.backbone(x)).mean() + model.backbone.loss(x)
    ),
    "a method": lambda model, x: model.backbone.inner_loss(x),
    "a method with a whole module inside": lambda model, x: model.mixed(x),
    "module by module": module_by_module,
    "the smallest module alone": lambda model, x: model.backbone.norm(x.repeat(1, 8)).square().sum(),
    "a block alone": lambda model, x: model.backbone.blocks[1](x.repeat(1, 8)).square().mean(),
    "parameters in a method": lambda model, x: model.backbone.by_parameters(x),
    "a parameter after a method": own_head,
    "a method, recomputed": lambda model, x: recomputed(model, x, use_reentrant=False),
    "a method, recomputed reentrantly": lambda model, x: recomputed(model, x, use_reentrant=True),
    "the model and a penalty on all weights": penalty,
    "a method twice": lambda model, x: model.backbone.inner_loss(x) + model.backbone.inner_loss(2 * x),
}


def batch(step: int, part: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(4, 8, generator=generator)


def build() -> Model:
    torch.manual_seed(3)
    return Model()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with zt.full_parameters(model):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def reference(entry: Entry, world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses of evaluations after every step, and the final weights, with plain SGD."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        for part in range(MICRO_BATCHES):
            for rank in range(world_size):
                loss = entry(model, batch(step, part, rank)) / world_size / MICRO_BATCHES
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(evaluate(entry, model))
    return losses, weights_of(model)


def settings(stage: int, **zero: Any) -> dict[str, Any]:
    accumulation = {"gradient_accumulation_steps": MICRO_BATCHES}
    made = config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **accumulation)
    made["zero_optimization"].update(zero)
    return made


def with_engine(entry: Entry, stage: int, **zero: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train by `engine.backward`; evaluate before every backward pass and after every micro-batch."""
    rank, model, losses = world()[0], build(), []
    engine, *_ = zt.initialize(model=model, config=settings(stage, **zero))
    for step in range(STEPS):
        for part in range(MICRO_BATCHES):
            loss = entry(model, batch(step, part, rank))
            evaluate(entry, model)
            engine.backward(loss)
            evaluate(entry, model)
            engine.step()
        losses.append(evaluate(entry, model))
    found = losses, weights_of(model)
    engine.close()
    return found


def with_own_loop(entry: Entry, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train by the user's own `loss.backward()`."""
    rank, model, losses = world()[0], build(), []
    _, optimizer = zt.shard(model, settings(stage))
    for step in range(STEPS):
        for part in range(MICRO_BATCHES):
            loss = entry(model, batch(step, part, rank))
            evaluate(entry, model)
            (loss / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(evaluate(entry, model))
    found = losses, weights_of(model)
    optimizer.engine.close()
    return found


def evaluate(entry: Entry, model: nn.Module) -> float:
    entry = ENTRIES["the model"] if entry is penalty else entry  # which reads weights that no module uses
    with torch.inference_mode():
        entry(model, batch(8, 0, 0))
    with torch.no_grad():
        return entry(model, batch(9, 0, 0)).item()


def differences(names: list[str]) -> dict[str, float]:
    """Return the largest difference from plain torch, by entry, stage and loop; an error as text."""
    found: dict[str, Any] = {}
    for name in names:
        entry = ENTRIES[name]
        losses, weights = reference(entry, world()[1])
        for stage in STAGES:
            for loop in LOOPS[stage]:
                got_losses, got = loop(entry, stage)
                gaps = [abs(a - b) for a, b in zip(losses, got_losses, strict=True)]
                gaps += [float((got[key] - value).abs().max()) for key, value in weights.items()]
                found[f"{name}, stage {stage}, {loop.__name__}"] = max(gaps)
    return found


LOOPS = {0: (with_engine,), 1: (with_own_loop,), 2: (with_engine,), 3: (with_engine, with_own_loop)}


@pytest.mark.parametrize("part", with_slow_rows([0, 1, 2], quick=[2]))
def test_every_entry_equals_torch(part: int) -> None:
    for found in run_ranks(2, differences, list(ENTRIES)[part::3]):
        assert {name: gap for name, gap in found.items() if not gap < 2e-6} == {}


HOST = {"device": "cpu"}
PLACES: dict[str, dict[str, Any]] = {
    "just in time": {"offload_optimizer": {**HOST, "just_in_time": True}},
    "parameters on the host": {"offload_optimizer": HOST, "offload_param": HOST},
    "kept for reuse": {"stage3_max_reuse_distance": 1_000_000},
    "small ones whole": {"stage3_param_persistence_threshold": 100},
}
CHOSEN = ("a method", "module by module", "the smallest module alone", "a parameter after a method")


def differences_by_place() -> dict[str, float]:
    found = {}
    for name in CHOSEN:
        losses, weights = reference(ENTRIES[name], world()[1])
        for place, zero in PLACES.items():
            for stage in (1, 2, 3) if place == "just in time" else (3,):
                got_losses, got = with_engine(ENTRIES[name], stage, **zero)
                gaps = [abs(a - b) for a, b in zip(losses, got_losses, strict=True)]
                gaps += [float((got[key] - value).abs().max()) for key, value in weights.items()]
                found[f"{name}, stage {stage}, {place}"] = max(gaps)
    return found


def test_entries_wherever_states_and_weights_are() -> None:
    for found in run_ranks(2, differences_by_place):
        assert {name: gap for name, gap in found.items() if not gap < 2e-6} == {}
