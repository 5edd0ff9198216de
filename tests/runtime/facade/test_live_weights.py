"""Stage 3: the weights kept from forward to backward or gathered ahead follow the limits; bits are equal."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import zerotrain.runtime as zt
from tests.support.collectives import watch_collectives
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import world

pytestmark = pytest.mark.ranks


OFF = {"stage3_prefetch_bucket_size": 0}
BLOCK = 12_288
"""Elements of a block on two ranks, padding included."""


def gathers(limits: dict[str, int]) -> tuple[Counter[str], int, list[float]]:
    """Return gathers by unit in the third step, the most units that were whole at once, and the losses."""
    torch.manual_seed(3)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **limits}
    engine, *_ = zt.initialize(model=TinyGPT(layers=4), config={**config(3), "zero_optimization": zero})
    events, losses, most = watch_collectives(engine), [], 0
    units = [unit for unit in engine.core.units if unit.name.startswith("blocks")]
    assert {unit.layout.padded_numel for unit in units} == {BLOCK}

    def count(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(unit.is_gathered for unit in units))

    for block in engine.module.get_submodule("blocks").children():
        block.register_forward_pre_hook(count)
    for tokens, targets in token_batches(3, size=2):
        events.clear()
        rank = world()[0]
        loss = engine(tokens.chunk(2)[rank], targets.chunk(2)[rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.memory.transient_bytes == 0
    engine.close()
    return Counter(unit for name, unit in events if name == "all_gather"), most, losses


def all_gathers(settings: list[dict[str, int]]) -> list[tuple[Counter[str], int, list[float]]]:
    return [gathers(limits) for limits in settings]


def test_units_stay_whole_within_the_limits() -> None:
    """The last blocks are kept first; only norm and head run between their forward and backward."""
    tail = 2 * (4_096 + 4_096)
    settings = [
        {**OFF, "stage3_max_reuse_distance": 0},
        {**OFF, "stage3_max_reuse_distance": tail},
        {**OFF, "stage3_max_reuse_distance": tail + 2 * BLOCK},
        {**OFF},
        {**OFF, "stage3_max_live_parameters": 3 * BLOCK + 4_096},
        {"stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0},
        {"stage3_prefetch_bucket_size": 3 * BLOCK, "stage3_max_reuse_distance": 0},
    ]
    found = run_ranks(2, all_gathers, settings)[0]
    twice = [sum(gathered[f"blocks.{index}"] == 2 for index in range(4)) for gathered, _, _ in found]
    assert twice == [4, 3, 2, 0, 2, 4, 4]
    assert [most for _, most, _ in found] == [1, 1, 2, 4, 2, 2, 4]
    assert all(losses == found[0][2] for _, _, losses in found)
