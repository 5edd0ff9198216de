"""A launcher that cannot start: causes that hit every attempt end the job, a node's failing disk does not."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launcher import ROOT, launched, spec_for
from tests.support.private_mount import can_mount
from zerotrain.contract.exit_codes import RetryClass, meaning_of
from zerotrain.contract.progress import Termination
from zerotrain.contract.worker_environment import LaunchSpec

pytestmark = pytest.mark.ranks


BREAKS = """
import asyncio, os, pathlib, sys
step, code = sys.argv[1], int(sys.argv[2])

def broken(real, name):
    def call(self, *args, **kwargs):
        if pathlib.Path(os.fspath(self)).name == name:
            raise OSError(code, os.strerror(code), os.fspath(self))
        return real(self, *args, **kwargs)
    return call

async def refused(serve, path, **kwargs):
    raise OSError(code, os.strerror(code))

match step:
    case "token":
        pathlib.Path.read_text = broken(pathlib.Path.read_text, "token")
    case "folder":
        pathlib.Path.mkdir = broken(pathlib.Path.mkdir, "run")
    case "socket":
        asyncio.start_unix_server = refused
    case "http file":
        pathlib.Path.write_text = broken(pathlib.Path.write_text, "http.partial")
    case "end":
        pathlib.Path.unlink = broken(pathlib.Path.unlink, "http.json")

from zerotrain.runtime.launch.main import main
sys.exit(main(["--", sys.executable, "-c", "print('the rank ran')"]))
"""
"""A disk error at one step of the start or, with `end`, after it."""


def run(spec: LaunchSpec, *command: str) -> tuple[int, str]:
    """Return exit code and output of a separate launcher."""
    paths = [str(ROOT / "operator"), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **spec.to_variable()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    return found.returncode, found.stdout


def broken(folder: Path, step: str, code: int) -> tuple[int, str, Termination | None]:
    """Return the same and the termination message, for which the kubelet has created the file."""
    (folder / "token").write_text("secret")
    log = folder / "termination.json"
    log.touch()
    spec = spec_for(folder, ranks=1, token_path=folder / "token")
    status, output = run(spec, sys.executable, "-c", BREAKS, step, str(code))
    return status, output, Termination.from_json(log.read_text()) if log.read_text() else None


@pytest.mark.parametrize("step", ["token", "folder", "socket", "http file"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_the_start_is_another_attempts_luck(
    tmp_path: Path, step: str, code: int
) -> None:
    status, output, message = broken(tmp_path, step, code)
    assert status == 85
    assert meaning_of(status).retry is RetryClass.INFRASTRUCTURE
    assert "the rank ran" not in output
    assert f"the worker cannot start: [Errno {code}] {os.strerror(code)}" in output
    assert f"look after the node's disk, where {tmp_path / 'run'} is" in output
    assert message is not None
    assert (message.code, message.attempt) == (85, 3)
    assert os.strerror(code) in str(message.exception)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (errno.EROFS, 85),
        (errno.EDQUOT, 85),
        (errno.ESTALE, 85),
        (errno.ENOMEM, 1),
        (errno.ENFILE, 1),
        (errno.EACCES, 69),
        (errno.ENOTDIR, 69),
    ],
)
def test_who_pays_for_what(tmp_path: Path, code: int, status: int) -> None:
    found, output, message = broken(tmp_path, "folder", code)
    assert found == status
    assert (meaning_of(found).retry is RetryClass.NEVER) is (status == 69)
    assert os.strerror(code) in output
    assert message is not None
    assert message.code == status


def test_a_disk_that_fails_at_the_end_does_not_change_how_it_ended(tmp_path: Path) -> None:
    status, output, message = broken(tmp_path, "end", errno.EIO)
    assert status == 0
    assert "the rank ran" in output
    assert f"cannot clean up {tmp_path / 'run'}" in output
    assert message is not None
    assert message.code == 0


@pytest.mark.parametrize("how", ["size=4k", "ro"])
def test_a_real_disk_that_is_full_or_read_only(tmp_path: Path, how: str) -> None:
    if reason := can_mount():
        pytest.skip(f"cannot mount a file system here: {reason}")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    spec = spec_for(tmp_path, ranks=1, run_dir=scratch / "run")
    fill = f"head -c 4096 /dev/zero >{scratch}/full; " if how != "ro" else ""
    launcher = f"{sys.executable} -m zerotrain.runtime.launch -- echo the rank ran"
    script = f"mount -t tmpfs -o {how} none {scratch} && {{ {fill} exec {launcher}; }}"
    status, output = run(spec, "unshare", "-rm", "sh", "-c", script)
    assert status == 85, output
    assert "the worker cannot start: " in output
    assert "the rank ran" not in output


def test_an_empty_token_is_the_starters_to_correct(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    (tmp_path / "termination.json").touch()
    with launched(tmp_path, "sys.exit(0)", token_path=tmp_path / "token") as launcher:
        assert launcher.wait() == 69
        assert "must hold the attempt's channel token" in str(launcher.termination.exception)
        assert launcher.termination.attempt == 3
