"""What torch's functions and scripts do with gradients gives at every stage what it gives in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.training import whole_parameters, world

pytestmark = pytest.mark.ranks

WIDTH, STEPS = 65, 2  # a unit has more elements than the smallest shard, so that every rank owns some
UNITS = ["blocks.0", "blocks.1", "blocks.2"]
Weights = dict[str, np.ndarray[Any, Any]]
Backward = Callable[[float], None]
"""Forward and backward of a new batch, whose loss is multiplied by the number."""
Script = Callable[[nn.Module, torch.optim.Optimizer, Backward], list[float]]
"""All of a step before its update; the numbers that the script saw."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden * self.scale


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def bound(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1.0)
    return [float(clip_grad_norm_(model.parameters(), 0.01))]


def bound_loosely(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1.0)
    return [float(nn.utils.clip_grad_norm_(list(model.parameters()), 1e6, foreach=False))]


def bound_by_keywords(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1.0)
    generator = (parameter for parameter in model.parameters())
    return [float(clip_grad_norm_(parameters=generator, max_norm=0.01, norm_type=1, error_if_nonfinite=True))]


def bound_by_the_largest(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1.0)
    return [float(clip_grad_norm_(model.parameters(), 1e-4, float("inf")))]


def bound_by_cubes(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1.0)
    return [float(clip_grad_norm_(model.parameters(), 1e-3, 3.0))]


def bound_a_part(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1.0)
    return [
        float(clip_grad_norm_(model.get_submodule("blocks.1").parameters(), 0.01)),
        float(clip_grad_norm_(model.get_parameter("blocks.0.weight"), 0.02)),
    ]


def bound_twice(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1.0)
    return [float(clip_grad_norm_(model.parameters(), limit)) for limit in (0.02, 0.01)]


def bound_values(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1.0)
    clip_grad_value_(model.parameters(), 1e-4)
    return [float(clip_grad_norm_(model.parameters(), 1e6))]


def bound_by_hand(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1.0)
    norm = get_total_norm(gradients(model))
    clip_grads_with_norm_(model.parameters(), 0.01, norm)
    return [float(norm), float(get_total_norm([each.detach() for each in gradients(model)], 3.0))]


def bound_by_the_optimizer(model: nn.Module, optimizer: Any, backward: Backward) -> list[float]:
    backward(1.0)
    if hasattr(optimizer, "clip_grad_norm_"):
        return [float(optimizer.clip_grad_norm_(0.01))]
    return [float(clip_grad_norm_(model.parameters(), 0.01))]


