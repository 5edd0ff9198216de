"""Two attempts on one folder: the older one may finish writing, but only the newer one may commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_states import ThreadRanks, layout_for, make_state, on_ranks
from zerotrain.runtime import checkpoint
from zerotrain.runtime.checkpoint import CheckpointFenced, Owner, SingleRank
from zerotrain.runtime.checkpoint.fence import folder_lock, read_fence
from zerotrain.runtime.checkpoint.rawfile import WrittenFile
from zerotrain.runtime.checkpoint.tensorfile import write_tensors

pytestmark = pytest.mark.unit


LAYOUT = layout_for(1)
FIRST, SECOND = Owner(attempt=1, job_uid="job-a"), Owner(attempt=2, job_uid="job-a")


def save(folder: Path, owner: Owner, step: int) -> checkpoint.SaveResult:
    return checkpoint.save(
        make_state(0, LAYOUT, salt=step), folder, step=step, owner=owner, group=SingleRank()
    )


def load(folder: Path) -> checkpoint.LoadResult:
    return checkpoint.load(make_state(0, LAYOUT, filled=False), folder, group=SingleRank())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_late_writer_of_an_older_attempt_cannot_commit(tmp_path: Path) -> None:
    checkpoint.open_attempt(tmp_path, FIRST)
    save(tmp_path, FIRST, 10)
    checkpoint.open_attempt(tmp_path, SECOND)
    with pytest.raises(
        CheckpointFenced, match="belongs to attempt 2 of job job-a now; attempt 1 of job job-a came"
    ):
        save(tmp_path, FIRST, 20)
    assert names(tmp_path) == ["step-0000000010-attempt-1"]  # nothing half-written remains
    assert load(tmp_path).step == 10
    save(tmp_path, SECOND, 15)
    assert load(tmp_path).path == tmp_path / "step-0000000015-attempt-2"


def test_fence_is_read_after_the_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer attempt appears while the older one is writing."""
    checkpoint.open_attempt(tmp_path, FIRST)

    def write_then_lose_ownership(path: Path, tensors: Mapping[str, torch.Tensor]) -> WrittenFile:
        written = write_tensors(path, tensors)
        checkpoint.open_attempt(tmp_path / "elsewhere", SECOND)
        (tmp_path / "elsewhere" / "fence.json").replace(tmp_path / "fence.json")
        return written

    monkeypatch.setattr("zerotrain.runtime.checkpoint.tensorfile.write_tensors", write_then_lose_ownership)
    with pytest.raises(CheckpointFenced):
        save(tmp_path, FIRST, 10)
    assert load(tmp_path).path is None


def test_attempts_that_write_the_same_tag_do_not_share_a_folder(tmp_path: Path) -> None:
    """The older attempt fails midway and removes its files; the newer one's files must stay."""
    layout = layout_for(1)
    folders: list[set[str]] = []

    def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> WrittenFile:
        folders[-1].add(path.parent.name)
        return write_tensors(path, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerotrain.runtime.checkpoint.tensorfile.write_tensors", write)
        for owner in (FIRST, SECOND):
            folders.append(set())
            state = make_state(0, layout)
            checkpoint.save(state, tmp_path, step=1, tag="best", owner=owner, group=SingleRank())
    assert not folders[0] & folders[1]


def test_all_ranks_learn_of_the_fence(tmp_path: Path) -> None:
    checkpoint.open_attempt(tmp_path, SECOND)
    layout = layout_for(3)

    def action(group: ThreadRanks) -> object:
        return checkpoint.save(make_state(group.rank, layout), tmp_path, step=1, owner=FIRST, group=group)

    results = on_ranks(3, action)
    assert [type(result) for result in results] == [CheckpointFenced] * 3
    assert len({str(result) for result in results}) == 1


def test_older_attempt_cannot_open_the_folder(tmp_path: Path) -> None:
    checkpoint.open_attempt(tmp_path, SECOND)
    with pytest.raises(CheckpointFenced):
        checkpoint.open_attempt(tmp_path, FIRST)
    checkpoint.open_attempt(tmp_path, SECOND)  # the same attempt may, as often as it likes
    assert read_fence(tmp_path) == SECOND


def test_another_job_takes_the_folder_over_and_goes_on(tmp_path: Path) -> None:
    checkpoint.open_attempt(tmp_path, SECOND)
    save(tmp_path, SECOND, 30)
    newcomer = Owner(attempt=1, job_uid="job-b")
    checkpoint.open_attempt(tmp_path, newcomer)
    assert load(tmp_path).step == 30
    save(tmp_path, newcomer, 25)  # fewer steps and a lower attempt, but committed later
    assert load(tmp_path).step == 25
    with pytest.raises(CheckpointFenced):
        save(tmp_path, SECOND, 40)


def test_opening_clears_what_a_dead_attempt_left(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-0000000010-attempt-1-abc").mkdir()
    (tmp_path / ".trash-step-0000000005-attempt-1").mkdir()
    (tmp_path / "my-notes").mkdir()
    checkpoint.open_attempt(tmp_path, FIRST)
    assert names(tmp_path) == ["my-notes"]


def test_owner_comes_from_the_launch_environment(tmp_path: Path) -> None:
    from zerotrain.contract.worker_environment import LaunchSpec

    spec = LaunchSpec(
        job="j",
        job_uid="uid-7",
        attempt=4,
        master_addr="localhost",
        world_size=1,
        node_rank=0,
        config_path=tmp_path,
    )
    assert checkpoint.owner_from_environment(spec.to_env()) == Owner(attempt=4, job_uid="uid-7")
    assert checkpoint.owner_from_environment({}) == Owner(attempt=1)


def test_lock_keeps_two_committers_apart_and_is_bounded(tmp_path: Path) -> None:
    with folder_lock(tmp_path) as held:
        assert held
        with folder_lock(tmp_path, wait_seconds=0.0) as also_held:
            assert not also_held
    with folder_lock(tmp_path, wait_seconds=0.0) as held:
        assert held


def test_the_fence_of_the_jobs_folder_counts_wherever_an_attempt_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that saves each step into a folder of its own, as other trainers do."""
    job, output = tmp_path / "job", tmp_path / "output"
    for owner in (FIRST, SECOND):
        checkpoint.open_attempt(job, owner)
    monkeypatch.setattr("zerotrain.runtime.checkpoint.writer.job_folder", lambda: job)
    save(output / "checkpoint-400", SECOND, 400)
    with pytest.raises(CheckpointFenced, match=f"{job} belongs to attempt 2"):
        save(output / "checkpoint-600", FIRST, 600)
    assert load(output / "checkpoint-400").step == 400
    assert load(output / "checkpoint-600").path is None
