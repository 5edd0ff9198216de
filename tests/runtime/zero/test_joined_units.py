"""Modules whose units are too small to be sent one by one are one unit, with the same training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.collectives import watch_collectives
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiny_models import TinyGPT
from tests.support.training import world
from zerotrain.contract.config import load, resolve
from zerotrain.runtime import setup
from zerotrain.runtime.zero.plan import JOINED_NUMEL, plan_layout

LIMIT = 40_000


def units(model: nn.Module, **options: Any) -> list[str]:
    layout = plan_layout(model, world_size=2, compute_dtype="fp32", **options)
    return [unit.name for unit in layout.units]


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.as_tensor(self.up(torch.relu(self.down(hidden))))


class Staged(nn.Module):
    """A model as for images: stages of parts that grow, outside of any list."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.narrow = nn.Sequential(Bottleneck(64), Bottleneck(64), Bottleneck(64))
        self.middle = nn.Linear(64, 512)
        self.wide = nn.Sequential(Bottleneck(512), Bottleneck(512))
        self.heads = nn.ModuleDict({"a": nn.Linear(512, 4), "b": nn.Linear(512, 4)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(self.middle(self.narrow(self.stem(hidden))))
        total: torch.Tensor = self.heads["a"](hidden) + self.heads["b"](hidden)
        return total


@pytest.mark.unit
def test_the_outermost_module_within_the_limit_is_one_unit() -> None:
    apart = [f"narrow.{index}.{name}" for index in range(3) for name in ("down", "up")]
    assert [name for name in units(Staged()) if name.startswith("narrow")] == apart
    assert units(Staged(), joined_numel=LIMIT) == [
        *("stem", "narrow", "middle", "wide.0", "wide.1"),
        *("heads.a", "heads.b"),  # a dict of modules is never called itself
    ]


@pytest.mark.unit
def test_fifty_convolutions_are_one_unit() -> None:
    model = nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(50)))
    assert len(units(model)) == 50
    assert units(model, joined_numel=JOINED_NUMEL) == ["(root)"]


@pytest.mark.unit
def test_blocks_of_lists_stay_units() -> None:
    assert units(TinyGPT(layers=2), joined_numel=JOINED_NUMEL) == units(TinyGPT(layers=2))


@pytest.mark.unit
def test_units_are_joined_on_a_gpu() -> None:
    plain, chosen = (
        resolve(
            load({"train_batch_size": 1, "zero_optimization": {"module_granularity_threshold": numel}}),
            world_size=1,
        )
        for numel in (0, 1024)
    )
    assert setup.joined_numel(plain, on_host=False) == JOINED_NUMEL
    assert setup.joined_numel(plain, on_host=True) == 0
    assert setup.joined_numel(chosen, on_host=False) == 0


def trained(stage: int, *, saves: str = "", loads: str = "") -> tuple[dict[str, bytes], dict[str, int]]:
    """Train two steps, with a checkpoint in between, or the second one from a checkpoint; return the masters
    and how many collectives the second step has."""
    torch.manual_seed(2)
    model = Staged()
    engine, *_ = zt.initialize(model=model, config=config(stage))

    def step(number: int) -> None:
        inputs = torch.randn(2, 64, generator=torch.Generator().manual_seed(10 * number + world()[0]))
        engine.backward(engine(inputs).square().mean())
        engine.step()

    if loads:
        engine.load_checkpoint(loads)
    else:
        step(0)
        engine.save_checkpoint(saves)
    events = watch_collectives(engine)
    step(1)
    counts = Counter(name for name, _ in events)
    masters = {name: zt.get_full_fp32(value).numpy().tobytes() for name, value in model.named_parameters()}
    engine.close()
    return masters, counts


def compare(folder: Path) -> list[tuple[int, int]]:
    """Train with units apart and joined, and each from the other's checkpoint; return, per stage, the
    exchanges of a step."""
    counts = []
    for stage in (1, 3):
        apart, joined = str(folder / f"apart-{stage}"), str(folder / f"joined-{stage}")
        wanted, before = trained(stage, saves=apart)
        setup.joined_numel = lambda *_, **__: LIMIT
        found, after = trained(stage, saves=joined)
        assert found == wanted, stage
        assert trained(stage, loads=apart)[0] == wanted, stage
        setup.joined_numel = lambda *_, **__: 0
        assert trained(stage, loads=joined)[0] == wanted, stage
        assert after["all_gather"] < before["all_gather"]
        counts.append((before["exchange"], after["exchange"]))
    return counts


@pytest.mark.ranks
def test_training_and_checkpoints_are_the_same(tmp_path: Path) -> None:
    for found in run_ranks(2, compare, tmp_path):
        assert found == [(14, 7), (14, 7)]
