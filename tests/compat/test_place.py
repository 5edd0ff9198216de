"""A script starts in its job's folder, and a step has the same samples on another number of ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerotrain.compat.job.arguments import check_output, complete_json, steps_for_ranks
from zerotrain.compat.job.place import first_size, link_files, start_in_job
from zerotrain.compat.refusal import CompatError
from zerotrain.contract.worker_environment import LaunchSpec

pytestmark = pytest.mark.unit


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start in a folder as in an image, with files of the script's."""
    folder = tmp_path / "image"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "text").write_text("hello")
    (folder / "ds.json").write_text("{}")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    return folder


def enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ranks: int, attempt: int = 1, job_uid: str = "uid-1"
) -> None:
    """Set the environment of an attempt of a job."""
    spec = LaunchSpec(
        job="demo",
        job_uid=job_uid,
        attempt=attempt,
        master_addr="127.0.0.1",
        world_size=ranks,
        ranks_per_worker=ranks,
        node_rank=0,
        config_path=tmp_path / "none.json",
        checkpoint_dir=tmp_path / "job",
    )
    for name, value in spec.to_env().items():
        monkeypatch.setenv(name, value)


def test_a_script_starts_in_the_jobs_folder_and_finds_its_files(
    tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not start_in_job()
    assert Path.cwd() == image
    enter(tmp_path, monkeypatch, ranks=1)
    assert start_in_job()
    assert Path.cwd() == tmp_path / "job" / "script"
    assert Path("data/text").read_text() == "hello"
    assert sys.path[0] == str(image)
    Path("out").mkdir()
    assert not (image / "out").exists()


def test_links_follow_another_image_and_spare_what_the_script_wrote(tmp_path: Path, image: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "data").mkdir()
    (folder / "ds.json").symlink_to(tmp_path / "older" / "ds.json")
    link_files(image, folder)
    assert Path(os.readlink(folder / "ds.json")) == image / "ds.json"
    assert list((folder / "data").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_output("/proc/out")
    enter(tmp_path, monkeypatch, ranks=1)
    start_in_job()
    check_output("out/deep")
    check_output(str(image / "out"))
    with pytest.raises(CompatError, match="'/proc/out' cannot be written in this job"):
        check_output("/proc/out")
    with pytest.raises(CompatError, match="relative path"):
        check_output("data/text/out")


def test_accumulation_keeps_the_samples_of_a_step(
    tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_size() is None
    assert steps_for_ranks(4, "it") == 4
    enter(tmp_path, monkeypatch, ranks=4)
    start_in_job()
    assert steps_for_ranks(3, "it") == 3
    for ranks, steps in ((2, 6), (12, 1), (1, 12), (6, 2)):
        enter(tmp_path, monkeypatch, ranks=ranks, attempt=2)
        start_in_job()
        assert (first_size(), steps_for_ranks(3, "it")) == (4, steps)
    enter(tmp_path, monkeypatch, ranks=5, attempt=3)
    with pytest.raises(CompatError, match="do not divide among 5; run it on 1, 2, 3, 4, 6, 12 ranks"):
        steps_for_ranks(3, "it")
    enter(tmp_path, monkeypatch, ranks=5, job_uid="uid-2")
    start_in_job()
    assert (first_size(), steps_for_ranks(3, "it")) == (5, 3)


def test_the_json_follows_with_its_own_value(
    tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Config:
        def __init__(self, steps: object) -> None:
            self.config = {"gradient_accumulation_steps": steps, "train_batch_size": 8}

    for ranks in (4, 2):
        enter(tmp_path, monkeypatch, ranks=ranks)
        start_in_job()
    arguments = SimpleNamespace(gradient_accumulation_steps=steps_for_ranks(2, "it"))
    seen = []
    for steps in (2, "auto", 4):  # the script's own file, and the operator's, which follows already
        config = Config(steps)
        complete_json(lambda config, _: seen.append(dict(config.config)), config, arguments)
    assert seen == [
        {"gradient_accumulation_steps": 4, "train_batch_size": 8},
        {"gradient_accumulation_steps": "auto", "train_batch_size": 8},
        {"gradient_accumulation_steps": 4, "train_batch_size": 8},
    ]
