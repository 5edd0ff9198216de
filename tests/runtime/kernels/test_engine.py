"""Training with the kernels' host build in place of a GPU's gives the bits of training without it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.collectives import watch_collectives
from tests.support.host_kernels import CPU
from tests.support.ranks import run_ranks
from tests.support.training import Case, train_with_engine, whole_parameters, world
from zerotrain.runtime import _native
from zerotrain.runtime.kernels import device

pytestmark = pytest.mark.ranks

QUANTISED = {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}


def train_twice(cases: list[Case], lacking: tuple[int, ...] = ()) -> list[tuple[bool, bool, bool, int]]:
    """Return, per case, whether losses, norms (up to the order of additions) and parameters are equal, and
    the launches of kernels. Ranks in `lacking` have none."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    same = []
    for case in cases:
        without = train_with_engine(case)
        kernels = _native.host_kernels()
        device._found[CPU] = device.DeviceKernels(None if world()[0] in lacking else kernels)
        try:
            found = train_with_engine(case)
        finally:
            del device._found[CPU]
        pairs = zip(without.parameters.values(), found.parameters.values(), strict=True)
        same.append(
            (
                found.losses == without.losses,
                found.norms == pytest.approx(without.norms, rel=1e-12),
                all((a == b).all() for a, b in pairs),
                kernels.launches,
            )
        )
    return same


def test_no_bit_changes_on_two_nodes_of_two_ranks() -> None:
    native = Case(torch_adam=False, clip=0.3)
    cases = [
        replace(native, stage=1, dtype="bf16", accumulation=2),
        replace(native, stage=3, dtype="fp32"),
        replace(native, stage=3, dtype="bf16", extra={"stage3_max_reuse_distance": 0, **QUANTISED}),
    ]
    for same in run_ranks(4, train_twice, cases):
        assert [equal for *equal, _ in same] == [[True] * 3] * len(cases)
        few, plain, quantised = (launches for *_, launches in same)
        assert few > 0
        assert 0 < plain < quantised


def test_a_rank_without_kernels_makes_all_wait_for_the_norm() -> None:
    case = Case(torch_adam=False, clip=0.3, stage=2, dtype="bf16")
    (with_kernels,), (without,) = run_ranks(2, train_twice, [case], (1,))
    assert with_kernels[:3] == without[:3] == (True, True, True)
    assert with_kernels[3] > without[3] == 0


def penalised(lacking: tuple[int, ...]) -> tuple[list[float], list[list[float]], int]:
    """Train a model of which rank 0 uses a weight outside of its module; return norms, weights and how many
    exchanges of gradients there were."""
    torch.manual_seed(5)
    rank, world_size = world()
    if rank not in lacking:
        device._found[CPU] = device.DeviceKernels(_native.host_kernels())
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 2))
    config = Case(stage=2, torch_adam=False, clip=0.3, extra={"overlap_comm": True}).config(world_size)
    engine, *_ = zt.initialize(model=model, config=config)
    norms, events = [], watch_collectives(engine)
    for step in range(3):
        penalty = torch.as_tensor(model[1].weight).square().sum() if rank == 0 else torch.zeros(())
        loss = engine(torch.full((4, 64), 1.0 + step + rank)).square().mean() + 0.1 * penalty
        engine.backward(loss)
        norms.append(engine.step().grad_norm)
    weights = [value.tolist() for value in whole_parameters(model).values()]
    engine.close()
    return norms, weights, sum(name == "exchange" for name, _ in events)


def test_late_gradients_of_one_rank_are_in_the_update() -> None:
    for found, wanted in zip(run_ranks(2, penalised, ()), run_ranks(2, penalised, (0, 1)), strict=True):
        assert found[0] == pytest.approx(wanted[0], rel=1e-12)
        assert found[1:] == wanted[1:]
        assert found[2] > 3 * 3, "no late gradients were sent"
