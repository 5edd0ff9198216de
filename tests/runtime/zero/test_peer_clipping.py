"""The global norm equals the replicated one and costs one collective; clipping scales by it if needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.collectives import watch_collectives
from tests.support.free_form import check_equal, config
from tests.support.ranks import run_ranks
from tests.support.training import whole_parameters, world

pytestmark = pytest.mark.ranks


WIDTH = 65  # a unit has more elements than the smallest shard, so that every rank owns some
UNITS = ["blocks.0", "blocks.1", "blocks.2"]
TINY_CLIP, LARGE_CLIP = 1e-3, 1e6


class Mixed(nn.Module):
    """Odd sizes; a frozen unit, an unused one, a tied matrix."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        blocks[2].weight = blocks[0].weight
        self.blocks = nn.ModuleList(blocks)
        self.blocks[1].requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 7)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden * self.scale


def loss(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    output: torch.Tensor = model(torch.randn(3, WIDTH, generator=generator))
    return 20 * (output - 1).square().mean()


@pytest.mark.parametrize("clip", [0.7, TINY_CLIP])
def test_norms_and_clipped_weights_equal_the_replicated_ones(clip: float) -> None:
    check_equal(Mixed, loss, world_size=3, stages=(0, 1, 2, 3), unit_modules=UNITS, clip=clip)


def trained(stage: int, clip: float, accumulation: int = 1) -> tuple[list[float], dict[str, Any], Any]:
    """Train two steps; return norms, weights, and the collectives that `step` starts at each boundary."""
    torch.manual_seed(3)
    model = Mixed()
    settings = config(stage, gradient_clipping=clip, gradient_accumulation_steps=accumulation)
    engine, *_ = zt.initialize(model=model, config=settings, unit_modules=UNITS)
    seen = watch_collectives(engine)
    norms: list[float] = []
    issued: list[list[str]] = []
    for step in range(2 * accumulation):
        engine.backward(loss(engine, step // accumulation, world()[0]))
        seen.clear()
        result = engine.step()
        if result.at_boundary:
            norms.append(result.grad_norm)
            issued.append([name for name, _ in seen if "done" not in name])
        else:
            assert seen == [], "the end of a micro-batch needs no collective"
    with zt.full_parameters(model):
        weights = whole_parameters(model)
    engine.close()
    return norms, weights, issued


def compare(stage: int) -> dict[str, Any]:
    none, loose, tight = (trained(stage, clip) for clip in (0.0, LARGE_CLIP, TINY_CLIP))
    twice = trained(stage, 0.0, accumulation=2)
    return {
        "loose is none": none[0] == loose[0] and _same(none[1], loose[1]),
        "norm before clipping": tight[0][0] == none[0][0],
        "tight differs": not _same(none[1], tight[1]),
        "the same batch twice has the same norm": np.isclose(twice[0][0], none[0][0], rtol=1e-6),
        "collectives": [none[2], tight[2], twice[2]],
    }


def _same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(np.array_equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_collective_for_the_norm_and_no_bit_where_nothing_is_clipped(stage: int) -> None:
    for found in run_ranks(2, compare, stage):
        none, tight, twice = found.pop("collectives")
        assert all(found.values()), found
        assert none == tight == twice, "clipping must not cost a collective"
        assert all(names.count("gather_record") == 1 for names in none)
        if stage > 1:  # gradients are sent before the boundary: the record is all that stage 3 sends
            assert all("exchange" not in names for names in none)
        if stage == 3:
            assert none == [["gather_record", "all_gather"]] * 2  # the record is itself an all-gather


def poisoned(stage: int) -> list[tuple[bool, bool]]:
    """Set a non-finite gradient on one rank only; every rank must skip and keep its weights."""
    torch.manual_seed(3)
    model = Mixed()
    engine, *_ = zt.initialize(model=model, config=config(stage, gradient_clipping=0.5), unit_modules=UNITS)
    found = []
    for factor in (float("inf"), float("nan"), 1.0):
        with zt.full_parameters(model):
            before = whole_parameters(model)
        engine.backward(loss(engine, 0, 0) * (factor if world()[0] == 1 else 1.0))
        skipped = engine.step().skipped
        with zt.full_parameters(model):
            found.append((skipped, _same(before, whole_parameters(model))))
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_is_not_finite_anywhere_skips_the_step_everywhere(stage: int) -> None:
    assert run_ranks(2, poisoned, stage) == [[(True, True), (True, True), (False, False)]] * 2
