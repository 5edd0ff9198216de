"""Muon over shards equals torch.optim.Muon for hidden matrices, with torch's AdamW for the rest, at every
stage; tiers and numbers of ranks have the same bits."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.tiny_models import TinyGPT, token_batches
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
from zerotrain.runtime.engine import Engine

pytestmark = pytest.mark.ranks


PARAMS = {"lr": 5e-4, "adam_lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1, "momentum": 0.9, "torch_adam": True}
STEPS = 20


@dataclass(frozen=True, kw_only=True)
class MuonCase(Case):
    optimizer: str = "Muon"
    steps: int = STEPS
    params: dict[str, Any] = field(default_factory=dict, hash=False)

    def config(self, world_size: int) -> dict[str, Any]:
        given = super().config(world_size)
        return {**given, "optimizer": {"type": "Muon", "params": {**PARAMS, **self.params}}}


def is_hidden(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and name.startswith("blocks.")


def torch_optimizers(params: dict[str, Any], values: dict[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers of the matrices and of the rest."""
    given = {**PARAMS, **params}
    hidden = [value for name, value in values.items() if is_hidden(name, value)]
    rest = [value for name, value in values.items() if not is_hidden(name, value)]
    return [
        torch.optim.Muon(
            hidden,
            lr=given["lr"],
            weight_decay=given["weight_decay"],
            momentum=given["momentum"],
            nesterov=given.get("nesterov", True),
            adjust_lr_fn=given.get("adjust_lr_fn"),
        ),
        torch.optim.AdamW(
            rest, lr=given["adam_lr"], weight_decay=given["weight_decay"], eps=given["eps"], foreach=False
        ),
    ]


def muon_reference(case: MuonCase, world_size: int) -> Outcome:
    """Train with torch in one process; in bf16 with fp32 masters beside the model."""
    model = case.model()
    masters: dict[str, torch.Tensor] = {}
    for name, value in model.named_parameters():
        masters[name] = value.detach().clone()
    if case.dtype == "bf16":
        model.bfloat16()
    optimizers = torch_optimizers(case.params, masters)
    losses, norms = [], []
    for batch in token_batches(case.steps, size=GLOBAL_BATCH):
        total, sums = 0.0, {name: torch.zeros_like(value) for name, value in masters.items()}
        for parts in micro_batches(batch, world_size=world_size, accumulation=case.accumulation):
            for part in parts:
                model.zero_grad()
                loss = model(*part)
                (loss / case.accumulation).backward()
                total += loss.item()
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    sums[name] += parameter.grad.float() / world_size
        for name, master in masters.items():
            master.grad = sums[name]
        norms.append(float(nn.utils.clip_grad_norm_(masters.values(), case.clip or float("inf"))))
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
        losses.append(total / case.accumulation / world_size)
    return Outcome(losses, norms, whole_parameters(model))


def train_all(cases: tuple[Case, ...]) -> list[Outcome]:
    return [train_with_engine(case) for case in cases]


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {
        "clip": 0.5,
        "accumulation": 2,
        "params": {"lr": 1e-4, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    },
)


@pytest.mark.parametrize("variant", VARIANTS, ids=("plain", "clipped"))
@pytest.mark.parametrize("world_size", with_slow_rows([1, 2], quick=[2]))
def test_every_stage_equals_torch(world_size: int, variant: dict[str, Any]) -> None:
    cases = tuple(MuonCase(stage=stage, **variant) for stage in (0, 1, 2, 3))
    outcomes = run_ranks(world_size, train_all, cases)[0]
    expected = muon_reference(cases[0], world_size)
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5), case
        assert largest_difference(outcome, expected) < 1e-5, case


def test_bf16_equals_torch_with_fp32_masters() -> None:
    cases = tuple(MuonCase(stage=stage, dtype="bf16") for stage in (0, 1, 3))
    expected = muon_reference(cases[0], 1)
    for case, outcome in zip(cases, run_ranks(1, train_all, cases)[0], strict=True):
        assert largest_difference(outcome, expected) == 0.0, case


# --- tiers

TIERS: tuple[dict[str, Any], ...] = (
    {},
    {"device": "cpu"},
    {"device": "cpu", "just_in_time": True},
    {"device": "nvme"},
    {"device": "nvme", "just_in_time": False},
    {"device": "nvme", "ratio": 0.5},
)


