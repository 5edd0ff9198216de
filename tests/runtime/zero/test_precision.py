"""bf16 compute with fp32 masters and fp32 accumulation equals the same thing written out in plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import zerotrain.runtime as zt
from tests.support.device import DEVICE
from tests.support.ranks import run_ranks
from tests.support.tiny_models import token_batches
from tests.support.training import (
    EPS,
    GLOBAL_BATCH,
    LR,
    WEIGHT_DECAY,
    Case,
    Outcome,
    largest_difference,
    micro_batches,
    train_with_engine,
    whole_parameters,
    world,
)
from zerotrain.runtime.zero.state import MASTER

pytestmark = pytest.mark.ranks


CASES = tuple(
    Case(stage=stage, dtype="bf16", accumulation=accumulation, tied=tied)
    for stage in (0, 1, 2, 3)
    for accumulation, tied in ((1, False), (2, True))
)


def reference(case: Case, world_size: int) -> Outcome:
    """Train with bf16 copies of fp32 masters; each micro-batch's bf16 gradient is added up in fp32."""
    model = case.model().to(DEVICE)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS, foreach=False)
    losses, norms = [], []
    for batch in token_batches(case.steps, size=GLOBAL_BATCH):
        for master in masters:
            master.grad = torch.zeros_like(master)
        total = 0.0
        for parts in micro_batches(batch, world_size=world_size, accumulation=case.accumulation):
            for part in parts:
                model.zero_grad()
                loss = model(*part)
                (loss / case.accumulation).backward()
                total += loss.item()
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    assert master.grad is not None
                    assert parameter.grad is not None
                    master.grad.add_(parameter.grad, alpha=1.0 / world_size)
        norms.append(float(torch.stack([m.grad.norm() for m in masters if m.grad is not None]).norm()))
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(total / case.accumulation / world_size)
    return Outcome(losses, norms, whole_parameters(model))


def train_all(cases: tuple[Case, ...]) -> list[Outcome]:
    return [train_with_engine(case) for case in cases]


@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_with_fp32_masters(world_size: int) -> None:
    for outcomes in run_ranks(world_size, train_all, CASES):
        for case, outcome in zip(CASES, outcomes, strict=True):
            expected = reference(case, world_size)
            if world_size == 1:
                assert outcome.losses == expected.losses, case
                assert largest_difference(outcome, expected) == 0.0, case
            else:
                # The sums are fp32 on both sides and differ in the last bit at most: a weight may then round
                # to the other of two neighbouring bf16 values, which are 2**-8 of the weight apart.
                assert outcome.losses == pytest.approx(expected.losses, abs=2e-3), case
                for name, value in expected.parameters.items():
                    apart = np.abs(outcome.parameters[name] - value)
                    assert (apart <= np.abs(value) * 2**-7 + 1e-6).all(), f"{case}: {name}"
                    assert (apart == 0).mean() > 0.98, f"{case}: {name}"


def dtypes(stage: int) -> dict[str, Any]:
    case = Case(stage=stage, dtype="bf16")
    model = case.model()
    engine, *_ = zt.initialize(model=model, config=case.config(world()[1]))
    state = engine.checkpoint_state()
    before = model.get_parameter("blocks.0.up.weight").dtype
    started_from = case.model().get_parameter("blocks.0.up.weight").detach()
    unit, segment = state.layout.find("blocks.0.up.weight")
    low, high = state.layout.shard_range(unit, state.rank)
    start, stop = max(low, segment.start), min(high, segment.stop)
    master = state.streams[unit.name, MASTER].read(start - low, stop - low)
    wanted = started_from.flatten()[start - segment.start : stop - segment.start]
    return {
        "parameter": str(before),
        "streams": sorted({(kind, str(tensor.dtype)) for (_, kind), tensor in state.streams.items()}),
        "masters keep fp32 bits": torch.equal(master.cpu(), wanted),
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_masters_start_from_the_values_before_rounding(stage: int) -> None:
    for seen in run_ranks(2, dtypes, stage):
        assert seen["parameter"] == "torch.bfloat16"
        assert seen["streams"] == [(kind, "torch.float32") for kind in ("exp_avg", "exp_avg_sq", "master")]
        assert seen["masters keep fp32 bits"]


def inputs_are_cast() -> list[str]:
    model = torch.nn.Linear(4, 4)
    seen: list[str] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(str(args[0].dtype)))
    for bf16 in ({"enabled": True}, {"enabled": True, "auto_cast": True}):
        engine, *_ = zt.initialize(model=model, config={"train_batch_size": 1, "bf16": bf16})
        engine(torch.ones(1, 4, dtype=torch.float32 if "auto_cast" in bf16 else torch.bfloat16))
        engine.close()
    return seen


def test_floating_inputs_take_the_compute_dtype_where_asked() -> None:
    assert run_ranks(1, inputs_are_cast) == [["torch.bfloat16", "torch.bfloat16"]]


def narrow_wire(dtype: str) -> Outcome:
    """Train in fp32 with gradients that are sent as bf16."""

    class Narrow(Case):
        def config(self, world_size: int) -> dict[str, Any]:
            return {**super().config(world_size), "communication_data_type": dtype}

    return train_with_engine(Narrow(stage=2))


def test_gradients_may_travel_narrower_than_they_are_computed() -> None:
    wide, narrow = run_ranks(2, narrow_wire, "fp32")[0], run_ranks(2, narrow_wire, "bf16")[0]
    assert narrow.norms != wide.norms
    assert narrow.norms == pytest.approx(wide.norms, rel=2e-2)
