"""Training equals data-parallel Adam: odd shapes, few elements, shared and repeated modules.

There may be more ranks than elements. Neither settings nor delays before collectives change one bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerotrain.runtime as zt
from tests.support.collectives import delay_collectives
from tests.support.free_form import config, reference_outcome
from tests.support.ranks import run_ranks
from tests.support.training import Outcome, largest_difference, whole_parameters, world

pytestmark = pytest.mark.ranks


STEPS, TOLERANCE = 10, 2e-5
SHAPES = (
    ((16, 15), (15, 8)),
    ((7, 15), (15, 3)),
    ((16, 17), (17, 8)),
    ((1, 1), (1, 3)),
    ((65, 67), (67, 131)),
)
"""Shapes of layers. The last ones are divided between ranks; one rank owns each of the others."""
WIDTH = 65
UNITS = ["0", "2"]


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def shaped(sizes: tuple[tuple[int, int], ...]) -> nn.Module:
    (first, second) = sizes
    return nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second))


class FewElements(nn.Module):
    """Fewer elements than ranks: a scalar, a vector of one, nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.tensor([0.3]))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight * self.scalar + self.empty.sum()


class Shared(nn.Module):
    """One matrix in three places, one module run twice, and every way of checkpointing."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.tail = nn.Linear(WIDTH, WIDTH, bias=False)
        blocks[2].weight = self.tail.weight = blocks[0].weight
        self.blocks = nn.ModuleList(blocks)
        self.reentrant = reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[1]):
            if self.reentrant is None:
                hidden = torch.tanh(block(hidden))
            else:
                hidden = torch.tanh(checkpoint(block, hidden, use_reentrant=self.reentrant))
        result: torch.Tensor = self.tail(hidden)
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"shapes {index}": partial(shaped, sizes) for index, sizes in enumerate(SHAPES)},
    "few": FewElements,
    "shared": Shared,
    "shared, reentrant": lambda: Shared(reentrant=True),
    "shared, not reentrant": lambda: Shared(reentrant=False),
}
WIDTHS = {**{f"shapes {index}": sizes[0][0] for index, sizes in enumerate(SHAPES)}, "few": 3}


def loss(model: Any, step: int, rank: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    batch = torch.randn(3, width, generator=generator)
    # Reentrant checkpointing needs an input that requires gradients.
    output: torch.Tensor = model(batch.requires_grad_())
    return (output - 1).square().mean()


def train(name: str, stage: int, late: bool = False, steps: int = STEPS, **zero: Any) -> Outcome:
    rank, _ = world()
    model = build(name)
    settings = config(stage)
    settings["zero_optimization"].update(zero)
    units = UNITS if name.startswith("shapes") else None
    engine, *_ = zt.initialize(model=model, config=settings, unit_modules=units)
    if late:
        delay_collectives(engine, seed=rank)
    losses, norms = [], []
    for step in range(steps):
        value = loss(engine, step, rank, WIDTHS.get(name, WIDTH))
        engine.backward(value)
        norms.append(engine.step().grad_norm)
        losses.append(value.item())
    with zt.full_parameters(model):
        parameters = whole_parameters(model)
    assert engine.memory.transient_bytes == 0
    engine.close()
    return Outcome(losses, norms, parameters)


def train_all(names: tuple[str, ...], stages: tuple[int, ...]) -> list[list[Outcome]]:
    return [[train(name, stage) for stage in stages] for name in names]


@pytest.mark.parametrize(
    ("world_size", "stages", "names"),
    [(2, (0, 1, 2, 3), tuple(MODELS)), (4, (1, 2, 3), ("shapes 1", "shapes 4", "few", "shared, reentrant"))],
)
def test_parity_with_data_parallel_adam(
    world_size: int, stages: tuple[int, ...], names: tuple[str, ...]
) -> None:
    per_rank = run_ranks(world_size, train_all, names, stages)
    for index, name in enumerate(names):
        reference = reference_outcome(
            lambda name=name: build(name),  # type: ignore[misc]
            lambda model, step, rank, name=name: loss(model, step, rank, WIDTHS.get(name, WIDTH)),  # type: ignore[misc]
            world_size,
            steps=STEPS,
        )
        for stage_index, stage in enumerate(stages):
            outcomes = [ranks[index][stage_index] for ranks in per_rank]
            where = f"{name}, stage {stage}, {world_size} ranks"
            mean = np.mean([outcome.losses for outcome in outcomes], axis=0)
            assert mean == pytest.approx(reference.losses, abs=TOLERANCE), where
            assert all(largest_difference(each, reference) < TOLERANCE for each in outcomes), where
            assert np.allclose(outcomes[0].norms, reference.norms, rtol=1e-4, atol=1e-6), where


SETTINGS: tuple[dict[str, Any], ...] = (
    {"late": True},
    {"late": True, "overlap_comm": False, "stage3_prefetch_bucket_size": 0},
    {"stage3_max_live_parameters": 0},
    {"stage3_max_reuse_distance": 1_000_000, "reduce_bucket_size": 1, "allgather_bucket_size": 1},
    {"overlap_comm": False, "contiguous_gradients": False, "reduce_scatter": False},
    {"round_robin_gradients": True, "sub_group_size": 1},
)


CHECKPOINTED = ("shared", "shared, reentrant", "shared, not reentrant")


def with_settings(stages: tuple[int, ...]) -> list[tuple[str, bool]]:
    """Return, per setting and kind of checkpointing, whether weights, losses and norms stay the same."""
    found = []
    for stage in stages:
        plain_of: dict[str, Outcome] = {}
        for name in ("shapes 4", *CHECKPOINTED):
            plain = plain_of.setdefault(name, train(name, stage, steps=3))
            if name in CHECKPOINTED:
                unchecked = largest_difference(plain, plain_of["shared"])
                found.append((f"{name} against shared, {stage}", unchecked == 0.0))
            for settings in SETTINGS:
                other = train(name, stage, steps=3, **settings)
                same = (other.losses, other.norms) == (plain.losses, plain.norms)
                found.append(
                    (f"{name}, {stage}, {settings}", same and largest_difference(plain, other) == 0.0)
                )
    return found


def test_settings_delays_and_checkpointing_change_no_bit(each_transport: str) -> None:
    stages = (1, 2, 3) if each_transport == "shared" else (3,)
    for found in run_ranks(2, with_settings, stages):
        assert [where for where, same in found if not same] == []
