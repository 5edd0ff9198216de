"""Checkpoint folders of other libraries in a job: only whole ones of the right owner are resumed from."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotrain.compat.job.folders import OutputFolder, superfluous
from zerotrain.compat.job.records import describe, read_record
from zerotrain.runtime.checkpoint import CheckpointFenced, Owner, SingleRank
from zerotrain.runtime.checkpoint.fence import take_over

pytestmark = pytest.mark.unit

GROUP = SingleRank()


def folder_of(tmp_path: Path, attempt: int, *, job_uid: str = "uid-1") -> OutputFolder:
    """Return the folder for an attempt, which has taken the job over."""
    owner = Owner(attempt=attempt, job_uid=job_uid)
    job = tmp_path / "job"
    job.mkdir(exist_ok=True)
    take_over(job, owner)
    folder = OutputFolder(path=job / "script" / "out", job_folder=job, owner=owner)
    folder.open(GROUP)
    return folder


def write(folder: OutputFolder, step: int) -> str:
    """Write the files of a checkpoint where the attempt writes them; return its name."""
    name = f"checkpoint-{step}"
    (folder.saving / name / "part").mkdir(parents=True)
    (folder.saving / name / "weights").write_text(f"weights of {step}")
    (folder.saving / name / "part" / "state").write_text(f"state of attempt {folder.owner.attempt}")
    return name


def save(folder: OutputFolder, step: int, *, resumable: bool = True) -> Path:
    return folder.complete(write(folder, step), step=step, resumable=resumable, group=GROUP).path


def chosen(folder: OutputFolder, *, of_job_only: bool = True) -> str | None:
    path = folder.choose(GROUP, of_job_only=of_job_only).path
    return None if path is None else path.name


def test_a_late_writer_completes_nothing(tmp_path: Path) -> None:
    late = folder_of(tmp_path, 1)
    save(late, 400)
    name = write(late, 600)
    new = folder_of(tmp_path, 2)
    assert chosen(new) == "checkpoint-400"
    with pytest.raises(CheckpointFenced):
        late.complete(name, step=600, resumable=True, group=GROUP)
    write(late, 800)
    with pytest.raises(CheckpointFenced):
        late.complete("checkpoint-800", step=800, resumable=True, group=GROUP)
    assert [path.name for path in new.checkpoints()] == ["checkpoint-400"]
    save(new, 600)
    assert (new.path / name / "part" / "state").read_text() == "state of attempt 2"


def test_files_of_an_older_attempt_are_removed_and_those_of_a_save_in_progress_stay(tmp_path: Path) -> None:
    first = folder_of(tmp_path, 1)
    write(first, 2)
    second = folder_of(tmp_path, 2)
    assert not first.saving.exists()
    write(second, 2)
    second.open(GROUP)
    assert second.saving.exists()
    assert not second.path.exists(), "a script that lists its output sees nothing of a save"


@pytest.mark.parametrize("damage", ["changed", "shorter", "missing", "no record"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    folder = folder_of(tmp_path, 1)
    save(folder, 2)
    file = save(folder, 4) / "part" / "state"
    if damage == "changed":
        file.write_text("State of attempt 1")
    elif damage == "shorter":
        file.write_text("")
    elif damage == "missing":
        file.unlink()
    else:
        (file.parent.parent / "zerotrain.json").unlink()
    assert chosen(folder) == "checkpoint-2"


def test_only_the_jobs_own_are_resumed_from_unless_a_script_asks(tmp_path: Path) -> None:
    save(folder_of(tmp_path, 7, job_uid="uid-0"), 40)
    folder = folder_of(tmp_path, 1)
    assert (chosen(folder), chosen(folder, of_job_only=False)) == (None, "checkpoint-40")
    save(folder, 2)
    assert (chosen(folder), chosen(folder, of_job_only=False)) == ("checkpoint-2", "checkpoint-2")


def test_the_newest_is_the_one_completed_last(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    for step in (4, 6, 5):
        save(folder, step)
    save(folder, 9, resumable=False)
    assert chosen(folder) == "checkpoint-5"


def test_a_checkpoint_whose_successor_did_not_arrive_comes_back(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    path = save(folder, 4)
    path.rename(path.with_name(".replaced-checkpoint-4"))
    assert chosen(folder_of(tmp_path, 2)) == "checkpoint-4"
    save(folder_of(tmp_path, 3), 4)
    assert (path / "part" / "state").read_text() == "state of attempt 3"
    assert [entry.name for entry in folder.path.iterdir()] == ["checkpoint-4"]


def test_what_a_script_wrote_into_a_folder_outlives_the_next_save_there(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    name = write(folder, 4)
    (folder.saving / name / "old").touch()
    path = folder.complete(name, step=4, resumable=True, group=GROUP).path
    (path / "logs").mkdir()
    (path / "logs" / "events").write_text("losses")
    save(folder, 4)
    assert {entry.name for entry in path.iterdir()} == {"logs", "part", "weights", "zerotrain.json"}
    assert (path / "logs" / "events").read_text() == "losses"
    assert chosen(folder) == "checkpoint-4"


def test_an_interrupted_replacement_keeps_it_too(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    path = save(folder, 4)
    (path / "notes").touch()
    path.rename(path.with_name(".replaced-checkpoint-4"))
    write(folder, 4)
    (folder.saving / "checkpoint-4").rename(path)
    folder_of(tmp_path, 2)
    assert {entry.name for entry in path.iterdir()} == {"notes", "part", "weights"}
    assert [entry.name for entry in folder.path.iterdir()] == ["checkpoint-4"]


def test_a_folder_without_a_record_keeps_all_but_checkpoints_of_the_engine(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    path = folder.path / "checkpoint-4"
    (path / "step").mkdir(parents=True)
    (path / "step" / "COMMIT").touch()
    (path / "notes").touch()
    save(folder, 4)
    assert {entry.name for entry in path.iterdir()} == {"notes", "part", "weights", "zerotrain.json"}


def test_rotation_keeps_the_last_whole_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    for step in (2, 4, 6):
        save(folder, step)
    for step in (7, 8):
        (folder.path / f"checkpoint-{step}").mkdir()  # by another program, and half-written perhaps
    save(folder, 9, resumable=False)
    assert folder.rotate(None, best=None) == ()
    assert folder.rotate(2, best=None) == ("checkpoint-7", "checkpoint-8", "checkpoint-2", "checkpoint-4")
    assert folder.rotate(1, best=None) == ("checkpoint-9",)
    assert chosen(folder) == "checkpoint-6"


def test_rotation_removes_the_oldest_that_are_not_protected() -> None:
    names = ["a", "b", "c", "d"]
    assert superfluous(names, keep=2, protected={"a", "d"}) == ("b", "c")
    assert superfluous(names, keep=1, protected={"a", "d"}) == ("b", "c")
    assert superfluous(names, keep=4, protected=()) == ()


def test_digests_of_the_engines_files_are_those_of_its_manifest(tmp_path: Path) -> None:
    step = tmp_path / "step"
    step.mkdir()
    (step / "rank-0").write_text("tensors")
    (step / "manifest.json").write_text('{"files": [{"name": "rank-0", "size": 7, "sha256": "known"}]}')
    assert describe(tmp_path)["step/rank-0"].sha256 != "known", "a manifest alone is no checkpoint"
    (step / "COMMIT").write_text("{}")
    assert describe(tmp_path)["step/rank-0"].sha256 == "known"
    assert read_record(tmp_path) is None
