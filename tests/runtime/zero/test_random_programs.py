"""Random models in random programs train as in plain torch, at every stage and with every limit.

A failure names its seed; `compare` repeats it on two ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.random_models import BATCH, LENGTH, VOCABULARY, RandomModel
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import Outcome, largest_difference, whole_parameters, world
from zerotrain.runtime.zero import gradient_sum

pytestmark = pytest.mark.ranks

RANKS, LR, EPS = 2, 1e-2, 1e-4
PASSES = ("plain", "plain", "plain", "of two forward passes", "beside an evaluation")
CHANGES = (*("nothing",) * 5, "weights", "rate", "frozen block", "order of blocks", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A script of some steps: how each micro-batch is computed, and what changes after each step."""

    steps: tuple[tuple[tuple[str, ...], str], ...]
    clip: float
    zero: dict[str, Any]
    frees_sums: bool
    units: Sequence[type[nn.Module]] | None

    @classmethod
    def of(cls, rng: random.Random) -> Program:
        micro = rng.choice((1, 1, 2, 3))
        return cls(
            steps=tuple(
                (tuple(rng.choice(PASSES) for _ in range(micro)), rng.choice(CHANGES))
                for _ in range(rng.randint(3, 5))
            ),
            clip=rng.choice((0.0, 0.3)),
            zero=zero_of(rng),
            frees_sums=rng.random() < 0.5,
            units=rng.choice((None, None, (nn.Linear,))),
        )


def zero_of(rng: random.Random) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": rng.choice((0, 1, 2, 3, 3, 3)),
        "overlap_comm": rng.random() < 0.6,
        "reduce_bucket_size": rng.choice((1, 800, 10**8)),
        "stage3_param_persistence_threshold": rng.choice((0, 40, 10**5)),
        "stage3_max_reuse_distance": rng.choice((0, 1000, 10**9)),
        "stage3_prefetch_bucket_size": rng.choice((0, 500, 10**7)),
        "stage3_max_live_parameters": rng.choice((1, 10**9)),
    }
    if rng.random() < 0.3:
        zero["offload_optimizer"] = {"device": "cpu"}
    if zero["stage"] == 3 and rng.random() < 0.2:
        zero["offload_param"] = {"device": "cpu"}
    return zero


def loss_of(call: Callable[..., torch.Tensor], model: RandomModel, kind: str, key: int) -> torch.Tensor:
    """Return the loss of a micro-batch; `key` determines its tokens."""
    first, second = torch.randint(
        VOCABULARY, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(key)
    )
    if kind == "beside an evaluation":
        model.eval()
        with torch.no_grad():
            call(second)
        model.train()
    loss = call(first)
    return loss + 0.5 * call(second) if kind == "of two forward passes" else loss


def key_of(step: int, micro: int, rank: int) -> int:
    return 100 * step + 10 * micro + rank


def with_engine(model: RandomModel, program: Program, folder: Path) -> Outcome:
    rank, _ = world()
    gradient_sum.stays = lambda device: not program.frees_sums
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": len(program.steps[0][0]),
        "gradient_clipping": program.clip,
        "zero_optimization": program.zero,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "weight_decay": 0.1}},
    }
    engine, optimizer, *_ = zt.initialize(model=model, config=config, unit_modules=program.units)
    losses, norms = [], []
    for step, (passes, change) in enumerate(program.steps):
        model.begin(step)
        total = 0.0
        for micro, kind in enumerate(passes):
            loss = loss_of(engine, model, kind, key_of(step, micro, rank))
            engine.backward(loss)
            norm = engine.step().grad_norm
            total += loss.item() / len(passes)
        losses.append(sum(row[0] for row in engine.comm.gather_record([total])) / RANKS)
        norms.append(norm)
        if change == "weights":
            with zt.full_parameters(model, write=True), torch.no_grad():
                halve(model)
        elif change == "checkpoint":
            reload(engine, folder / str(step))
        else:
            apply(change, model, optimizer)
    with zt.full_parameters(model):
        parameters = whole_parameters(model)
    assert engine.memory.transient_bytes == 0, "something was left gathered"
    engine.close()
    return Outcome(losses, norms, parameters)


def with_torch(model: RandomModel, program: Program) -> Outcome:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1, foreach=False)
    losses, norms = [], []
    for step, (passes, change) in enumerate(program.steps):
        model.begin(step)
        optimizer.zero_grad()
        total = 0.0
        for micro, kind in enumerate(passes):
            for rank in range(RANKS):
                loss = loss_of(model, model, kind, key_of(step, micro, rank)) / len(passes) / RANKS
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # the engine's gradients are zeros, not absent
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), program.clip or float("inf"))))
        optimizer.step()
        losses.append(total)
        if change == "weights":
            with torch.no_grad():
                halve(model)
        else:
            apply(change, model, optimizer)
    return Outcome(losses, norms, whole_parameters(model))


def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def apply(change: str, model: RandomModel, optimizer: Any) -> None:
    """Change what is not the engine's."""
    if change == "rate":
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    elif change == "order of blocks":
        model.order.reverse()
    elif change == "frozen block":
        model.blocks[0].requires_grad_(False)
        if isinstance(optimizer, torch.optim.AdamW):
            for parameter in model.blocks[0].parameters():
                parameter.grad = None


def reload(engine: Any, folder: Path) -> None:
    """Save, spoil the weights, and load."""
    engine.save_checkpoint(folder)
    with zt.full_parameters(engine.module, write=True), torch.no_grad():
        halve(engine.module)
    engine.load_checkpoint(folder)


def compare(seed: int, folder: Path) -> str:
    """Return what differs between the engine and plain torch; empty if nothing does."""
    rng = random.Random(seed)
    program, built = Program.of(rng), rng.random()
    outcomes = []
    for train in (with_torch, partial(with_engine, folder=folder)):
        torch.manual_seed(seed)
        outcomes.append(train(RandomModel(random.Random(built)), program))
    plain, ours = outcomes
    losses, norms = (
        np.abs(np.subtract(getattr(ours, name), getattr(plain, name))) for name in ("losses", "norms")
    )
    found = {
        "losses": float(losses.max()),
        "norms": float((norms / np.maximum(plain.norms, 1e-2)).max()),
        "parameters": largest_difference(plain, ours),
    }
    return "".join(f"{name} differ by {size:.1e}; " for name, size in found.items() if not size <= 1e-3)


def compare_all(seeds: range, folder: Path) -> dict[int, str]:
    return {seed: found for seed in seeds if (found := compare(seed, folder / str(seed)))}


@pytest.mark.parametrize("seeds", with_slow_rows([range(15), range(15, 100)], quick=[range(15)]), ids=str)
def test_random_programs_train_as_in_plain_torch(seeds: range, tmp_path: Path) -> None:
    assert run_ranks(RANKS, compare_all, seeds, tmp_path) == [{}, {}]
