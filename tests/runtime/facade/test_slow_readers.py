"""Ranks that read each other's weights in place do not write while a slow rank is still in forward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zerotrain.runtime as zt
from tests.runtime.facade.test_state_access import engine_at, micro_batch, parameter, plain
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.engine import Engine

pytestmark = pytest.mark.ranks


NAME = "blocks.1.qkv.weight"
PATIENCE_S = 0.3
"""A write that waits for no rank arrives earlier."""


def set_full(engine: Engine) -> None:
    weight = parameter(engine, NAME)
    zt.set_full_fp32(weight, torch.zeros(weight.shape))


def set_local(engine: Engine) -> None:
    weight = parameter(engine, NAME)
    zt.set_local_fp32(weight, torch.zeros_like(zt.get_local_fp32(weight)))


def write_whole(engine: Engine) -> None:
    with zt.full_parameters(engine.module, write=True):
        parameter(engine, NAME).zero_()


def load_whole(engine: Engine) -> None:
    engine.module.load_state_dict({**plain().state_dict(), NAME: torch.zeros(96, 32)})


WRITES: tuple[Callable[[Engine], None], ...] = (set_full, set_local, write_whole, load_whole)


@torch.no_grad()
def write_after_forward() -> list[tuple[bool, bool]]:
    """Return, per way to write, whether the slow forward saw only old weights, and the next one new ones."""
    found = []
    rank = world()[0]
    for write in WRITES:
        engine = engine_at(1, "fp32")
        weight = parameter(engine, NAME)
        assert engine.comm.shares_memory
        assert rank == 1 or zt.local_interval(weight)[1] > 0, "rank 1 must read what rank 0 writes"
        before = engine(*micro_batch(0, 0))
        engine.comm.gather_record([0.0])

        def wait(*_: Any, weight: torch.Tensor = weight) -> None:
            until = time.monotonic() + PATIENCE_S
            while weight[0].any() and time.monotonic() < until:
                time.sleep(0.01)

        block = engine.module.get_submodule("blocks.0")
        handle = block.register_forward_hook(wait) if rank == 1 else None
        slow = engine(*micro_batch(0, 0))
        if handle is not None:
            handle.remove()
        write(engine)
        after = engine(*micro_batch(0, 0))
        found.append((torch.equal(slow, before), not weight.any() and not torch.equal(after, before)))
        engine.close()
    return found


def test_writes_wait_for_slow_readers() -> None:
    assert run_ranks(2, write_after_forward) == [[(True, True)] * len(WRITES)] * 2
