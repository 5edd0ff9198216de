"""Frozen, unused and later unfrozen parameters: the same training, no traffic and no memory for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerotrain.runtime as zt
from tests.support.collectives import watch_collectives
from tests.support.free_form import check_equal, config
from tests.support.ranks import run_ranks
from tests.support.training import whole_parameters, world
from zerotrain.runtime.zero import gradient_sum
from zerotrain.runtime.zero.ledger import MemoryKind

pytestmark = pytest.mark.ranks


WIDTH = 65  # a unit has more elements than the smallest shard, so that every rank owns some
UNITS = ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "unused"]


class Adapter(nn.Module):
    """A frozen matrix with a small trainable product beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(hidden) + self.up(self.down(hidden))
        return result


class Net(nn.Module):
    """Parts frozen before any trained one, an adapter, frozen in the middle, trained; one is never used."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        kinds = (nn.Linear(WIDTH, WIDTH), Adapter(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(kinds)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 7)
        self.reentrant = reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                hidden = torch.tanh(block(hidden))
            else:
                hidden = torch.tanh(checkpoint(block, hidden, use_reentrant=self.reentrant))
        return hidden


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model: Any, step: int, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(inputs(step, rank))
    return (output - 1).square().mean()


def saved() -> Net:
    return Net(reentrant=False)


def recomputed() -> Net:
    return Net(reentrant=True)


def loss_of_inputs(model: Any, step: int, rank: int) -> torch.Tensor:
    """Return the loss of inputs with gradients, as reentrant checkpointing requires them."""
    output: torch.Tensor = model(inputs(step, rank).requires_grad_())
    return (output - 1).square().mean()


def test_training_with_frozen_parameters() -> None:
    check_equal(Net, loss, stages=(0, 1, 2, 3), unit_modules=UNITS)
    check_equal(saved, loss, stages=(3,), unit_modules=UNITS)
    check_equal(recomputed, loss_of_inputs, stages=(2, 3), unit_modules=UNITS)


def traffic(stage: int) -> dict[str, Any]:
    gradient_sum.stays = lambda device: True  # also between steps, when they are counted here
    torch.manual_seed(3)
    model = Net()
    engine, *_ = zt.initialize(model=model, config=config(stage), unit_modules=UNITS)
    with zt.full_parameters(model):
        before = whole_parameters(model)
    events = watch_collectives(engine)
    for step in range(2):
        events.clear()
        engine.backward(loss(engine, step, world()[0]))
        engine.step()
    per_unit = {
        unit.name: Counter(what for what, label in events if label == unit.name) for unit in engine.core.units
    }
    trained = sum(unit.layout.padded_numel for unit in engine.core.units if unit.layout.trainable)
    with zt.full_parameters(model):
        after = whole_parameters(model)
    found = {
        "events": per_unit,
        "changed": {name for name, value in before.items() if not np.array_equal(value, after[name])},
        "gradients": engine.memory.live_bytes(MemoryKind.GRADS) * (2 if stage >= 2 else 1) == trained * 4,
        "states": engine.memory.live_bytes(MemoryKind.STATES) * (2 if stage >= 1 else 1) == trained * 8,
    }
    engine.close()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_cost_no_gradients_states_or_reductions(stage: int) -> None:
    for found in run_ranks(2, traffic, stage):
        # Decay moves parameters without gradient, as in plain AdamW with zero gradients.
        assert found["changed"] == {
            *("blocks.1.down.weight", "blocks.1.up.weight", "blocks.3.weight", "blocks.3.bias"),
            *("unused.weight", "unused.bias"),
        }
        assert found["gradients"]
        assert found["states"]
        events = found["events"]
        frozen = {name: seen for name, seen in events.items() if name.endswith("#frozen")}
        assert frozen.keys() == {"blocks.0#frozen", "blocks.1#frozen", "blocks.2#frozen"}
        assert all(seen["exchange"] == 0 for seen in frozen.values())
        assert all(seen["exchange"] == 1 for name, seen in events.items() if name not in frozen)
        if stage == 3:
            # No gradient passes through the first one; backward needs the others again.
            assert {name: seen["all_gather"] for name, seen in frozen.items()} == {
                "blocks.0#frozen": 1,
                "blocks.1#frozen": 2,
                "blocks.2#frozen": 2,
            }
            assert events["unused"]["all_gather"] == 0
        else:
            assert all(seen["all_gather"] == 0 for seen in frozen.values())
