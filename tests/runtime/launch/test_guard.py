"""Causes of a rank's program that cannot be started: the command, the node or the volume."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.launch import guard

pytestmark = pytest.mark.ranks


DRIVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import guard
def execvp(*_):
    raise OSError(int(sys.argv[2]), os.strerror(int(sys.argv[2])))
os.execvp = execvp
guard.main(["guard.py", str(os.getppid()), "9", "train"])
"""


@pytest.mark.parametrize(
    ("number", "code", "way_out"),
    [
        (errno.ENOENT, ExitCode.BAD_LAUNCH, "correct spec.command"),
        (errno.EACCES, ExitCode.BAD_LAUNCH, "correct spec.command"),
        (errno.ESTALE, ExitCode.STORAGE_FAILED, "the volume"),
        (errno.EIO, ExitCode.STORAGE_FAILED, "the volume"),
        (errno.ETIMEDOUT, ExitCode.STORAGE_FAILED, "the volume"),
        (errno.ENOMEM, 1, "another attempt"),
    ],
)
def test_only_what_every_attempt_would_meet_ends_the_job(number: int, code: int, way_out: str) -> None:
    folder = Path(guard.__file__).parent
    command = [sys.executable, "-I", "-S", "-c", DRIVER, str(folder), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert "cannot start 'train'" in done.stderr
    assert way_out in done.stderr
