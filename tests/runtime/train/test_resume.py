"""A resumed run equals the uninterrupted run: bit for bit at the same number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.trainer_runs import TrainerRun, config, job, newest_digests

pytestmark = pytest.mark.ranks


def test_resume_is_exact_bit_for_bit(tmp_path: Path) -> None:
    """Two ranks, stage 3, bf16, accumulation, dropout, clipping, warm-up: all of it must be restored."""
    straight = TrainerRun(tmp_path / "a", job(steps=8), world_size=2, checkpoint_dir=tmp_path / "ca").start()
    straight.finish()
    # The same run up to step 4 ...
    shutil.copytree(
        tmp_path / "ca" / "step-0000000004-attempt-1", tmp_path / "cb" / "step-0000000004-attempt-1"
    )
    again = TrainerRun(
        tmp_path / "b",
        job(steps=8, data_path=straight.job["data_path"]),
        world_size=2,
        attempt=2,
        checkpoint_dir=tmp_path / "cb",
    ).start()
    log = again.finish()
    assert "resumed from step 4" in log
    assert again.losses() == {step: straight.losses()[step] for step in range(5, 9)}
    # ... ends in the same bits: master weights, moments, buffers and random generators of both ranks.
    assert newest_digests(tmp_path / "cb") == newest_digests(tmp_path / "ca")


def test_without_the_generators_the_bits_would_differ(tmp_path: Path) -> None:
    """The test above can fail: the same start with another seed ends in other bits."""
    digests = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        TrainerRun(
            folder, job(steps=2, seed=seed), world_size=1, checkpoint_dir=folder / "c"
        ).start().finish()
        digests.append(newest_digests(folder / "c"))
    assert digests[0] != digests[1]


def test_resized_run_goes_on_with_the_same_samples_and_states(tmp_path: Path) -> None:
    """Ranks go 2 -> 1 -> 2: sums are taken in another order, so losses agree to rounding, not to the bit."""
    spec = job(steps=6)
    spec["model"]["factory_args"] = {"dropout": 0.0}
    exact = config(bf16={"enabled": False})
    del exact["train_micro_batch_size_per_gpu"]
    straight = TrainerRun(tmp_path / "a", dict(spec), config=exact, world_size=2).start()
    straight.finish()
    losses: dict[int, str] = {}
    for attempt, (world_size, steps) in enumerate([(2, 2), (1, 4), (2, 6)], 1):
        part = TrainerRun(
            tmp_path / f"b{attempt}",
            {**spec, "steps": steps, "data_path": straight.job["data_path"]},
            config=exact,
            world_size=world_size,
            attempt=attempt,
            checkpoint_dir=tmp_path / "c",
        ).start()
        part.finish()
        assert min(part.losses()) == max(losses, default=0) + 1
        losses |= part.losses()
    expected = straight.losses()
    assert losses.keys() == expected.keys()
    assert all(abs(float(losses[step]) - float(expected[step])) <= 2e-4 for step in expected)


def test_finished_job_that_is_started_again_does_nothing(tmp_path: Path) -> None:
    for attempt in (1, 2):
        run = TrainerRun(
            tmp_path / str(attempt), job(), attempt=attempt, checkpoint_dir=tmp_path / "c"
        ).start()
        run.finish()
    assert run.losses() == {}
    assert [path.name for path in sorted((tmp_path / "c").glob("step-*"))] == [
        "step-0000000002-attempt-1",
        "step-0000000004-attempt-1",
    ]


def test_resume_from_nothing_or_by_name(tmp_path: Path) -> None:
    checkpoints = tmp_path / "c"
    TrainerRun(
        tmp_path / "1", job(steps=4), checkpoint_dir=checkpoints, env={"ZEROTRAIN_JOB_UID": "old"}
    ).start().finish()
    policy = {"every_steps": 10, "keep_last": 10}
    named = TrainerRun(
        tmp_path / "2",
        job(steps=5, checkpoint={**policy, "resume_from": "step-0000000002-attempt-1"}),
        checkpoint_dir=checkpoints,
        env={"ZEROTRAIN_JOB_UID": "named"},
    ).start()
    assert "resumed from step 2" in named.finish()
    fresh_job = job(steps=3, checkpoint={**policy, "resume_from": "None"})
    fresh = TrainerRun(tmp_path / "3", fresh_job, checkpoint_dir=checkpoints).start()
    assert "resumed" not in fresh.finish()
    # A restart of that job continues from its own checkpoint although it was to start afresh.
    restarted = TrainerRun(
        tmp_path / "4", {**fresh_job, "steps": 4}, checkpoint_dir=checkpoints, attempt=2
    ).start()
    assert "resumed from step 3" in restarted.finish()


def test_damaged_checkpoint_is_passed_over_and_reported(tmp_path: Path) -> None:
    TrainerRun(tmp_path / "a", job(steps=4), world_size=2, checkpoint_dir=tmp_path / "c").start().finish()
    damaged = tmp_path / "c" / "step-0000000004-attempt-1" / "rank-00001-of-00002.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    run = TrainerRun(
        tmp_path / "b", job(steps=4), world_size=2, attempt=2, checkpoint_dir=tmp_path / "c"
    ).start()
    log = run.finish()
    assert f"checkpoint passed over: {damaged.parent}: {damaged.name} does not have the digest" in log
    assert "resumed from step 2" in log
    assert list(run.losses()) == [3, 4]
