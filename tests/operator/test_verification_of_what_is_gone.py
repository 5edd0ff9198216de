"""What the program of the pod that verifies says of a lost checkpoint, and what the job's status makes of it:
no loss is told more mildly than one flipped byte."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_checkpoint_commands import run, save_at
from tests.operator.reconcile_builders import Row, Want, check, ended, job, seen
from tests.operator.test_reconcile_table_verification import DONE, NAME, completed, helper, said, verifying


def _flip_a_byte(folder: Path) -> None:
    (file,) = (folder / NAME).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def _empty_the_volume(folder: Path) -> None:
    shutil.rmtree(folder)


def _mount_an_older_copy(folder: Path) -> None:
    shutil.rmtree(folder / NAME)


def _mount_a_copy_of_a_save(folder: Path) -> None:
    for name in ("COMMIT", "manifest.json"):
        (folder / NAME / name).unlink()


LOSSES = (_flip_a_byte, _empty_the_volume, _mount_an_older_copy, _mount_a_copy_of_a_save)


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__.strip("_"))
def test_every_loss_is_damage(lose: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "gpt"
    save_at(folder, 1, step=50)
    assert save_at(folder, 1, step=100).name == NAME
    lose(folder)
    code, output = run("verify", folder, NAME)
    last = output.splitlines()[-1]
    check(
        Row(
            id=lose.__name__,
            job=job(spec=verifying(), status=completed(tries=1)),
            seen=seen(*DONE, helpers=(helper(ended(0, code, termination=said(last))),)),
            want=Want(
                phase="Completed",
                actions=(),
                events=("CheckpointDamaged",),
                fields={"checkpoint.verification.state": "Damaged"},
                conditions={"CheckpointDurable": ("False", "CheckpointDamaged")},
                says={"event": last.strip()},
            ),
        )
    )
