"""fp16 with a loss scale equals the same thing written out in plain torch; overflows change nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.device import DEVICE
from tests.support.ranks import RankFailed, run_ranks
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
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.state import whole

pytestmark = pytest.mark.ranks


SCALE = 256.0


@dataclass(frozen=True, kw_only=True)
class Fp16(Case):
    """A case whose configuration enables fp16."""

    fp16: dict[str, Any] = field(default_factory=lambda: {"loss_scale": SCALE}, hash=False)
    further: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further top-level entries."""

    def config(self, world_size: int) -> dict[str, Any]:
        return {**super().config(world_size), "fp16": {"enabled": True, **self.fp16}, **self.further}


CASES = tuple(
    Fp16(stage=stage, accumulation=accumulation, clip=clip)
    for stage in (0, 1, 2, 3)
    for accumulation, clip in ((1, 0.0), (2, 0.5))
)


def reference(case: Case, world_size: int) -> Outcome:
    """Train with fp16 copies of fp32 masters; add scaled fp16 gradients up in fp32 and unscale them."""
    model = case.model().to(DEVICE)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.half()
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
                (loss * SCALE / case.accumulation).backward()
                total += loss.item()
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    assert master.grad is not None
                    assert parameter.grad is not None
                    master.grad.add_(parameter.grad, alpha=1.0 / world_size)
        for master in masters:
            assert master.grad is not None
            master.grad.div_(SCALE)
        norms.append(float(nn.utils.clip_grad_norm_(masters, case.clip or float("inf"))))
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(total / case.accumulation / world_size)
    return Outcome(losses, norms, whole_parameters(model))


def train_all(cases: tuple[Case, ...]) -> list[Outcome]:
    return [train_with_engine(case) for case in cases]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fixed_scale_equals_plain_torch(world_size: int) -> None:
    for outcomes in run_ranks(world_size, train_all, CASES):
        for case, outcome in zip(CASES, outcomes, strict=True):
            expected = reference(case, world_size)
            assert outcome.norms == pytest.approx(expected.norms, rel=2e-3), case
            if world_size == 1 and not case.clip:
                assert outcome.losses == expected.losses, case
                assert largest_difference(outcome, expected) == 0.0, case
            else:
                # A weight may round to the other of two neighbouring fp16 values.
                assert outcome.losses == pytest.approx(expected.losses, abs=2e-3), case
                assert largest_difference(outcome, expected) < 2e-3, case


def state_bytes(engine: Engine) -> dict[str, bytes]:
    """Return everything in a checkpoint except the loss scale and the counts of steps and samples."""
    state = engine.checkpoint_state()
    streams = {"/".join(key): whole(stream).cpu().numpy().tobytes() for key, stream in state.streams.items()}
    changing = {"global_steps", "skipped_steps", "global_samples", "loss_scale"}
    kept = {key: value for key, value in state.scalars.items() if key not in changing}
    with zt.full_parameters(engine.module):
        weights = b"".join(p.detach().cpu().numpy().tobytes() for p in engine.module.parameters())
    return {**streams, "scalars": repr(kept).encode(), "weights": weights}


def overflowing(stage: int, folder: str) -> dict[str, Any]:
    """Train from a scale that overflows fp16 down to one that works, with a save and a resume in between."""
    rank, world_size = world()
    fp16 = {"initial_scale_power": 24, "hysteresis": 2, "loss_scale_window": 2}
    further = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}}}
    case = Fp16(stage=stage, fp16=fp16, further=further)
    engine, *_ = zt.initialize(model=case.model(), config=case.config(world_size))
    seen: dict[str, Any] = {"scales": [], "skipped": [], "unchanged": [], "norms": []}
    for step, batch in enumerate(token_batches(16, size=GLOBAL_BATCH)):
        if step == 8:
            engine.save_checkpoint(folder)
            engine, *_ = zt.initialize(model=case.model(), config=case.config(world_size))
            engine.load_checkpoint(folder)
        before = state_bytes(engine)
        engine.backward(engine(*micro_batches(batch, world_size=world_size, accumulation=1)[0][rank]))
        result = engine.step()
        seen["scales"].append(result.loss_scale)
        seen["skipped"].append(result.skipped)
        seen["norms"].append(result.grad_norm)
        seen["unchanged"].append(state_bytes(engine) == before)
    seen["updates"] = engine.optimizer.num_updates, engine.schedule.num_updates, engine.skipped_steps
    return seen


@pytest.mark.parametrize("stage", [0, 3])
def test_overflows_lower_the_scale_and_change_nothing_else(stage: int, tmp_path: Path) -> None:
    for seen in run_ranks(2, overflowing, stage, str(tmp_path)):
        skipped = seen["skipped"]
        assert skipped[0], "the first scale is meant to overflow"
        assert not all(skipped), "no scale was low enough"
        assert seen["unchanged"] == skipped
        assert seen["scales"] == expected_scales(skipped, power=24, hysteresis=2, window=2)
        good = skipped.count(False)
        assert seen["updates"] == (good, good, 16 - good)
        assert all(0.1 < norm < 100 for norm, skip in zip(seen["norms"], skipped, strict=True) if not skip)