def train_in_tiers(stage: int, dtype: str) -> list[Outcome]:
    outcomes = []
    for tier in TIERS:
        with tempfile.TemporaryDirectory() as folder:
            path = {"nvme_path": folder} if tier.get("device") == "nvme" else {}
            extra = {"offload_optimizer": {**tier, **path}} if tier else {}
            case = MuonCase(
                stage=stage, dtype=dtype, steps=5, clip=0.5, params={"torch_adam": False}, extra=extra
            )
            outcomes.append(train_with_engine(case))
    return outcomes


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype"),
    with_slow_rows([(1, 1, "fp32"), (2, 2, "bf16"), (2, 3, "bf16")], quick=[(1, 1, "fp32"), (2, 3, "bf16")]),
)
def test_tiers_have_the_same_bits(world_size: int, stage: int, dtype: str) -> None:
    first, *others = run_ranks(world_size, train_in_tiers, stage, dtype)[0]
    moved = {name: value for name, value in first.parameters.items() if name.startswith("blocks.")}
    initial = whole_parameters(MuonCase(stage=stage).model())
    assert all((value != initial[name]).any() for name, value in moved.items() if value.ndim == 2)
    for tier, outcome in zip(TIERS[1:], others, strict=True):
        assert largest_difference(first, outcome) == 0.0, tier


# --- numbers of ranks: all ranks train on the same samples, whose mean over 1, 2 or 4 ranks is exact


def start(stage: int, **params: Any) -> Engine:
    torch.manual_seed(7)
    config = MuonCase(stage=stage, params=params).config(world()[1])
    return zt.initialize(model=TinyGPT(), config={**config, "train_batch_size": 2 * world()[1]})[0]


def train_alike(engine: Engine, steps: int) -> dict[str, np.ndarray[Any, Any]]:
    for batch in token_batches(engine.global_steps + steps, size=2)[engine.global_steps :]:
        engine.backward(engine(*batch))
        engine.step()
    with zt.full_parameters(engine.module):
        return whole_parameters(engine.module)


def save_and_go_on(folder: str, stage: int) -> dict[str, np.ndarray[Any, Any]]:
    engine = start(stage)
    train_alike(engine, 3)
    engine.save_checkpoint(folder, "x")
    return train_alike(engine, 3)


def resume(folder: str, stage: int) -> dict[str, np.ndarray[Any, Any]]:
    engine = start(stage)
    engine.load_checkpoint(folder, "x")
    return train_alike(engine, 3)


def test_resumes_on_other_numbers_of_ranks_have_the_same_bits() -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = run_ranks(2, save_and_go_on, folder, 3)[0]
        for ranks, stage in ((1, 3), (4, 3), (4, 1)):
            found = run_ranks(ranks, resume, folder, stage)[0]
            assert found.keys() == expected.keys()
            different = [name for name, value in found.items() if (value != expected[name]).any()]
            assert not different, (stage, ranks)


# --- skipped steps


def skip_a_step() -> tuple[int, float, list[str]]:
    torch.manual_seed(7)
    model = TinyGPT()
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Muon", "params": PARAMS},
    }
    engine, *_ = zt.initialize(model=model, config=config)
    rank, world_size = world()
    batch = micro_batches(token_batches(1, size=GLOBAL_BATCH)[0], world_size=world_size, accumulation=1)[0]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.backward(engine(*batch[rank]))
    engine.step()
    changed = [name for name, value in model.named_parameters() if not torch.equal(value, before[name])]
    states = engine.zero_optimizer.states.values()
    momenta = sum(float(each.read(kind).abs().sum()) for each in states for kind in each.kinds)
    return engine.skipped_steps, momenta, changed


def test_a_skipped_step_changes_nothing() -> None:
    assert run_ranks(2, skip_a_step)[0] == (1, 0.0, [])


# --- groups


def parameters_of(engine: Engine, *, use_muon: bool) -> set[str]:
    groups = engine.zero_optimizer.param_groups
    names = {id(value): name for name, value in engine.module.named_parameters()}
    return {
        names[id(value)] for group in groups if group["use_muon"] == use_muon for value in group["params"]
    }


def test_hidden_matrices_are_orthogonalised_and_groups_override_it() -> None:
    model = TinyGPT()
    hidden = {name for name, value in model.named_parameters() if is_hidden(name, value)}
    engine = start(1, muon_lr=0.5, lr=0.25)
    assert parameters_of(engine, use_muon=True) == hidden
    assert [group["lr"] for group in engine.zero_optimizer.param_groups] == [0.5, 1e-3]

    model = TinyGPT()
    model.blocks[0].qkv.weight.use_muon = False  # type: ignore[union-attr]
    groups: list[dict[str, Any]] = [
        {"params": [model.head.weight], "use_muon": True, "lr": 0.125},
        {"params": [value for name, value in model.named_parameters() if name != "head.weight"]},
    ]
    config = MuonCase().config(1)
    engine, *_ = zt.initialize(model=model, config=config, model_parameters=groups)
    assert parameters_of(engine, use_muon=True) == hidden - {"blocks.0.qkv.weight"} | {"head.weight"}
    assert [group["lr"] for group in engine.zero_optimizer.param_groups] == [0.125, 5e-4, 1e-3]


