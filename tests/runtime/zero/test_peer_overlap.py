"""Number of collectives per unit and step, and their start: ahead of their use, behind the compute."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import zerotrain.runtime as zt
from tests.support.collectives import Events, watch_collectives
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.engine import Engine

pytestmark = pytest.mark.ranks


WIDTH, BLOCKS = 16, 4
NAMES = [f"blocks.{index}" for index in range(BLOCKS)]


class Chain(nn.Module):
    def __init__(self, *, checkpointing: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.checkpointing = checkpointing

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointing:
                # Recompute to the end, so that forward hooks after the module run in backward.
                with set_checkpoint_early_stop(False):
                    hidden = checkpoint(block, hidden, use_reentrant=self.checkpointing == "reentrant")
            else:
                hidden = block(hidden)
            hidden = torch.tanh(hidden)
        return hidden


def started(stage: int, *, checkpointing: str = "", **zero: Any) -> tuple[Engine, Events]:
    settings = config(stage)
    settings["zero_optimization"].update(zero)
    model = Chain(checkpointing=checkpointing)
    engine, *_ = zt.initialize(model=model, config=settings, unit_modules=NAMES)
    return engine, watch_collectives(engine)


def step(engine: Engine, backwards: int = 1) -> None:
    for _ in range(backwards):
        batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(world()[0]))
        engine.backward(engine(batch.requires_grad_()).square().mean())
    engine.step()


def counts(stage: int, options: dict[str, Any], backwards: int) -> list[Counter[str]]:
    """Return collectives per unit of each of three steps; every unit must have the same."""
    engine, events = started(stage, **options)
    units = [unit.name for unit in engine.core.units]
    found = []
    for _ in range(3):
        events.clear()
        step(engine, backwards)
        per_block = [
            Counter(name for name, label in events if label == unit and "done" not in name) for unit in units
        ]
        assert all(each == per_block[0] for each in per_block), per_block
        found.append(per_block[0])
    engine.close()
    return found


def all_counts() -> dict[str, list[Counter[str]]]:
    return {name: counts(*arguments) for name, arguments in COUNTED.items()}


COUNTED: dict[str, tuple[int, dict[str, Any], int]] = {
    "0": (0, {}, 1),
    "1": (1, {}, 1),
    "2": (2, {}, 1),
    "3": (3, {}, 1),
    "3, checkpointing": (3, {"checkpointing": "saved"}, 1),
    "3, reentrant": (3, {"checkpointing": "reentrant"}, 1),
    "3, reused": (3, {"stage3_max_reuse_distance": 1_000_000}, 1),
    "3, no prefetch": (3, {"stage3_prefetch_bucket_size": 0, "overlap_comm": False}, 1),
    "3, persistent": (3, {"stage3_param_persistence_threshold": 100_000}, 1),
    "2, two backwards": (2, {}, 2),
    "3, two backwards": (3, {}, 2),
}
PER_STEP: dict[str, dict[str, int]] = {
    # stage 0 has no owner of a part, so the averaged gradient goes back to all
    "0": {"exchange": 1, "all_gather": 1},
    "1": {"exchange": 1, "all_gather": 1},
    "2": {"exchange": 1, "all_gather": 1},
    "3": {"exchange": 1, "all_gather": 2},
    "3, checkpointing": {"exchange": 1, "all_gather": 2},
    "3, reentrant": {"exchange": 1, "all_gather": 2},
    "3, reused": {"exchange": 1, "all_gather": 1},
    "3, no prefetch": {"exchange": 1, "all_gather": 2},
    "3, persistent": {"exchange": 1, "all_gather": 1},
    "2, two backwards": {"exchange": 2, "all_gather": 1},
    "3, two backwards": {"exchange": 2, "all_gather": 4},
}


def test_collectives_per_unit_and_step() -> None:
    for found in run_ranks(2, all_counts):
        for name, per_step in found.items():
            expected = [Counter(PER_STEP[name])] * 3
            if name == "3, reused":  # no unit is kept before the order of units is known
                expected[0] = Counter(PER_STEP["3"])
            assert per_step == expected, name


def timeline(stage: int, zero: dict[str, Any]) -> Events:
    """Return gathers, exchanges and their waits, and each block's compute, of the third step."""
    engine, events = started(stage, **zero)
    for name in NAMES:
        block = engine.module.get_submodule(name)
        block.register_forward_hook(lambda *_, name=name: events.append(("forward", name)))
        block.register_full_backward_hook(lambda *_, name=name: events.append(("backward", name)))
    for _ in range(3):
        events.clear()
        step(engine)
    engine.close()
    return events


def position(events: Events, what: str, block: int, *, last: bool = False) -> int:
    places = [index for index, event in enumerate(events) if event == (what, f"blocks.{block}")]
    return places[-1 if last else 0]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_unit_is_gathered_before_this_one_computes(overlap: bool) -> None:
    for ahead, zero in ((True, {}), (False, {"stage3_prefetch_bucket_size": 0})):
        for events in run_ranks(2, timeline, 3, {"overlap_comm": overlap, **zero}):
            for block in range(BLOCKS - 1):
                gathered = position(events, "all_gather", block + 1)
                assert (gathered < position(events, "forward", block)) is ahead, events
                regathered = position(events, "all_gather", block, last=True)
                assert (regathered < position(events, "backward", block + 1)) is ahead, events


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_travel_while_the_next_unit_computes(stage: int) -> None:
    """The wait for a unit's exchange follows the next unit's compute with overlap, else it is immediate."""
    for overlap in (True, False):
        for events in run_ranks(2, timeline, stage, {"overlap_comm": overlap}):
            for block in range(BLOCKS - 1, 0, -1):
                sent = position(events, "exchange", block)
                done = position(events, "exchange done", block)
                following = position(events, "backward", block - 1)
                assert sent < following, events
                assert (done > following) is overlap, events
