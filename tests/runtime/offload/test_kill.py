"""SIGKILL at random moments of a training with spilled states.

Nothing of the spill remains, and a run resumed from the last checkpoint ends as an undisturbed one, bit for
bit.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_runs import TrainerRun, config, job, newest_digests

pytestmark = pytest.mark.ranks


STEPS = 60
KILLS = 4
MODEL = {
    "factory": "tests.support.factory_models:build",
    "factory_args": {"width": 96, "step_seconds": 0.005},
}

SLOW = {**MODEL, "factory_args": {"width": 96, "step_seconds": 0.1}}
"""The same model, slow enough that no attempt ends before it is killed."""


def spilling(folder: Path) -> dict[str, Any]:
    """Return a configuration with spilled states, background updates, and remainders of bf16 weights."""
    offload = {"device": "nvme", "nvme_path": str(folder), "just_in_time": True}
    return config(
        bf16={"enabled": True, "store_param_remainders": True},
        zero_optimization={
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": offload,
        },
    )


def names_in(folder: Path) -> list[str]:
    """Return all paths of files with bytes."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def open_in(folder: Path) -> list[str]:
    """Return files without a name in the folder that a process holds open: their space is not free."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # closed meanwhile, or another user's
        if target.startswith(f"{folder}/"):
            found.append(f"{entry}: {target}")
    return found


def test_the_search_sees_an_open_file(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    assert len(open_in(tmp_path)) == 1
    os.close(descriptor)
    assert open_in(tmp_path) == []


@pytest.mark.parametrize("world_size", [2])
def test_killed_at_random_moments(tmp_path: Path, world_size: int) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    spec = job(steps=STEPS, model=MODEL, checkpoint={"every_steps": 3, "keep_last": 2, "asynchronous": True})
    straight = TrainerRun(
        tmp_path / "straight",
        dict(spec),
        config=spilling(spill),
        world_size=world_size,
        checkpoint_dir=tmp_path / "undisturbed",
    ).start()
    straight.finish()
    assert (names_in(spill), open_in(spill)) == ([], [])
    expected = straight.losses()
    assert len(expected) == STEPS

    moments = random.Random(5)
    resumed = 0
    for attempt in range(1, KILLS + 2):
        run = TrainerRun(
            tmp_path / f"attempt-{attempt}",
            {**spec, "data_path": straight.job["data_path"], "model": SLOW if attempt <= KILLS else MODEL},
            config=spilling(spill),
            world_size=world_size,
            attempt=attempt,
            checkpoint_dir=tmp_path / "disturbed",
        ).start()
        if attempt <= KILLS:
            run.wait_for(f"step {8 * attempt}/")
            assert len(open_in(spill)) >= world_size  # there is something that could remain
            assert names_in(spill) == []
            time.sleep(moments.uniform(0.0, 0.04))  # the outcome is the same wherever it falls
            for process in run.processes:
                os.kill(process.pid, signal.SIGKILL)
            assert run.wait() == [-signal.SIGKILL] * world_size
        else:
            run.finish()
        assert (names_in(spill), open_in(spill)) == ([], [])
        found = run.losses()
        assert found == {step: expected[step] for step in found}
        resumed += "resumed from step" in run.log(0)
    assert resumed == KILLS
    assert max(found) == STEPS
    assert newest_digests(tmp_path / "disturbed") == newest_digests(tmp_path / "undisturbed")
