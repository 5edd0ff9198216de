"""Host memory of a rank holds its shard and at most one unit at the start; it reads only its own bytes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zerotrain.runtime as zt
from tests.support import resident
from tests.support.ranks import run_ranks
from tests.support.training import world

pytestmark = pytest.mark.ranks


WIDTH, UNITS = 2048, 8
UNIT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
MODEL_BYTES = UNITS * UNIT_BYTES
SLACK_BYTES = UNIT_BYTES // 2
"""Tolerance for what else a process holds, such as pages of libraries, which vary with the page cache."""
M_MMAP_THRESHOLD = -3
"""The number of glibc's option in `malloc.h`."""


class Stack(nn.Module):
    """A model of 33.6 million parameters in 8 units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def config(world_size: int) -> dict[str, Any]:
    return {
        "train_batch_size": world_size,
        "bf16": {"enabled": True, "auto_cast": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }


def warm_up(world_size: int) -> None:
    """Create the threads, connections and code that every process has once."""
    # A unit is mapped and unmapped by itself. Otherwise glibc raises its limit with the blocks that it frees,
    # and the heap, as its layout happens to be, keeps up to three units that are freed already.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20) == 1
    with zt.init_context():
        model = nn.Linear(WIDTH, 2)
    engine, *_ = zt.initialize(model=model, config=config(world_size))
    engine.backward(engine(torch.ones(1, WIDTH)).sum())
    engine.step()


def start(folder: str | None, *, deferred: bool, more_bytes: int = 0) -> dict[str, int]:
    """Return bytes of the start: peak above the earlier memory, the engine's own count, read from files."""
    _, world_size = world()
    warm_up(world_size)
    before = resident.reset_peak()
    with zt.init_context(seed=1, enabled=deferred):
        model = Stack()
    files = zt.load_weights(model, folder).files if folder else None
    held = torch.ones(more_bytes, dtype=torch.uint8)
    engine, *_ = zt.initialize(model=model, config=config(world_size))
    answer = {
        "peak": resident.peak_bytes() - before,
        "own": 4 * sum(engine.core.layout.shard_numel(unit.layout) for unit in engine.core.units),
        "counted": engine.memory.persistent_bytes,
        "read": files.bytes_read if files else 0,
    }
    engine.close()
    del held
    return answer


def allowed_bytes(answer: dict[str, int]) -> int:
    """Return weights, masters and one unit; moments and gradients are zero pages that are not touched yet."""
    return answer["own"] * 6 // 4 + UNIT_BYTES + SLACK_BYTES


def test_the_share_and_one_unit_are_resident() -> None:
    for answer in run_ranks(2, start_deferred, None):
        assert answer["counted"] > answer["own"] > MODEL_BYTES // 2
        assert answer["peak"] <= allowed_bytes(answer)


def start_deferred(folder: str | None) -> dict[str, int]:
    return start(folder, deferred=True)


def start_plainly(folder: str | None) -> dict[str, int]:
    return start(folder, deferred=False)


def start_with_a_second_unit(folder: str | None) -> dict[str, int]:
    return start(folder, deferred=True, more_bytes=UNIT_BYTES)


def test_the_bound_sees_a_second_unit() -> None:
    for answer in run_ranks(2, start_with_a_second_unit, None):
        assert answer["peak"] > allowed_bytes(answer)


def test_the_bound_sees_a_model_that_was_whole() -> None:
    for answer in run_ranks(2, start_plainly, None):
        assert answer["peak"] > allowed_bytes(answer)


def count_preads(folder: str) -> tuple[dict[str, int], int]:
    """Return the start's bytes, and the bytes that `os.preadv` really read."""
    fetched = 0
    original = os.preadv

    def counting(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        nonlocal fetched
        count = original(descriptor, buffers, offset, flags)
        fetched += count
        return count

    os.preadv = counting
    try:
        return start(folder, deferred=True), fetched
    finally:
        os.preadv = original


def test_a_rank_reads_its_own_bytes_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(Stack().state_dict(), tmp_path / "model.safetensors")
    answers = run_ranks(2, count_preads, str(tmp_path))
    for answer, fetched in answers:
        assert answer["read"] == fetched
        assert fetched <= answer["own"]
        assert answer["peak"] <= allowed_bytes(answer)
    assert sum(fetched for _, fetched in answers) == MODEL_BYTES, "every byte once"