def bound_between_micro_batches(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    """What comes after a look at the norm is added to what was bounded."""
    backward(1.0)
    first = float(clip_grad_norm_(model.parameters(), 0.01))
    backward(0.5)
    return [first, float(clip_grad_norm_(model.parameters(), 0.01))]


def dropped_by_the_model(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1e6)
    model.zero_grad()
    backward(1.0)
    return []


def zeroed_by_the_model(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1e6)
    model.zero_grad(set_to_none=False)
    backward(1.0)
    return []


def dropped_by_the_optimizer(_: nn.Module, optimizer: Any, backward: Backward) -> list[float]:
    backward(1e6)
    optimizer.zero_grad()
    backward(1.0)
    return []


def set_to_none(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1e6)
    for parameter in model.parameters():
        parameter.grad = None
    backward(1.0)
    return []


def zeroed(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1e6)
    for gradient in gradients(model):
        gradient.zero_()
    backward(1.0)
    return []


def a_part_dropped(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    """Of the last micro-batch, too: nothing follows that would look."""
    backward(1.0)
    model.get_submodule("blocks.0").zero_grad()
    backward(0.5)
    model.get_submodule("blocks.2").zero_grad(set_to_none=False)
    return [float(clip_grad_norm_(model.parameters(), 1e6))]


def scaled(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
            parameter.grad /= 2.0
            parameter.grad.data.div_(torch.tensor(3.0))
    return []


def scaled_together(model: nn.Module, _: Any, backward: Backward) -> list[float]:
    backward(1.0)
    torch._foreach_mul_(gradients(model), 0.25)
    torch._foreach_div_(gradients(model), [2.0] * len(gradients(model)))
    return []


def with_a_scaler(model: nn.Module, optimizer: Any, backward: Backward) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    one = scaler.scale(torch.ones(()))
    backward(float(one))
    scaler.unscale_(optimizer)
    norm = float(clip_grad_norm_(model.parameters(), 0.01))
    scaler.update()
    return [norm, scaler.get_scale()]


SCRIPTS: tuple[Script, ...] = (
    bound,
    bound_loosely,
    bound_by_keywords,
    bound_by_the_largest,
    bound_by_cubes,
    bound_a_part,
    bound_twice,
    bound_values,
    bound_by_hand,
    bound_by_the_optimizer,
    bound_between_micro_batches,
    dropped_by_the_model,
    zeroed_by_the_model,
    dropped_by_the_optimizer,
    set_to_none,
    zeroed,
    a_part_dropped,
    scaled,
    scaled_together,
    with_a_scaler,
)
CASES = [(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def batch(number: int, rank: int, dtype: str = "fp32") -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, WIDTH, generator=generator).to(DTYPES[dtype])


def built() -> Net:
    torch.manual_seed(3)
    return Net()


def config(stage: int, dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }


def in_a_loop_of_ones_own(script: Script, stage: int, dtype: str) -> tuple[list[float], Weights]:
    model, optimizer = zt.shard(built(), config(stage, dtype), unit_modules=UNITS)
    numbers = [0]

    def backward(factor: float) -> None:
        numbers[0] += 1
        (model(batch(numbers[0], world()[0], dtype)).float().square().mean() * factor).backward()

    seen: list[float] = []
    for _ in range(STEPS):
        seen += script(model, optimizer, backward)
        optimizer.step()
        optimizer.zero_grad()
    with zt.full_parameters(model):
        weights = whole_parameters(model)
    assert optimizer.engine.memory.transient_bytes == 0, script.__name__
    optimizer.engine.close()
    return seen, weights


def with_engine(script: Script, stage: int, dtype: str) -> tuple[list[float], Weights]:
    engine, optimizer, *_ = zt.initialize(model=built(), config=config(stage, dtype), unit_modules=UNITS)
    numbers = [0]

    def backward(factor: float) -> None:
        numbers[0] += 1
        engine.backward(engine(batch(numbers[0], world()[0], dtype)).float().square().mean() * factor)

    seen: list[float] = []
    for _ in range(STEPS):
        seen += script(engine.module, optimizer, backward)
        engine.step()
    with zt.full_parameters(engine.module):
        weights = whole_parameters(engine.module)
    engine.close()
    return seen, weights


def all_scripts(stage: int, dtype: str) -> list[tuple[list[float], Weights]]:
    found = []
    for script in SCRIPTS:
        found.append(in_a_loop_of_ones_own(script, stage, dtype))
        found.append(with_engine(script, stage, dtype))
    return found


def reference(script: Script, world_size: int) -> tuple[list[float], Weights]:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = [0]

    def backward(factor: float) -> None:
        numbers[0] += 1
        for rank in range(world_size):
            loss = model(batch(numbers[0], rank)).square().mean() * factor / world_size
            loss.backward()

    seen: list[float] = []
    for _ in range(STEPS):
        seen += script(model, optimizer, backward)
        optimizer.step()
        optimizer.zero_grad()
    return seen, whole_parameters(model)


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_operations_on_gradients(stage: int, dtype: str) -> None:
    expected = [reference(script, 2) for script in SCRIPTS]
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    for rank, found in enumerate(run_ranks(2, all_scripts, stage, dtype)):
        for index, (seen, weights) in enumerate(found):
            script, (numbers, wanted) = SCRIPTS[index // 2], expected[index // 2]
            what = f"{script.__name__}, {'shard' if index % 2 == 0 else 'initialize'}, rank {rank}"
            assert seen == pytest.approx(numbers, rel=1e-4 if dtype == "fp32" else 5e-2), what
            for name, value in wanted.items():
                assert np.allclose(weights[name], value, rtol=0, atol=tolerance), f"{what}: {name}"
