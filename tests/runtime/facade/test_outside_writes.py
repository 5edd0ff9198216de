"""Direct writes of a script into weights are kept or refused by name, alike at every stage and precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import world
from zerotrain.runtime.engine import Engine

pytestmark = pytest.mark.ranks

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "bf16 remainders": {"bf16": {"enabled": True, "store_param_remainders": True}},
}
WIDTH = 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.base(self.tower(self.embed(tokens))))
        return hidden.float().square().mean()


def values(shape: torch.Size, seed: int = 1) -> torch.Tensor:
    """Return values that every precision holds exactly."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 4


def load_part(model: Net) -> None:
    model.tower.load_state_dict({name: values(each.shape) for name, each in model.tower.state_dict().items()})


def load_whole(model: Net) -> None:
    model.load_state_dict({name: values(each.shape) for name, each in model.state_dict().items()})


@torch.no_grad()
def fill(model: Net) -> None:
    model.head.weight.fill_(0.5)


@torch.no_grad()
def write_a_row(model: Net) -> None:
    model.embed.weight[3].copy_(values(torch.Size([WIDTH])))


def reset(model: Net) -> None:
    torch.manual_seed(5)
    first = model.tower[0]
    assert isinstance(first, nn.Linear)
    first.reset_parameters()


@torch.no_grad()
def write_frozen(model: Net) -> None:
    model.base.weight.copy_(values(model.base.weight.shape))


def through_a_view(model: Net) -> None:
    model.head.weight.detach()[1:3].mul_(0.5)


WRITES: dict[str, Callable[[Net], None]] = {
    "load_state_dict of a part": load_part,
    "load_state_dict": load_whole,
    "fill_": fill,
    "one row": write_a_row,
    "reset_parameters": reset,
    "a frozen weight": write_frozen,
    "through a view": through_a_view,
}


def engine_at(stage: int, precision: str, lr: float, **zero: Any) -> tuple[Net, Engine]:
    torch.manual_seed(2)
    model = Net()
    optimizer = {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}}
    settings = config(stage, optimizer=optimizer, **PRECISIONS[precision])
    settings["zero_optimization"].update(zero)
    engine, *_ = zt.initialize(model=model, config=settings)
    return model, engine


def train(engine: Engine, steps: int = 1) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.arange(10).view(2, 5) + world()[0]))
        engine.step()


def set_rates(engine: Engine, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: zt.get_full_fp32(value) for name, value in engine.module.named_parameters()}


def outcome(stage: int, precision: str, write: Callable[[Net], None], **zero: Any) -> str:
    """Train so that masters differ from their weights, write, take a step without movement, and check."""
    model, engine = engine_at(stage, precision, 0.01, **zero)
    train(engine, 2)
    set_rates(engine, 0.0)
    before, weights = masters(engine), {name: p.detach().clone() for name, p in model.named_parameters()}
    write(model)
    written = {name: value.detach().clone() for name, value in model.named_parameters()}
    train(engine)
    after = masters(engine)
    lost = []
    for name, value in model.named_parameters():
        kept = written[name] == weights[name]  # elements that the write did not change keep every digit
        slack = 0.0 if precision != "bf16 remainders" else 2**-8  # which an earlier remainder may add
        is_kept = torch.equal(value, written[name]) and torch.equal(after[name][kept], before[name][kept])
        gap = (after[name] - written[name].float())[~kept].abs()
        if not is_kept or (gap > slack * (written[name].float()[~kept].abs() + 1e-20)).any():
            lost.append(name)
    engine.close()
    return f"lost {lost}" if lost else "kept"


def outcomes(precisions: list[str]) -> dict[str, str]:
    found = {}
    for precision in precisions:
        for stage in (0, 1, 2):
            for name, write in WRITES.items():
                found[f"{name}, stage {stage}, {precision}"] = outcome(stage, precision, write)
    for stage in (1, 2) if "bf16" in precisions else ():
        place = {"offload_optimizer": {"device": "cpu"}}
        for name, write in WRITES.items():
            found[f"{name}, stage {stage}, offloaded"] = outcome(stage, "bf16", write, **place)
    return found


@pytest.mark.parametrize(
    "precisions",
    with_slow_rows([["fp32", "fp16"], ["bf16"], ["bf16 remainders"]], quick=[["fp32", "fp16"]]),
    ids="-".join,
)
def test_replicated_weights_keep_what_is_written(precisions: list[str]) -> None:
    for found in run_ranks(2, outcomes, precisions):
        assert {name: each for name, each in found.items() if each != "kept"} == {}
