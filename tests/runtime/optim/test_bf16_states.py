"""Masters, gradients and states in bf16 equal a plain loop that rounds after every step, bit for bit, at
every stage; checkpoints hold them in bf16, and resumes on other numbers of ranks have the same bits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zerotrain.runtime as zt
from tests.support.offloaded_params import Where, run
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import (
    BF16,
    EPS,
    GLOBAL_BATCH,
    LR,
    WEIGHT_DECAY,
    Case,
    largest_difference,
    micro_batches,
    train_with_engine,
    whole_parameters,
    world,
)
from zerotrain.contract.config import ConfigError
from zerotrain.runtime import _native
from zerotrain.runtime.checkpoint.inspect import read_manifest
from zerotrain.runtime.checkpoint.tensorfile import TensorFile
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.weights.checkpoint_export import Request, export_checkpoint

pytestmark = pytest.mark.ranks


Parameters = dict[str, np.ndarray[Any, Any]]
Update = Callable[[torch.Tensor, torch.Tensor, list[torch.Tensor], int], None]
"""A step of fp32 values, by a gradient and two fp32 moments, all 1-D and written in place."""


def torch_adamw(value: torch.Tensor, grad: torch.Tensor, moments: list[torch.Tensor], step: int) -> None:
    parameter = torch.nn.Parameter(value)
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS, foreach=False)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step - 1)), "exp_avg": moments[0], "exp_avg_sq": moments[1]
    }  # fmt: skip
    optimizer.step()


def native_adamw(value: torch.Tensor, grad: torch.Tensor, moments: list[torch.Tensor], step: int) -> None:
    segment = _native.Segment(
        0, value.numel(), lr=LR, beta1=0.9, beta2=0.999, eps=EPS, weight_decay=WEIGHT_DECAY, step=step
    )
    _native.update_(_native.UpdateTask("adamw", [segment], grad), value, moments)


def sum_of(case: Case, grads: list[list[torch.Tensor]]) -> torch.Tensor:
    """Return the mean over ranks of a step's gradients `[micro-batch][rank]`, rounded where the engine keeps
    a sum: after each micro-batch, over all ranks (stages 2 and 3) or per rank."""
    ranks = len(grads[0])
    total = torch.zeros_like(grads[0][0])
    if case.stage < 2 and len(grads) > 1:
        own = [total.clone() for _ in range(ranks)]
        for micro in grads:
            for mine, grad in zip(own, micro, strict=True):
                mine.add_(grad)
        grads = [own]
    for micro in grads:
        wide = total.float()
        for grad in micro:
            wide += grad.float() / ranks
        total = wide.bfloat16()
    return total


def plain_loop(case: Case, world_size: int, update: Update) -> Parameters:
    """Train in one process: bf16 values, `update` on fp32 copies, every result rounded to bf16."""
    model = case.model().bfloat16()
    state_dtype = torch.bfloat16 if case.dtype == "bf16 states" else torch.float32
    moments = {
        name: [torch.zeros(value.numel(), dtype=state_dtype) for _ in range(2)]
        for name, value in model.named_parameters()
    }
    for step, batch in enumerate(token_batches(case.steps, size=GLOBAL_BATCH), start=1):
        grads: dict[str, list[list[torch.Tensor]]] = {name: [] for name in moments}
        for parts in micro_batches(batch, world_size=world_size, accumulation=case.accumulation):
            for row in grads.values():
                row.append([])
            for part in parts:
                model.zero_grad()
                (model(*part) / case.accumulation).backward()
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    grads[name][-1].append(parameter.grad.flatten().clone())
        for name, parameter in model.named_parameters():
            value, wide = parameter.detach().flatten().float(), [each.float() for each in moments[name]]
            update(value, sum_of(case, grads[name]).float(), wide, step)
            moments[name] = [each.to(state_dtype) for each in wide]
            with torch.no_grad():
                parameter.copy_(value.view(parameter.shape))
    return whole_parameters(model)


def train_all(cases: tuple[Case, ...]) -> list[Any]:
    return [train_with_engine(case) for case in cases]


@pytest.mark.parametrize("is_torch", [True, False], ids=("torch", "native"))
@pytest.mark.parametrize("world_size", with_slow_rows([1, 2], quick=[2]))
def test_every_stage_equals_the_plain_loop(world_size: int, is_torch: bool) -> None:
    cases = tuple(
        Case(stage=stage, dtype=dtype, accumulation=accumulation, torch_adam=is_torch, steps=4)
        for stage, dtype, accumulation in product((0, 1, 2, 3), ("bf16 masters", "bf16 states"), (1, 2))
    )
    outcomes = run_ranks(world_size, train_all, cases)[0]
    initial = whole_parameters(cases[0].model())
    for case, outcome in zip(cases, outcomes, strict=True):
        expected = plain_loop(case, world_size, torch_adamw if is_torch else native_adamw)
        different = [name for name, value in outcome.parameters.items() if (value != expected[name]).any()]
        assert not different, case
        assert any((value != initial[name]).any() for name, value in expected.items())


def test_clipping_reads_the_norm_of_bf16_sums() -> None:
    cases = tuple(Case(stage=stage, dtype="bf16 states", clip=0.5, accumulation=2) for stage in (0, 3))
    first, second = run_ranks(1, train_all, cases)[0]
    assert first.norms == pytest.approx(second.norms, rel=1e-6)
    assert all(norm > 0.5 for norm in first.norms)
    assert largest_difference(first, second) == 0.0


# --- checkpoints: all ranks train on the same samples, whose mean over 1, 2 or 4 ranks is exact


def start(stage: int, dtype: str) -> Engine:
    torch.manual_seed(7)
    config = Case(stage=stage, dtype=dtype, torch_adam=False).config(world()[1])
    return zt.initialize(model=TinyGPT(), config={**config, "train_batch_size": 2 * world()[1]})[0]


def train_alike(engine: Engine, steps: int) -> Parameters:
    for batch in token_batches(engine.global_steps + steps, size=2)[engine.global_steps :]:
        engine.backward(engine(*batch))
        engine.step()
    with zt.full_parameters(engine.module):
        return whole_parameters(engine.module)


def save_and_go_on(folder: str, stage: int, dtype: str) -> Parameters:
    engine = start(stage, dtype)
    train_alike(engine, 3)
    engine.save_checkpoint(folder, "x")
    return train_alike(engine, 3)


def resume(folder: str, stage: int, dtype: str) -> Parameters:
    engine = start(stage, dtype)
    engine.load_checkpoint(folder, "x")
    return train_alike(engine, 3)


@pytest.mark.parametrize("dtype", ["bf16 masters", "bf16 states"])
def test_resumes_on_other_numbers_of_ranks_have_the_same_bits(dtype: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = run_ranks(2, save_and_go_on, folder, 3, dtype)[0]
        for ranks, stage in ((1, 0), (2, 2), (4, 3)):
            found = run_ranks(ranks, resume, folder, stage, dtype)[0]
            different = [name for name, value in found.items() if (value != expected[name]).any()]
            assert not different, (stage, ranks)


def states_of(engine: Engine) -> dict[str, np.ndarray[Any, Any]]:
    """Return every stream as fp32, on one rank."""
    streams = engine.checkpoint_state().streams
    return {
        f"{unit}/{kind}": each.read(0, each.numel).float().numpy().copy()
        for (unit, kind), each in streams.items()
    }


def carry_over(folder: str, before: str, after: str) -> tuple[Any, ...]:
    """Save with one precision, load with another; return the states before and after, and the dtypes that
    are stored."""
    first = start(0, before)
    train_alike(first, 3)
    first.save_checkpoint(folder, "x")
    kinds = [unit.kinds for unit in read_manifest(Path(folder) / "x").units.values()]
    second = start(0, after)
    second.load_checkpoint(folder, "x")
    return states_of(first), states_of(second), kinds


def rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return torch.from_numpy(values).bfloat16().float().numpy()


STORED = {
    "bf16": {"master": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"},
    "bf16 masters": {"master": "BF16", "exp_avg": "F32", "exp_avg_sq": "F32"},
    "bf16 states": {"master": "BF16", "exp_avg": "BF16", "exp_avg_sq": "BF16"},
}


@pytest.mark.parametrize(
    ("before", "after"), [(a, b) for a, b in product(STORED, STORED) if a != b and "bf16 states" in (a, b)]
)
def test_a_checkpoint_of_another_precision_is_widened_or_rounded(before: str, after: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved, loaded, kinds = run_ranks(1, carry_over, folder, before, after)[0]
    assert kinds
    assert all(each == STORED[before] for each in kinds)
    assert saved.keys() == loaded.keys()
    changed = 0
    for key, value in saved.items():
        is_bf16 = STORED[after][key.rpartition("/")[2]] == "BF16"
        expected = rounded(value) if is_bf16 else value
        changed += int((expected != value).sum())
        assert (loaded[key] == expected).all(), key
    assert (changed > 0) == (after == "bf16 states")


def save_and_show(folder: str) -> Parameters:
    engine = start(3, "bf16 states")
    train_alike(engine, 2)
    engine.save_checkpoint(folder, "x")
    with zt.full_parameters(engine.module):
        return whole_parameters(engine.module)


def test_an_export_has_the_weights() -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = run_ranks(2, save_and_show, folder)[0]
        for dtype in (torch.float32, torch.bfloat16):
            output = Path(folder) / f"{dtype}.safetensors"
            export_checkpoint(Request(checkpoint=Path(folder), output=output, dtype=dtype, max_bytes=1 << 30))
            with TensorFile(output) as file:
                for name, value in expected.items():
                    found = file.read(name)
                    assert found.dtype is dtype
                    assert (found.float().numpy() == value).all(), name


# --- weights in other tiers


PLACES = (
    Where(),
    Where(params="cpu"),
    Where(params="host", states="cpu"),
    Where(params="host"),
    Where(params="nvme", states="nvme"),
    Where(params="nvme", states="nvme", just_in_time=False),
    Where(params="nvme"),
    Where(params="none", states="nvme", just_in_time=True),
)


def train_in_places(dtype: str) -> list[Any]:
    case = Case(stage=3, dtype=dtype, steps=4, clip=0.5, accumulation=2, torch_adam=False)
    with tempfile.TemporaryDirectory() as spill:
        return [run(case, where, spill) for where in PLACES]


def test_every_tier_of_weights_has_the_same_bits() -> None:
    for dtype in ("bf16 masters", "bf16 states"):
        first, *others = run_ranks(2, train_in_places, dtype)[0]
        for where, other in zip(PLACES[1:], others, strict=True):
            assert other == first, (dtype, where)


# --- what scripts see


def show_states(stage: int) -> dict[str, Any]:
    engine = start(stage, "bf16 states")
    batch = token_batches(1, size=2)[0]
    engine.backward(engine(*batch))
    parameter = engine.module.get_parameter("blocks.0.up.weight")
    found: dict[str, Any] = {"grad": str(zt.get_full_grad(parameter).dtype)}
    engine.step()
    value = torch.full(parameter.shape, 1.0 + 2**-9)
    zt.set_full_optimizer_state(parameter, "exp_avg", value)
    zt.set_full_fp32(parameter, value)
    found["state"] = sorted(set(zt.get_full_optimizer_state(parameter, "exp_avg").flatten().tolist()))
    master = zt.get_full_fp32(parameter)
    found["master"] = str(master.dtype), sorted(set(master.flatten().tolist()))
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_access_to_states_shows_fp32_and_rounds_what_is_set(stage: int) -> None:
    for shown in run_ranks(2, show_states, stage):
        assert shown == {"grad": "torch.float32", "state": [1.0], "master": ("torch.float32", [1.0])}


def test_an_optimizer_of_the_caller_is_refused_unless_it_is_one_of_ours() -> None:
    config = {"train_batch_size": 2, "bf16": {"enabled": True, **BF16["bf16 states"]}}
    with pytest.raises(
        ConfigError, match=r"bf16_master_weights_and_grads: needs an update in bf16, which RMSprop"
    ):
        zt.initialize(
            model=TinyGPT(),
            config={**config, "zero_allow_untested_optimizer": True},
            optimizer=torch.optim.RMSprop,
        )
    engine, *_ = zt.initialize(model=TinyGPT(), config=config, optimizer=torch.optim.AdamW)
    engine.backward(engine(*token_batches(1, size=2)[0]))
    engine.step()
    assert {each.peek("exp_avg", 0, 1).dtype for each in engine.zero_optimizer.states.values()} == {
        torch.bfloat16
    }
