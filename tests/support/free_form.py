"""Comparison of the engine with plain torch for any model: a test gives a builder and a loss function.

The loss function is called as `loss(model, step, rank)`. The reference calls it for every rank in turn with
the plain model; the engine's ranks call it once each with the engine in place of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.training import Outcome, largest_difference, whole_parameters, world

Build = Callable[[], nn.Module]
Loss = Callable[[Any, int, int], torch.Tensor]
LR, EPS, STEPS = 1e-2, 1e-4, 3


def config(stage: int, **extra: Any) -> dict[str, Any]:
    """Return a configuration without persistent units, so that stage 3 shards everything."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1, "eps": EPS}},
        **extra,
    }


def engine_outcome(
    build: Build, loss: Loss, stage: int, unit_modules: Sequence[str] | None, extra: dict[str, Any]
) -> Outcome:
    """Train with the engine on the calling ranks."""
    torch.manual_seed(3)
    model = build()
    engine, *_ = zt.initialize(model=model, config=config(stage, **extra), unit_modules=unit_modules)
    rank, world_size = world()
    losses, norms = [], []
    for step in range(STEPS):
        value = loss(engine, step, rank)
        engine.backward(value)
        norms.append(engine.step().grad_norm)
        losses.append(sum(row[0] for row in engine.comm.gather_record([value.item()])) / world_size)
    with zt.full_parameters(model):
        parameters = whole_parameters(model)
    assert engine.memory.transient_bytes == 0, "something was left gathered"
    engine.close()
    return Outcome(losses, norms, parameters)


def reference_outcome(
    build: Build, loss: Loss, world_size: int, *, steps: int = STEPS, clip: float = 0.0
) -> Outcome:
    """Train with plain torch. Parameters without a gradient get a zero one, as they do in the engine."""
    torch.manual_seed(3)
    model = build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.1, eps=EPS, foreach=False, fused=False)
    losses, norms = [], []
    for step in range(steps):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        for rank in range(world_size):
            value = loss(model, step, rank)
            (value / world_size).backward()  # type: ignore[no-untyped-call]
            total += value.item()
        norms.append(float(nn.utils.clip_grad_norm_(trained, clip or float("inf"))))
        optimizer.step()
        losses.append(total / world_size)
    return Outcome(losses, norms, whole_parameters(model))


def check_equal(
    build: Build,
    loss: Loss,
    *,
    world_size: int = 2,
    stages: Sequence[int] = (1, 2, 3),
    unit_modules: Sequence[str] | None = None,
    tolerance: float = 1e-5,
    clip: float = 0.0,
) -> None:
    """Check that every stage trains as plain torch does."""
    reference = reference_outcome(build, loss, world_size, clip=clip)
    assert np.isfinite(reference.losses).all()
    extra = {"gradient_clipping": clip}
    for stage in stages:
        for outcome in run_ranks(world_size, engine_outcome, build, loss, stage, unit_modules, extra):
            assert np.allclose(outcome.losses, reference.losses, rtol=0, atol=tolerance), f"stage {stage}"
            assert np.allclose(outcome.norms, reference.norms, rtol=1e-4, atol=1e-6), f"stage {stage}"
            difference = largest_difference(outcome, reference)
            assert difference < tolerance, f"stage {stage}: weights differ by {difference}"
