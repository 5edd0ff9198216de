"""Commands that read folders in which a training program writes: no file makes one of them wait, read without
end, leave the folder, or send the terminal a command.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_checkpoint_commands import save_at
from tests.support.commands import Done, zerotrain
from zerotrain.contract.exit_codes import ExitCode

pytestmark = pytest.mark.timeout(300)

SECRET = "of-another-tenant"
STEP = "step-0000000001-attempt-1"
LARGE_BYTES = 1 << 31


def all_read(folder: Path, tmp_path: Path) -> list[Done]:
    """Run every command that reads a folder of checkpoints on this one."""
    return [
        zerotrain("checkpoint", "ls", folder),
        zerotrain("checkpoint", "ls", folder, "-o", "json"),
        zerotrain("checkpoint", "verify", folder),
        zerotrain("checkpoint", "verify", folder, "-o", "json"),
        zerotrain("checkpoint", "diff", folder / STEP, folder / STEP),
        zerotrain("checkpoint", "export", folder / STEP, tmp_path / "weights"),
        zerotrain("report", folder, "--file", tmp_path / "report.html"),
    ]


def with_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def with_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    outside = path.parents[2] / "outside.json"
    outside.write_text(json.dumps({"step": SECRET, "reason": SECRET}))
    path.symlink_to(outside)


def with_large_file(path: Path) -> None:
    path.touch()
    os.truncate(path, LARGE_BYTES)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["COMMIT", "manifest.json", "DAMAGED"])
@pytest.mark.parametrize(
    ("plant", "word"),
    [(with_pipe, "no regular file"), (with_link, "is a link"), (with_large_file, "larger than")],
)
def test_a_record_is_a_regular_file_of_a_bounded_size(
    plant: Callable[[Path], None], word: str, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    plant(save_at(folder, 1, step=1) / name)
    done = all_read(folder, tmp_path)
    assert not any(SECRET in item.out + item.err for item in done)
    listed = json.loads(done[1].out)[0]
    assert listed["condition"] == "damaged"
    assert (word if name != "DAMAGED" else "marked as damaged") in listed["reason"]
    if name != "DAMAGED":  # a mark of an earlier load; reading every byte is more reliable
        assert [item.code for item in done[2:6]] == [int(ExitCode.CHECKPOINT_UNUSABLE)] * 4


@pytest.mark.unit
@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_tensor_file_is_a_regular_file(plant: Callable[[Path], None], tmp_path: Path) -> None:
    """The manifest gives size 0, as the pipe has, so that a check of sizes does not help."""
    folder = tmp_path / "checkpoints"
    path = save_at(folder, 1, step=1)
    manifest = json.loads((path / "manifest.json").read_text())
    (entry,) = manifest["files"]
    (path / entry["name"]).unlink()
    plant(path / entry["name"])
    entry["size"] = 0
    (path / "manifest.json").write_text(json.dumps(manifest))
    commit = json.loads((path / "COMMIT").read_text())
    commit["manifest_sha256"] = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    (path / "COMMIT").write_text(json.dumps(commit))
    done = all_read(folder, tmp_path)
    assert "no regular file" in json.loads(done[3].out)[0]["problems"][0]
    assert [item.code for item in done[2:6]] == [int(ExitCode.CHECKPOINT_UNUSABLE)] * 4


@pytest.mark.unit
@pytest.mark.parametrize("job", ["../../outside", "{}/outside", "."])
def test_a_run_does_not_lead_out_of_its_folder(job: str, tmp_path: Path) -> None:
    save_at(tmp_path / "outside", 1, step=77)
    run = tmp_path / "runs" / "gpt"
    (run / "checkpoints").mkdir(parents=True)
    save_at(run / "checkpoints", 1, step=77)
    (run / "run.json").write_text(json.dumps({"job": job.format(tmp_path), "attempt": 1}))
    done = zerotrain("report", run, "--file", tmp_path / "report.html")
    assert done.code == 0, done.err
    assert "step-0000000077" not in (tmp_path / "report.html").read_text()


@pytest.mark.unit
@pytest.mark.parametrize("plant", [with_pipe, with_link, with_large_file])
def test_the_records_of_a_run_are_regular_files(plant: Callable[[Path], None], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "gpt"
    (run / "attempts" / "1").mkdir(parents=True)
    plant(run / "attempts" / "1" / "termination.json")
    plant(run / "run.json")
    done = zerotrain("report", run, "--file", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text() if done.code == 0 else done.err
    assert SECRET not in text
