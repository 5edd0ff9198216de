"""Inputs that modules keep in attributes see what the caller writes into them later, with gradients, at every
stage and precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import config, engine_outcome, reference_outcome
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import Outcome

pytestmark = pytest.mark.ranks

WIDTH = 40
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 2}},
}


@dataclass
class Record:
    hidden: torch.Tensor


class Block(nn.Module):
    """A layer that keeps its input in one of several places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: Any = None
        self.register_buffer("state", torch.zeros(4, WIDTH), persistent=False)

    def forward(self, place: str, hidden: torch.Tensor) -> torch.Tensor:
        if place == "attribute":
            self.seen = hidden
        elif place == "view":
            self.seen = hidden[1:3]
        elif place == "reshaped view":
            self.seen = hidden.view(2, 2, WIDTH)[:, 0]
        elif place == "list":
            self.seen = [*(self.seen or [])[-1:], hidden]
        elif place == "dict of tuples":
            self.seen = {"inputs": (hidden, 1)}
        elif place == "dataclass":
            self.seen = Record(hidden)
        elif place == "attribute of a layer":
            vars(self.linear)["seen"] = hidden
        elif place == "buffer":
            self.state = hidden
        elif place == "after a write":
            hidden.mul_(1.5)
            self.seen = hidden
        elif place == "retained":
            hidden.retain_grad()
            self.seen = hidden
        made: torch.Tensor = torch.tanh(self.linear(hidden.clone()))
        return made

    def kept(self, place: str) -> torch.Tensor:
        kept: torch.Tensor
        if place == "list":
            kept = self.seen[-1]
        elif place == "dict of tuples":
            kept = self.seen["inputs"][0]
        elif place == "dataclass":
            kept = self.seen.hidden
        elif place == "attribute of a layer":
            kept = vars(self.linear)["seen"]
        elif place == "buffer":
            kept = self.state
        else:
            kept = self.seen
        return kept


PLACES = (
    "attribute",
    "dataclass",
    "attribute of a layer",
    "view",
    "list",
    "buffer",
    "dict of tuples",
    "reshaped view",
    "after a write",
    "root",
)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.seen: Any = None

    def forward(self, place: str, hidden: torch.Tensor) -> torch.Tensor:
        if place == "root":
            return self.with_root(hidden)
        hidden = self.first(hidden)
        total = hidden * 0.1
        block: Any
        for block in self.blocks:
            hidden = hidden * 1.0
            result = block(place, hidden)
            hidden.mul_(0.7)
            total = total + block.kept(place).mean() + hidden
            hidden.add_(result)
            total = total + 3 * block.kept(place).sum(0)
        return total + hidden

    def with_root(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keep the root's input in the root and in a block."""
        self.seen = hidden
        total: torch.Tensor = self.blocks[0]("attribute", hidden) + hidden
        total = total + self.first(total * 1.0)
        for each in self.blocks[1:]:
            total = total + each("none", total)
        return total


def loss(place: str, engine: Any, step: int, rank: int) -> torch.Tensor:
    model = getattr(engine, "module", engine)
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    batch = batch.to(model.first.weight.dtype)
    if place != "root":
        output: torch.Tensor = engine(place, batch)
        return output.float().square().mean()
    factor = torch.ones(4, WIDTH, dtype=batch.dtype, requires_grad=True)
    hidden = batch * factor
    output = engine(place, hidden)
    scale = output.mean()
    hidden.mul_(scale)
    kept = model.seen + 2 * model.blocks[0].seen
    made: torch.Tensor = (output.float().square() + kept.float()).square().mean()
    return made


class Loss:
    """Loss of a model whose blocks keep their inputs in one place."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __call__(self, model: Any, step: int, rank: int) -> torch.Tensor:
        return loss(self.place, model, step, rank)


def gap(outcome: Outcome, reference: Outcome) -> float:
    """Return the largest relative difference of losses and gradient norms."""
    found, wanted = [*outcome.losses, *outcome.norms], [*reference.losses, *reference.norms]
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def differences(precision: str) -> dict[str, float]:
    """Return the difference to plain torch in fp32 by place and stage."""
    found = {}
    for place in PLACES if precision == "fp32" else PLACES[::3]:
        reference = reference_outcome(Chain, Loss(place), 2)
        for stage in (1, 2, 3):
            outcome = engine_outcome(Chain, Loss(place), stage, None, PRECISIONS[precision])
            found[f"{place}, stage {stage}"] = gap(outcome, reference)
    return found


@pytest.mark.parametrize("precision", with_slow_rows(PRECISIONS, quick=["fp32"]))
def test_kept_inputs_see_later_writes(precision: str) -> None:
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for found in run_ranks(2, differences, precision):
        assert {row: gap for row, gap in found.items() if not gap < tolerance} == {}


def retained_gradients(model: Any, call: Any) -> list[float]:
    """Return the gradients of what the blocks kept, which the model used besides."""
    call("retained", torch.ones(4, WIDTH)).square().mean().backward()
    return [float(block.seen.grad.square().sum()) for block in model.blocks]


def retained_gradients_of_engine() -> list[list[float]]:
    found = []
    for stage in (1, 2, 3):
        torch.manual_seed(3)
        model = Chain()
        engine, *_ = zt.initialize(model=model, config=config(stage))
        found.append(retained_gradients(model, engine))
        engine.close()
    return found


def test_kept_inputs_retain_their_whole_gradient() -> None:
    torch.manual_seed(3)
    model = Chain()
    wanted = retained_gradients(model, model)
    for found in run_ranks(2, retained_gradients_of_engine):
        assert found == [pytest.approx(wanted, rel=1e-5)] * 3
