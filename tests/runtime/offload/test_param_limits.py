"""Offloaded weights with ZeRO++, every depth of prefetching, and models that change their order.

Memory never holds more of them than the tier's buffers do.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.offloaded_params import Where, config_of, digests, run_all
from tests.support.ranks import run_ranks
from tests.support.training import Case, world
from zerotrain.contract.memory.inputs import READ_BUFFERS, UPDATE_BUFFERS
from zerotrain.runtime.zero.ledger import MemoryKind

pytestmark = pytest.mark.ranks


BASE = Case(stage=3, dtype="bf16", clip=0.3, torch_adam=False, steps=4)


def pairs(**extra: Any) -> list[tuple[Case, Where, bool]]:
    """Return runs without and with nvme, under the same further settings."""
    settings = tuple(extra.items())
    resident = Where(remainders=True, extra=settings)
    spilled = replace(resident, params="nvme", states="nvme", just_in_time=True)
    return [(BASE, resident, False), (BASE, spilled, False)]


def on_two_nodes(jobs: list[tuple[Case, Where, bool]], spill: str) -> list[Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return run_all(jobs, spill)


def check(ranks: int, jobs: list[tuple[Case, Where, bool]], spill: Path) -> None:
    for trained in run_ranks(ranks, on_two_nodes if ranks == 4 else run_all, jobs, str(spill)):
        for index in range(0, len(jobs), 2):
            assert trained[index] == trained[index + 1], jobs[index + 1]


def test_zeropp(tmp_path: Path) -> None:
    """Each shard is read once a step with hpZ; codes are made from the data that was read."""
    both = {"zero_hpz_partition_size": 2, "zero_quantized_weights": True}
    check(4, [*pairs(zero_hpz_partition_size=2), *pairs(**both)], tmp_path)


def test_every_depth_of_prefetching(tmp_path: Path) -> None:
    jobs = [
        *pairs(stage3_prefetch_bucket_size=0),
        *pairs(stage3_prefetch_bucket_size=1),
        *pairs(stage3_prefetch_bucket_size=10**9, stage3_max_reuse_distance=10**9),
        *pairs(stage3_param_persistence_threshold=100),
    ]
    check(2, jobs, tmp_path)


class Wandering(nn.Module):
    """A model that uses its blocks in another order, and another number of them, in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.passes = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(6, generator=torch.Generator().manual_seed(self.passes)).tolist()
        for index in order[: 2 + self.passes % 5]:
            values = values + torch.tanh(self.blocks[index](values))
        self.passes += 1
        mean: torch.Tensor = values.float().square().mean()
        return mean


def wander(where: Where, spill: str) -> tuple[list[float], dict[str, str]]:
    torch.manual_seed(3)
    config = config_of(replace(BASE, clip=0.0), where, spill)
    engine, *_ = zt.initialize(model=Wandering(), config=config)
    losses = []
    for step in range(8):
        values = torch.randn(2, 64, generator=torch.Generator().manual_seed(step)) + world()[0]
        loss = engine(values)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = digests(engine)
    engine.close()
    return losses, found


def wander_everywhere(spill: str) -> list[Any]:
    resident = Where(remainders=True)
    spilled = replace(resident, params="nvme", states="nvme")
    places = [resident, replace(spilled, just_in_time=True), replace(spilled, just_in_time=False)]
    return [wander(where, spill) for where in places]


def test_no_order_of_use_is_relied_on(tmp_path: Path) -> None:
    for resident, *spilled in run_ranks(2, wander_everywhere, str(tmp_path)):
        assert spilled == [resident, resident]


class Chain(nn.Module):
    """Equal blocks, the first two of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))
        self.blocks[0].requires_grad_(False)
        self.blocks[1].requires_grad_(False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = torch.tanh(block(values))
        mean: torch.Tensor = values.float().square().mean()
        return mean


def measure(spill: str) -> dict[str, int]:
    """Return bytes of weights of one rank in some steps."""
    where = Where(params="nvme", states="cpu", extra=(("stage3_prefetch_bucket_size", 1),))
    engine, *_ = zt.initialize(model=Chain(), config=config_of(BASE, where, spill))
    for _ in range(3):
        loss = engine(torch.randn(4, 128))
        engine.backward(loss)
        engine.step()
    layout, memory = engine.core.layout, engine.memory
    shards = [2 * layout.shard_numel(unit) for unit in layout.units]
    found = {
        "ring": memory.peak_bytes(MemoryKind.RING),
        "gathered": memory.peak_bytes(MemoryKind.GATHERED),
        "resident": sum(
            memory.peak_bytes(kind) for kind in (MemoryKind.HOST_PARAMS, MemoryKind.PARAMS, MemoryKind.FROZEN)
        ),
        "spill": memory.live_bytes(MemoryKind.SPILL),
        "shards": sum(shards),
        "largest": max(shards),
        "largest_whole": max(unit.num_bytes for unit in layout.units),
    }
    engine.close()
    return found


def test_no_more_weights_in_memory_than_the_buffers_hold(tmp_path: Path) -> None:
    for found in run_ranks(2, measure, str(tmp_path)):
        assert found["resident"] == 0
        assert found["spill"] == found["shards"]
        assert found["ring"] == (READ_BUFFERS + UPDATE_BUFFERS) * found["largest"]
        assert found["ring"] < found["shards"]
        assert found["gathered"] <= 2 * found["largest_whole"]
