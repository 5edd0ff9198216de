"""The engine's checkpoints: a resume is exact, also on another number of ranks and at another stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerotrain.runtime as zt
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tiny_models import token_batches
from tests.support.training import GLOBAL_BATCH, Case, micro_batches, whole_parameters, world
from zerotrain.runtime.engine import Engine

pytestmark = pytest.mark.ranks


def start(case: Case) -> Engine:
    config = case.config(world()[1])
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 8}}
    engine, *_ = zt.initialize(model=case.model(), config=config)
    return engine


def train(engine: Engine, case: Case, first: int, last: int) -> list[float]:
    rank, world_size = world()
    losses = []
    for batch in token_batches(last, size=GLOBAL_BATCH)[first:]:
        total = 0.0
        for parts in micro_batches(batch, world_size=world_size, accumulation=case.accumulation):
            loss = engine(*parts[rank])
            engine.backward(loss)
            engine.step()
            total += loss.item()
        rows = engine.comm.gather_record([total / case.accumulation])
        losses.append(sum(row[0] for row in rows) / world_size)
    return losses


def weights(engine: Engine) -> dict[str, np.ndarray[Any, Any]]:
    with zt.full_parameters(engine.module):
        return whole_parameters(engine.module)


def uninterrupted(case: Case, folder: Path) -> tuple[list[float], dict[str, np.ndarray[Any, Any]]]:
    """Train six steps and save after the third."""
    engine = start(case)
    train(engine, case, 0, 3)
    engine.save_checkpoint(folder, client_state={"position": 3})
    return train(engine, case, 3, 6), weights(engine)


def resumed(case: Case, folder: Path) -> tuple[list[float], dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    engine = start(case)
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None
    assert engine.global_steps == 3
    return train(engine, case, 3, 6), weights(engine), client_state


@pytest.mark.parametrize(
    "case",
    [
        Case(stage=0, accumulation=2),
        Case(stage=1),
        Case(stage=2, dtype="bf16"),
        Case(stage=3, dtype="bf16", accumulation=2, tied=True),
    ],
    ids=lambda case: f"stage{case.stage}-{case.dtype}",
)
def test_resuming_on_the_same_ranks_is_exact(case: Case, tmp_path: Path) -> None:
    losses, expected = run_ranks(2, uninterrupted, case, tmp_path)[0]
    for again, parameters, client_state in run_ranks(2, resumed, case, tmp_path):
        assert again == losses
        assert client_state == {"position": 3}
        for name, value in expected.items():
            assert np.array_equal(parameters[name], value), name


@pytest.mark.parametrize(("to_ranks", "to_stage"), [(1, 0), (4, 3), (2, 0)])
def test_resuming_on_other_ranks_and_stages(to_ranks: int, to_stage: int, tmp_path: Path) -> None:
    losses, expected = run_ranks(2, uninterrupted, Case(stage=3), tmp_path)[0]
    for again, parameters, _ in run_ranks(to_ranks, resumed, Case(stage=to_stage), tmp_path):
        assert again == pytest.approx(losses, abs=1e-5)
        for name, value in expected.items():
            assert np.allclose(parameters[name], value, rtol=0, atol=2e-5), name


def save_inside_accumulation(folder: Path) -> None:
    case = Case(stage=1, accumulation=2)
    engine = start(case)
    engine.backward(engine(*micro_batches(token_batches(1, size=8)[0], world_size=1, accumulation=2)[0][0]))
    engine.step()
    engine.save_checkpoint(folder)


def test_saving_inside_accumulation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"would lose gradients \(micro-batch 1 of 2\)"):
        run_ranks(1, save_inside_accumulation, tmp_path)
    assert list(tmp_path.iterdir()) == []


def start_with(lr: float, *, betas: list[float], warmup: bool) -> Engine:
    case = Case(stage=1)
    config = case.config(1)
    config["optimizer"]["params"] |= {"lr": lr, "betas": betas}
    if warmup:
        config["scheduler"] = {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 2, "total_num_steps": 9},
        }
    return zt.initialize(model=case.model(), config=config)[0]


@pytest.mark.parametrize("warmup", [False, True])
def test_hyperparameters_edited_before_a_resume_are_kept(warmup: bool, tmp_path: Path) -> None:
    first = start_with(1e-2, betas=[0.9, 0.99], warmup=warmup)
    train(first, Case(stage=1), 0, 3)
    first.optimizer.param_groups[0]["weight_decay"] = 0.25  # by the script, while it ran
    first.save_checkpoint(tmp_path)
    same = start_with(1e-2, betas=[0.9, 0.99], warmup=warmup)
    same.load_checkpoint(tmp_path)
    edited = start_with(2e-2, betas=[0.8, 0.99], warmup=warmup)
    edited.load_checkpoint(tmp_path)
    assert same.optimizer.scalars() == first.optimizer.scalars()
    assert edited.optimizer.lr == pytest.approx(2 * first.optimizer.lr)
    group = edited.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.99), 0.25)
    for engine in (first, same, edited):
        engine.close()