def test_a_tied_head_is_an_embedding() -> None:
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False))
    model[2].weight = model[0].weight
    engine, *_ = zt.initialize(model=model, config=MuonCase().config(1))
    assert parameters_of(engine, use_muon=True) == {"1.weight"}


def test_a_matrix_that_is_unfrozen_joins_the_matrices() -> None:
    model = TinyGPT()
    late = {"blocks.1.up.weight", "blocks.1.up.bias"}
    for name, value in model.named_parameters():
        value.requires_grad_(name not in late)
    config = MuonCase(stage=2).config(1)
    engine, *_ = zt.initialize(model=model, config=config)
    before = model.get_parameter("blocks.1.up.weight").detach().clone()
    for batch in token_batches(2, size=GLOBAL_BATCH):
        engine.backward(engine(*batch))
        engine.step()
        for value in model.parameters():
            value.requires_grad_(True)
    change = model.get_parameter("blocks.1.up.weight").detach() - before
    most = PARAMS["lr"] * 2**0.5 * 32**0.5 * 1.25  # rate, factor of the shape, norm of an orthogonal matrix
    assert 0.0 < float(change.norm()) < most, "AdamW would change every element by the rate"
    assert {"blocks.1.up.weight"} == late & parameters_of(engine, use_muon=True)


def test_wrong_groups_are_refused() -> None:
    model = TinyGPT()
    config = MuonCase().config(1)
    with pytest.raises(ValueError, match=r"use_muon and holds 'embed.weight'|takes matrices"):
        zt.initialize(
            model=model, config=config, model_parameters=[{"params": model.parameters(), "use_muon": True}]
        )
    engine, *_ = zt.initialize(model=TinyGPT(), config=config)
    engine.zero_optimizer.param_groups[0]["use_muon"] = False
    batch = token_batches(1, size=GLOBAL_BATCH)[0]
    engine.backward(engine(*batch))
    with pytest.raises(ValueError, match=r"use_muon.*must stay True"):
        engine.step()


def load_with_other_groups(folder: str) -> None:
    engine = start(1)
    train_alike(engine, 1)
    engine.save_checkpoint(folder, "x")
    model = TinyGPT()
    engine, *_ = zt.initialize(
        model=model,
        config={**MuonCase(stage=1).config(1), "train_batch_size": 2},
        model_parameters=[
            {"params": [value for name, value in model.named_parameters() if is_hidden(name, value) == flag],
             "use_muon": False}
            for flag in (True, False)
        ],
    )  # fmt: skip
    engine.load_checkpoint(folder, "x")


def test_a_checkpoint_of_other_kinds_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(Exception, match="another use_muon"):
        load_with_other_groups(folder)


# --- bytes


@cache
def bytes_of_a_step(optimizer: str, stage: int, ranks: int) -> int:
    return int(run_ranks(ranks, _bytes_of_a_step, optimizer, stage)[0])


def _bytes_of_a_step(optimizer: str, stage: int) -> int:
    rank, world_size = world()
    case = (MuonCase if optimizer == "Muon" else Case)(stage=stage, dtype="bf16")
    engine, *_ = zt.initialize(model=case.model(), config=case.config(world_size))
    batch = micro_batches(token_batches(1, size=GLOBAL_BATCH)[0], world_size=world_size, accumulation=1)[0]
    for _ in range(2):
        before = engine.comm.bytes_sent.total()
        engine.backward(engine(*batch[rank]))
        engine.step()
    rows = engine.comm.gather_record([float(engine.comm.bytes_sent.total() - before)])
    return int(sum(row[0] for row in rows)) // world_size


def test_parts_of_matrices_travel_twice_in_bf16() -> None:
    hidden = sum(value.numel() for name, value in TinyGPT().named_parameters() if is_hidden(name, value))
    for ranks in (2, 4):
        more = bytes_of_a_step("Muon", 3, ranks) - bytes_of_a_step("AdamW", 3, ranks)
        assert more <= 2 * 2 * hidden / ranks, "every element goes to its owner and back, once at most"
        assert more >= 2 * 2 * hidden / ranks / ranks
