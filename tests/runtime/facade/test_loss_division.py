"""The division of a bf16 loss by the accumulation steps causes no rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import RankFailed, run_ranks
from tests.support.training import world

SIZE = 64


class Mean(nn.Module):
    """A module whose gradient is exactly `x` times the loss's: 2**n elements, and inputs of few digits."""

    def __init__(self, *, upcast: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))
        self.upcast = upcast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = (self.weight * x).sum()
        return product.float() if self.upcast else product


def inputs(rank: int) -> torch.Tensor:
    return ((torch.arange(SIZE) + rank) % 16 - 7.0).to(torch.bfloat16)


def config(stage: int, accumulation: int, *, clip: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more},
        "bf16": {"enabled": True},
    }


def started(stage: int, accumulation: int, *, upcast: bool = False, **more: Any) -> Any:
    engine, *_ = zt.initialize(model=Mean(upcast=upcast), config=config(stage, accumulation, **more))
    return engine


def update_of(engine: Any) -> list[float]:
    """Return the update of the fp32 masters, which began as zeros, at rate 1."""
    return [-value for value in zt.get_full_fp32(engine.module.weight).tolist()]


def expected(world_size: int) -> list[float]:
    rows = torch.stack([inputs(rank).float() for rank in range(world_size)])
    return [float(value) for value in rows.mean(0)]


def equal_micro_batches(stage: int, accumulation: int, more: dict[str, Any]) -> tuple[list[float], float]:
    engine = started(stage, accumulation, **more)
    for _ in range(accumulation):
        engine.backward(engine(inputs(world()[0])))
        norm = engine.step().grad_norm
    return update_of(engine), norm


@pytest.mark.unit
@pytest.mark.parametrize("accumulation", [1, 2, 3, 5, 6, 7, 12])
def test_equal_micro_batches_give_the_gradient_of_one(accumulation: int) -> None:
    update, norm = equal_micro_batches(0, accumulation, {})
    assert update == pytest.approx(expected(1), rel=1e-6)
    assert norm == pytest.approx(float(torch.tensor(expected(1)).norm()), rel=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_at_every_stage_and_with_offload(stage: int) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}}
    for more in ({}, offload, {"overlap_comm": True}):
        for update, norm in run_ranks(2, equal_micro_batches, stage, 3, more):
            assert update == pytest.approx(expected(2), rel=1e-6)
            assert norm == pytest.approx(float(torch.tensor(expected(2)).norm()), rel=1e-6)


@pytest.mark.unit
def test_the_norm_that_is_clipped_is_the_true_one() -> None:
    engine = started(0, 3, clip=1.0)
    for _ in range(3):
        engine.backward(engine(inputs(0)))
        engine.step()
    assert float(torch.tensor(update_of(engine)).norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.unit
def test_gradients_are_read_and_written_as_divided() -> None:
    engine = started(1, 3)
    weight = engine.module.weight
    for count in (1, 2):
        engine.backward(engine(inputs(0)))
        read = zt.get_full_grad(weight).tolist()
        assert read == pytest.approx([value * count / 3 for value in expected(1)], rel=1e-6)
        engine.step()
    zt.set_full_grad(weight, torch.full((SIZE,), 2.0))
    engine.backward(engine(inputs(0)))
    engine.step()
    assert update_of(engine) == pytest.approx([2.0 + value / 3 for value in expected(1)], rel=1e-5)


@pytest.mark.unit
def test_losses_of_several_kinds_in_one_step() -> None:
    """Losses are bf16, fp32, undivided, or from a backward call of the script that divides by itself."""
    engine = started(0, 3)
    x = inputs(0)
    engine.backward(engine(x))
    engine.step()
    engine.backward(engine(x).float())
    engine.backward(engine(x), scale_wrt_gas=False)
    engine.step()
    (engine(x).float() / 4).backward()
    engine.step()
    assert update_of(engine) == pytest.approx(
        [value * (2 / 3 + 1 + 1 / 4) for value in expected(1)], rel=1e-5
    )


@pytest.mark.unit
def test_a_step_that_was_dropped_leaves_nothing() -> None:
    engine = started(0, 3)
    engine.backward(engine(inputs(0)))
    engine.zero_grad()
    engine.step()
    for _ in range(2):
        engine.backward(engine(inputs(0)).float())
        engine.step()
    third = torch.tensor(1 / 3).bfloat16() * inputs(0)  # as autograd divides, where the step began in fp32
    assert update_of(engine) == (2 * third.float()).tolist()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("upcast", "accumulation"), [(True, 3), (False, 4)], ids=["fp32 loss", "power of two"]
)
def test_other_losses_are_divided_as_ever(upcast: bool, accumulation: int) -> None:
    """The bits are equal: the division is torch's, in the loss's dtype."""
    engine = started(0, accumulation, upcast=upcast)
    plain = Mean(upcast=upcast).bfloat16()
    total = torch.zeros(SIZE)
    for step in range(accumulation):
        x = inputs(step)
        engine.backward(engine(x))
        engine.step()
        (plain(x) / accumulation).backward()
        assert plain.weight.grad is not None
        total += plain.weight.grad.float()
        plain.weight.grad = None
    assert update_of(engine) == total.tolist()


def different_dtypes() -> None:
    engine = started(2, 3)
    for _ in range(3):
        loss = engine(inputs(0))
        engine.backward(loss.float() if world()[0] else loss)
        engine.step()


@pytest.mark.ranks
def test_ranks_with_losses_of_different_dtypes_are_refused() -> None:
    with pytest.raises(RankFailed, match="a bfloat16 loss and others with one of another dtype"):
        run_ranks(2, different_dtypes)