def expected_scales(skipped: list[bool], *, power: int, hysteresis: int, window: int) -> list[float]:
    """Return the scale that each step uses, by the rules of DeepSpeed written down naively."""
    scale, left, last, used = 2.0**power, hysteresis, -1, []
    for step, overflow in enumerate(skipped):
        used.append(scale)
        if overflow:
            scale, left = (scale / 2, left) if left == 1 else (scale, left - 1)
            last = step
        elif step - last - 1 > 0 and (step - last - 1) % window == 0:
            scale, left = scale * 2, hysteresis
    return used


def stuck() -> None:
    rank, world_size = world()
    case = Fp16(stage=2, fp16={"initial_scale_power": 24, "hysteresis": 1, "min_loss_scale": 2.0**24})
    engine, *_ = zt.initialize(model=case.model(), config=case.config(world_size))
    batch = token_batches(1, size=GLOBAL_BATCH)[0]
    engine.backward(engine(*micro_batches(batch, world_size=world_size, accumulation=1)[0][rank]))
    engine.step()


def test_the_least_scale_is_an_error_on_every_rank() -> None:
    with pytest.raises(RankFailed, match=r"the gradients overflow .*fp16.raise_error_at_min_scale"):
        run_ranks(2, stuck)


def combined(stage: int) -> dict[str, Outcome]:
    """Return fp32 runs that differ in how gradients are combined."""
    ways: dict[str, dict[str, Any]] = {
        "mean": {},
        "sum": {"gradient_allreduce_op": "sum"},
        "half": {"gradient_predivide_factor": 2.0},
        "before": {"prescale_gradients": True},
        "fp16 wire": {"communication_data_type": "fp16", "prescale_gradients": True},
    }
    off = {"enabled": False}
    return {
        name: train_with_engine(Fp16(stage=stage, steps=2, fp16=off, further=way))
        for name, way in ways.items()
    }


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_combined_as_configured(stage: int) -> None:
    runs = run_ranks(2, combined, stage)[0]
    assert runs["sum"].norms[0] == 2 * runs["mean"].norms[0]
    for exact in ("half", "before"):  # powers of two
        assert largest_difference(runs[exact], runs["mean"]) == 0.0
    assert runs["fp16 wire"].norms != runs["mean"].norms
    assert runs["fp16 wire"].norms == pytest.approx(runs["mean"].norms, rel=1e-2)


def unchecked() -> tuple[bool, bool]:
    case = Case(dtype="bf16")
    config = {**case.config(1), "bf16": {"enabled": True, "check_grad_overflow": False}}
    model = case.model()
    engine, *_ = zt.initialize(model=model, config=config)
    batch = token_batches(1, size=GLOBAL_BATCH)[0]
    engine.backward(engine(*batch) * float("nan"))
    skipped = engine.step().skipped
    return skipped, bool(np.isfinite(whole_parameters(model)["head.weight"]).all())


def test_bf16_without_the_check_applies_what_came() -> None:
    assert run_ranks(1, unchecked) == [(False, False)]


def dtype_seen(auto_cast: bool | None) -> str:
    class Probe(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.seen = value.dtype
            return super().forward(value.to(self.weight.dtype))

    model = Probe(2, 2)
    fp16 = {"enabled": True} | ({} if auto_cast is None else {"auto_cast": auto_cast})
    engine, *_ = zt.initialize(model=model, config={"train_batch_size": 1, "fp16": fp16})
    engine(torch.ones(1, 2))
    return str(model.seen)


def test_auto_cast_decides_about_inputs() -> None:
    seen = [dtype_seen(value) for value in (None, True, False)]
    assert seen == ["torch.float32", "torch.float16", "torch.float32"]


def own_backward(stage: int) -> tuple[float, float]:
    """Return norms of a step whose loss was scaled by hand, and of one that the engine scaled."""
    rank, world_size = world()
    engine, *_ = zt.initialize(model=Fp16().model(), config=Fp16(stage=stage).config(world_size))
    batch = micro_batches(token_batches(1, size=GLOBAL_BATCH)[0], world_size=world_size, accumulation=1)[0][
        rank
    ]
    with pytest.raises(RuntimeError, match="fp16 gradients need a scaled loss"):
        engine(*batch).backward()
    engine.scale(engine(*batch)).backward()  # type: ignore[no-untyped-call]
    mine = engine.step().grad_norm
    other, *_ = zt.initialize(model=Fp16().model(), config=Fp16(stage=stage).config(world_size))
    other.backward(other(*batch))
    return mine, other.step().grad_norm


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_of_ones_own_needs_the_scale(stage: int) -> None:
    for mine, engines in run_ranks(2, own_backward, stage):
        assert mine == engines
