"""Replicas that are no longer equal are found: one bit of one weight of one rank is enough."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.runtime.train import digest
from zerotrain.runtime.train.replay import reached_step

pytestmark = pytest.mark.ranks


def engine_of(stage: int, **changes: object) -> zt.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))
    file = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True, "auto_cast": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, **changes},
    }
    engine, *_ = zt.initialize(model=model, config=file)
    return engine


def digests(rank_to_flip: int, stage: int, **changes: object) -> list[float]:
    """Return this rank's digests after a step, and after one bit of one rank's weights is flipped."""
    engine = engine_of(stage, **changes)
    engine.backward(engine(torch.ones(1, 7) * (engine.rank + 1)).float().sum())
    engine.step()
    found = [digest.digest(engine)]
    if engine.rank == rank_to_flip:
        unit = engine.core.units[-1]
        unit.full.tensor.view(torch.int16)[unit.layout.numel - 1] ^= 1
    found.append(digest.digest(engine))
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_bit_is_found(stage: int) -> None:
    first, second = run_ranks(2, digests, 1, stage)
    assert first[0] == second[0], "replicas are equal to the bit, whatever the ranks were fed with"
    assert first[1] == first[0]
    assert second[1] != second[0]


def test_at_stage_3_steps_and_rates_are_compared() -> None:
    first, second = run_ranks(2, scalars_alone)
    assert first == second
    assert first[0] == first[1] > 0


def scalars_alone() -> list[float]:
    """Return digests where no unit is whole on any rank."""
    return digests(1, 3, stage3_param_persistence_threshold=0)


def looks(_: int) -> list[int]:
    """Return the steps at which digests are due, in a process that begins before step 98."""
    engine = engine_of(2)
    found = []
    for step in range(98, 202):
        engine.global_steps = step
        if digest.is_due(engine, is_first=step == 98):
            found.append(step)
    engine.close()
    return found


def test_the_first_step_and_every_hundredth_are_looked_at() -> None:
    assert run_ranks(2, looks, 0)[0] == [98, 100, 200]
    assert run_ranks(1, looks, 0)[0] == [], "one rank has nobody to be compared with"


def test_how_far_earlier_attempts_came(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The histories of the same job count, whatever the files contain."""
    folder = tmp_path / "history"
    assert reached_step(tmp_path, job_uid="u1") == 0
    folder.mkdir()
    own, other = folder / "attempt-000002-u1.jsonl", folder / "attempt-000003-u2.jsonl"
    own.write_text(
        '{"kind":"attempt","attempt":2}\n{"kind":"point","step":41}\n{"kind":"event","step":99}\n{"kind":"po'
    )
    other.write_text('{"kind":"point","step":70}\n')
    assert reached_step(tmp_path, job_uid="u1") == 41
    (folder / "attempt-000001-u1.jsonl").write_text("[" * 9000 + '\n{"kind":"point","step":1e9}\nnull\n"x"\n')
    assert reached_step(tmp_path, job_uid="u1") == 41
    assert reached_step(tmp_path, job_uid="u2") == 70
