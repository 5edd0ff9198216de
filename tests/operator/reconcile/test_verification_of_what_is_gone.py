"""Output of the verifying pod's program about a lost checkpoint, and the job's status that follows from it.

No loss is reported more mildly than one flipped byte, and no whole checkpoint of another program is reported
as lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_checkpoint_commands import run, save_at
from tests.operator.reconcile.test_verification import DONE, NAME, completed, helper, said, verifying
from tests.operator.reconcile_builders import Row, Want, check, ended, job, seen
from tests.operator.resources.test_verification import run as as_the_pod


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


@pytest.mark.unit
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
                messages={"event": last.strip()},
            ),
        )
    )


def _torch_save(path: Path) -> None:
    path.write_bytes(b"PK")


def _distributed(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(b"\x80")


def _nothing(path: Path) -> None:
    """Leave nothing of a checkpoint that was reported as durable, in the folder that is on the volume."""


OWN = ((_torch_save, "Unknown"), (_distributed, "Unknown"), (_nothing, "Damaged"))
REASONS = {"Unknown": "VerificationFailed", "Damaged": "CheckpointDamaged"}
CONDITIONS = {"Unknown": ("True", "CheckpointDurable"), "Damaged": ("False", "CheckpointDamaged")}


@pytest.mark.ranks
@pytest.mark.parametrize(("write", "state"), OWN, ids=lambda part: getattr(part, "__name__", part).strip("_"))
def test_what_another_program_wrote_is_only_damage_where_nothing_is_left(
    write: Callable[[Path], None], state: str, tmp_path: Path
) -> None:
    folder = tmp_path / "gpt"
    save_at(folder, 1, step=50)
    write(folder / "ckpt_100.pt")
    done = as_the_pod(folder, "ckpt_100.pt")
    last = (done.stdout + done.stderr).splitlines()[-1]
    assert "zerotrain checkpoint ls" in last
    spec = verifying(command=["python", "own.py"], model=None, data=None, steps=None)
    begun = completed("/checkpoints/gpt/ckpt_100.pt", tries=3, checkpoint="ckpt_100.pt")
    check(
        Row(
            id=write.__name__,
            job=job(spec=spec, status=begun),
            seen=seen(*DONE, helpers=(helper(ended(0, done.returncode, termination=said(last))),)),
            want=Want(
                phase="Completed",
                actions=(),
                events=(REASONS[state],),
                fields={"checkpoint.verification.state": state},
                conditions={"CheckpointDurable": CONDITIONS[state]},
                messages={"event": last.strip()},
            ),
        )
    )
