"""Lamb over shards equals Lamb written out parameter by parameter, with one exchange of norms per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.tiny_models import token_batches
from tests.support.training import (
    GLOBAL_BATCH,
    Case,
    Outcome,
    largest_difference,
    micro_batches,
    train_with_engine,
    whole_parameters,
    world,
)

pytestmark = pytest.mark.ranks


PARAMS = {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}


@dataclass(frozen=True, kw_only=True)
class LambCase(Case):
    optimizer: str = "Lamb"
    params: dict[str, Any] = field(default_factory=dict, hash=False)

    def config(self, world_size: int) -> dict[str, Any]:
        given = {**super().config(world_size)}
        return {**given, "optimizer": {"type": "Lamb", "params": {**PARAMS, **self.params}}}


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"bias_correction": False, "eps_inside_sqrt": True, "max_coeff": 0.3, "min_coeff": 0.2},
)


def lamb_reference(case: LambCase, world_size: int) -> Outcome:
    """Train with Lamb per parameter: the formulas of the paper, DeepSpeed's bounds and bias correction."""
    options: dict[str, Any] = {
        "bias_correction": True,
        "eps_inside_sqrt": False,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
        **PARAMS,
        **case.params,
    }
    (beta1, beta2), eps = options["betas"], options["eps"]
    model = case.model()
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    losses, norms = [], []
    for step, batch in enumerate(token_batches(case.steps, size=GLOBAL_BATCH), start=1):
        model.zero_grad()
        total = 0.0
        for part in micro_batches(batch, world_size=world_size, accumulation=1)[0]:
            loss = model(*part)
            (loss / world_size).backward()
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf"))))
        rate = options["lr"]
        if options["bias_correction"]:
            rate *= (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        with torch.no_grad():
            for parameter, (first, second) in moments.items():
                assert parameter.grad is not None
                first.mul_(beta1).add_(parameter.grad * (1 - beta1))
                second.mul_(beta2).add_(parameter.grad**2 * (1 - beta2))
                root = (second + eps).sqrt() if options["eps_inside_sqrt"] else second.sqrt() + eps
                update = first / root + options["weight_decay"] * parameter
                sizes = float(parameter.norm()), float(update.norm())
                ratio = sizes[0] / sizes[1] if all(sizes) else 1.0
                ratio = min(max(ratio, options["min_coeff"]), options["max_coeff"]) if all(sizes) else 1.0
                parameter.sub_(rate * ratio * update)
        losses.append(total / world_size)
    return Outcome(losses, norms, whole_parameters(model))


def train_all(cases: tuple[LambCase, ...]) -> list[Outcome]:
    return [train_with_engine(case) for case in cases]


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_stage_equals_the_formula(world_size: int) -> None:
    cases = tuple(
        LambCase(stage=stage, params=params, clip=clip)
        for params, clip in zip(VARIANTS, (0.0, 0.5), strict=True)
        for stage in (0, 1, 2, 3)
    )
    outcomes = run_ranks(world_size, train_all, cases)[0]
    for case, outcome in zip(cases, outcomes, strict=True):
        expected = lamb_reference(case, world_size)
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5), case
        assert largest_difference(outcome, expected) < 2e-5, case
    for variant in range(len(VARIANTS)):
        first, *others = outcomes[4 * variant : 4 * variant + 4]
        assert all(largest_difference(first, other) == 0.0 for other in others), "stages differ"


def collectives_of_a_step(optimizer: str) -> int:
    case = LambCase(stage=3) if optimizer == "Lamb" else Case(stage=3, optimizer=optimizer)
    rank, world_size = world()
    engine, *_ = zt.initialize(model=case.model(), config=case.config(world_size))
    batch = token_batches(1, size=GLOBAL_BATCH)[0]
    engine.backward(engine(*micro_batches(batch, world_size=world_size, accumulation=1)[0][rank]))
    engine.comm.timings.clear()
    engine.step()
    return len(engine.comm.timings)


def test_one_exchange_makes_all_norms_whole() -> None:
    lamb, adam = (run_ranks(2, collectives_of_a_step, name)[0] for name in ("Lamb", "AdamW"))
    assert lamb == adam + 1
