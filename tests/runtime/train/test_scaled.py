"""A training that yields continues with other numbers of ranks, configured as the operator does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.trainer_runs import TrainerRun, config, job
from zerotrain.contract.config.scaling import global_batch, with_batch
from zerotrain.contract.exit_codes import ExitCode

pytestmark = pytest.mark.ranks


STEPS = 20


def test_two_ranks_one_rank_three_ranks_train_as_two_do(tmp_path: Path) -> None:
    """Sums are taken in another order, so losses agree to rounding; every sample is seen once."""
    spec = job(steps=STEPS)
    spec["model"]["factory_args"] = {"dropout": 0.0}
    spec["checkpoint"] = {"on_termination": True}
    exact = config(bf16={"enabled": False}, train_batch_size=12)
    batch = global_batch(exact, world_size=2)
    straight = TrainerRun(tmp_path / "a", dict(spec), config=exact, world_size=2).start()
    straight.finish()
    spec["data_path"] = straight.job["data_path"]
    losses: dict[int, str] = {}
    # So slow that no run ends before it is stopped.
    slow = {**spec, "model": {**spec["model"], "factory_args": {"dropout": 0.0, "step_seconds": 0.1}}}
    for attempt, world_size in enumerate((2, 1, 3), 1):
        part = TrainerRun(
            tmp_path / f"b{attempt}",
            dict(slow if attempt < 3 else spec),
            config=with_batch(exact, batch.at(world_size)),
            world_size=world_size,
            attempt=attempt,
            checkpoint_dir=tmp_path / "c",
        ).start()
        if attempt < 3:
            part.wait_for(f"step {len(losses) + 2}/")
            part.signal(world_size - 1, signal.SIGTERM)
            assert part.wait() == [ExitCode.YIELDED] * world_size, part.log(0)
        else:
            part.finish()
        assert min(part.losses()) == len(losses) + 1
        losses |= part.losses()
    expected = straight.losses()
    assert losses.keys() == expected.keys()
    assert all(abs(float(losses[step]) - float(expected[step])) <= 2e-4 for step in expected)
