"""`zerotrain checkpoint verify FOLDER TAG` of a checkpoint that is missing: as bad as a damaged one.

The exceptions are a failed volume, and files that may be another program's format: both prove nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.test_checkpoint_commands import run, save_at
from zerotrain.cli.errors import CliError
from zerotrain.cli.main import app
from zerotrain.contract.exit_codes import ExitCode

pytestmark = pytest.mark.unit


TAG = "step-0000000002-attempt-1"


def _volume_emptied(folder: Path) -> None:
    shutil.rmtree(folder)


def _older_copy(folder: Path) -> None:
    shutil.rmtree(folder / TAG)


def _never_committed(folder: Path) -> None:
    for name in ("COMMIT", "manifest.json"):
        (folder / TAG / name).unlink()


def _emptied(folder: Path) -> None:
    for file in (folder / TAG).iterdir():
        file.unlink()


def _a_file(folder: Path) -> None:
    shutil.rmtree(folder / TAG)
    (folder / TAG).write_text("not a folder")


def _dangling(folder: Path) -> None:
    shutil.rmtree(folder / TAG)
    (folder / TAG).symlink_to(folder / "elsewhere")


def _another_inside(folder: Path) -> None:
    """Put a whole checkpoint one folder further down, which is not the one that was asked for."""
    shutil.rmtree(folder / TAG)
    save_at(folder / TAG, 1, step=7)


LOST: dict[Callable[[Path], None], str] = {
    _volume_emptied: "{folder} is not there",
    _older_copy: f"{{folder}} holds no {TAG}",
    _never_committed: f"{{folder}}/{TAG} holds neither manifest.json nor COMMIT",
    _emptied: f"{{folder}}/{TAG} holds neither manifest.json nor COMMIT",
    _a_file: f"{{folder}}/{TAG} holds neither manifest.json nor COMMIT",
    _dangling: f"{{folder}} holds no {TAG}",
    _another_inside: f"{{folder}}/{TAG} holds neither manifest.json nor COMMIT",
}
"""Function that loses a checkpoint -> text in the last line of the output."""


def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    save_at(folder, 2, step=1)
    assert save_at(folder, 2, step=2).name == TAG
    assert run("verify", folder, TAG)[0] == 0
    return folder


@pytest.mark.parametrize("lose", LOST, ids=lambda lose: lose.__name__.strip("_"))
def test_a_checkpoint_that_is_gone_is_as_bad_as_a_damaged_one(
    lose: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = saved(tmp_path)
    lose(folder)
    code, output = run("verify", folder, TAG)
    first, *_, last = output.splitlines()
    assert (code, first) == (ExitCode.CHECKPOINT_UNUSABLE, f"{TAG}: missing")
    assert LOST[lose].format(folder=folder) in last
    # The advice; the job's status shows only the last line.
    assert (f"zerotrain checkpoint ls {folder}" in last) is folder.exists()
    code, output = run("verify", folder, TAG, "-o", "json")
    assert (code, last.strip() in output) == (ExitCode.CHECKPOINT_UNUSABLE, True)


def _torch_save(path: Path) -> None:
    path.write_bytes(b"PK")


def _distributed(path: Path) -> None:
    path.mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (path / name).write_bytes(b"\x80")


def _transformers(path: Path) -> None:
    path.mkdir()
    (path / "model-00001-of-00002.safetensors").write_bytes(b"{}")


FOREIGN = (_torch_save, _distributed, _transformers)


@pytest.mark.parametrize("name", ["ckpt_100.pt", "step-100", "step-0000000002-attempt-1x"])
@pytest.mark.parametrize("write", FOREIGN, ids=lambda write: write.__name__.strip("_"))
def test_what_may_be_another_format_is_not_called_gone(
    write: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path)
    write(folder / name)
    error = CliRunner().invoke(app, ["checkpoint", "verify", str(folder), name]).exception
    assert isinstance(error, CliError), error
    assert error.code == ExitCode.BAD_CONFIG
    # The last line of the output, which is all that the job's status shows.
    assert f"check {folder / name} with the program that wrote it" in str(error.next_step)
    assert f"zerotrain checkpoint ls {folder}" in str(error.next_step)
    assert run("verify", folder, TAG)[0] == 0


def _without_records(path: Path) -> None:
    for name in ("COMMIT", "manifest.json"):
        (path / name).unlink()


def _without_files_but_a_damage_mark(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    (path / "DAMAGED").write_text("{}")


@pytest.mark.parametrize("lose", [_without_records, _without_files_but_a_damage_mark, shutil.rmtree])
def test_one_of_ours_under_a_tag_is_as_bad_as_damaged(lose: Callable[[Path], None], tmp_path: Path) -> None:
    """The tag could be any program's, but the files are ours; where no file is left there is no other
    format.
    """
    folder = saved(tmp_path)
    (folder / TAG).rename(folder / "best")
    assert run("verify", folder, "best")[0] == 0
    lose(folder / "best")
    code, output = run("verify", folder, "best")
    assert (code, output.splitlines()[0]) == (ExitCode.CHECKPOINT_UNUSABLE, "best: missing")


PASSES = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTUNREACH)
UNCLEAR = (errno.EACCES, errno.ENAMETOOLONG)


@pytest.mark.parametrize("where", ["{folder}", "{folder}/{tag}", "{folder}/{tag}/COMMIT"])
@pytest.mark.parametrize("code", [*PASSES, *UNCLEAR], ids=errno.errorcode.get)
def test_where_existence_is_unclear_nothing_is_reported_about_the_checkpoint(
    where: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volume's root, the checkpoint's folder or a record in it answers every `stat` with this error."""
    folder = saved(tmp_path)
    _volume_emptied(folder)
    refused, stat = Path(where.format(folder=folder, tag=TAG)), os.stat

    def failing(path: Any, *more: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | Path) and Path(path).is_relative_to(refused):
            raise OSError(code, os.strerror(code), str(path))
        return stat(path, *more, **options)

    monkeypatch.setattr(os, "stat", failing)
    ended, output = run("verify", folder, TAG)
    assert ended == (ExitCode.STORAGE_FAILED if code in PASSES else ExitCode.BAD_CONFIG), output
    assert os.strerror(code) in output


def test_without_a_name_an_empty_folder_is_a_wrong_word_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert run("verify", tmp_path / "none")[0] == ExitCode.BAD_CONFIG
