"""Files of a local run are private to its user, whatever the umask of the shell allows others."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.support.commands import zerotrain

pytestmark = pytest.mark.ranks

PROGRAM = (
    "mkdir checkpoints-of-its-own && echo weights > checkpoints-of-its-own/weights && echo a line of the log"
)
JOB = {
    "apiVersion": "zerotrain.dev/v1alpha1",
    "kind": "ZeroTrainingJob",
    "metadata": {"name": "own"},
    "spec": {
        "workers": 1,
        "image": "example.org/image:1",
        "command": ["/bin/sh", "-c", PROGRAM],
        "config": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}},
    },
}


def for_others(folder: Path) -> dict[str, str]:
    """Return the permissions that other users have on the folder and on what is in it."""
    paths = [folder, *folder.rglob("*")]
    modes = {str(path): stat.S_IMODE(path.lstat().st_mode) for path in paths}
    return {name: oct(mode) for name, mode in modes.items() if mode & 0o077}


def test_nothing_of_a_run_is_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    before = os.umask(0o022)
    try:
        done = zerotrain("run", "job.yaml")
        assert done.code == 0, done.err
        assert os.umask(0o022) == 0o022, "the command's umask outlives it"
    finally:
        os.umask(before)
    assert (tmp_path / "runs/own/attempts/1/output.log").is_file()
    assert for_others(tmp_path / "runs/own") == {}
    assert for_others(tmp_path / "checkpoints-of-its-own") == {}
