"""Operations of torch and of scripts on gradients give the same result at every stage as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import whole_parameters, world

pytestmark = pytest.mark.ranks

WIDTH, STEPS = 65, 2  # a unit has more elements than the smallest shard, so that every rank owns some
UNITS = ["blocks.0", "blocks.1", "blocks.2"]
Weights = dict[str, np.ndarray[Any, Any]]
Backward = Callable[[float], None]
"""Forward and backward of a new batch, whose loss is multiplied by the number."""
Outcome = tuple[list[float], Weights]
Script = Callable[[nn.Module, torch.optim.Optimizer, Backward], list[float]]
"""A step before its update; returns the numbers that the script saw."""


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
    """Clip between micro-batches: later gradients are added to the clipped ones."""
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
    """Drop a part of the gradients, also in the last micro-batch, after which no other call follows."""
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
BASIC: tuple[Script, ...] = (
    bound,
    bound_values,
    bound_by_hand,
    bound_between_micro_batches,
    dropped_by_the_model,
    set_to_none,
    a_part_dropped,
    scaled,
)
IN_BACKGROUND = {"device": "cpu", "just_in_time": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "just in time": {"offload_optimizer": IN_BACKGROUND},
    "nvme": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}
CASES = [
    *((stage, variant) for stage in range(4) for variant in ("fp32", "bf16", "just in time")),
    *((0, "fp16"), (2, "fp16"), (3, "fp16"), (3, "nvme")),
]
QUICK = [(0, "fp16"), (1, "bf16"), (2, "fp32"), (3, "just in time"), (3, "nvme")]
"""Each stage and each variant once at least."""


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def batch(number: int, rank: int, variant: str = "fp32") -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, WIDTH, generator=generator).to(DTYPES.get(variant, torch.float32))


def built() -> Net:
    torch.manual_seed(3)
    return Net()


def config(stage: int, variant: str, folder: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    further = VARIANTS[variant]
    for key in [key for key in further if key.startswith("offload")]:
        zero[key] = {**further[key], "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **{key: value for key, value in further.items() if not key.startswith("offload")},
    }


def in_a_loop_of_ones_own(script: Script, settings: dict[str, Any], variant: str) -> Outcome:
    model, optimizer = zt.shard(built(), settings, unit_modules=UNITS)
    numbers = [0]

    def backward(factor: float) -> None:
        numbers[0] += 1
        loss = model(batch(numbers[0], world()[0], variant)).float().square().mean() * factor
        optimizer.scale(loss).backward()  # type: ignore[no-untyped-call]

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


def with_engine(script: Script, settings: dict[str, Any], variant: str) -> Outcome:
    engine, optimizer, *_ = zt.initialize(model=built(), config=settings, unit_modules=UNITS)
    numbers = [0]

    def backward(factor: float) -> None:
        numbers[0] += 1
        engine.backward(engine(batch(numbers[0], world()[0], variant)).float().square().mean() * factor)

    seen: list[float] = []
    for _ in range(STEPS):
        seen += script(engine.module, optimizer, backward)
        engine.step()
    with zt.full_parameters(engine.module):
        weights = whole_parameters(engine.module)
    engine.close()
    return seen, weights


def all_scripts(stage: int, variant: str, folder: str) -> list[tuple[Outcome, Outcome]]:
    settings = config(stage, variant, folder)
    return [
        (in_a_loop_of_ones_own(script, settings, variant), with_engine(script, settings, variant))
        for script in scripts_for(variant)
    ]


def scripts_for(variant: str) -> tuple[Script, ...]:
    """Return all scripts where the stages differ most; fp16 has the engine's own loss scale."""
    if variant in ("fp32", "bf16"):
        return SCRIPTS
    return BASIC if variant == "fp16" else (*BASIC, with_a_scaler)


@cache
def reference(script: Script, world_size: int) -> Outcome:
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


@pytest.mark.parametrize(("stage", "variant"), with_slow_rows(CASES, quick=QUICK))
def test_operations_on_gradients(stage: int, variant: str, tmp_path: Path) -> None:
    is_narrow = variant in DTYPES
    for rank, found in enumerate(run_ranks(2, all_scripts, stage, variant, str(tmp_path))):
        for script, outcomes in zip(scripts_for(variant), found, strict=True):
            numbers, wanted = reference(script, 2)
            for how, (seen, weights) in zip(("shard", "initialize"), outcomes, strict=True):
                what = f"{script.__name__}, {how}, rank {rank}"
                assert seen == pytest.approx(numbers, rel=5e-2 if is_narrow else 1e-4), what
                for name, value in wanted.items():
                    close = np.allclose(weights[name], value, rtol=0, atol=2e-2 if is_narrow else 1e-5)
                    assert close, f"{what}: {name}"
