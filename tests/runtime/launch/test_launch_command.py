"""A job's command that begins with `zerotrain launch`: the launcher of the worker supervises the script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.launcher import launched

pytestmark = pytest.mark.ranks

SCRIPT = """
import importlib.util, os, signal, sys, time
origin = importlib.util.find_spec("deepspeed").origin
# One write: `print` makes several, which those of another rank may part.
os.write(1, f"script {os.environ['RANK']} {sys.argv[1:]} {origin} {os.getppid()}\\n".encode())
if "fail" in sys.argv:
    sys.exit(7 if os.environ["RANK"] == "1" else 0)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open(sys.argv[1] + os.environ["RANK"], "w").close()
time.sleep(600)
"""


def script(folder: Path) -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_script_is_a_child_of_the_launcher(tmp_path: Path) -> None:
    command = ["zerotrain", "launch", script(tmp_path), "fail", "--ranks", "9"]
    with launched(tmp_path, "", command=command) as launcher:
        code, output = launcher.finish()
    for rank in range(2):
        assert f"script {rank} ['fail', '--ranks', '9'] zerotrain.runtime.deepspeed" in output
        assert f" {launcher.popen.pid}" in output
    assert (code, launcher.termination.rank) == (7, 1)


def test_the_script_gets_the_request_to_stop(tmp_path: Path) -> None:
    started = tmp_path / "started-"
    command = ["zerotrain", "launch", "--replace-deepspeed", script(tmp_path), str(started)]
    with launched(tmp_path, "", command=command) as launcher:
        while not all(Path(f"{started}{rank}").exists() for rank in range(2)):
            assert launcher.popen.poll() is None
        launcher.popen.terminate()
        assert launcher.finish()[0] == 75


@pytest.mark.parametrize("option", ["--ranks", "--nodes", "--num_gpus"])
def test_a_number_of_ranks_is_refused_before_a_rank_starts(tmp_path: Path, option: str) -> None:
    (tmp_path / "termination.json").touch()
    command = ["zerotrain", "launch", option, "2", script(tmp_path), "fail"]
    with launched(tmp_path, "", command=command) as launcher:
        code, output = launcher.finish()
    assert code == 64
    assert "script" not in output
    assert option in output
    assert option in str(launcher.termination.exception)


def test_a_launcher_below_a_launcher_is_refused(tmp_path: Path) -> None:
    zerotrain = f"{sys.executable} -c 'from zerotrain.cli.main import main; main()'"
    command = ["sh", "-c", f"{zerotrain} launch --ranks 2 {script(tmp_path)} fail"]
    with launched(tmp_path, "", command=command, ranks=1) as launcher:
        code, output = launcher.finish()
    assert code == 64
    assert "let the job's spec.command begin with zerotrain launch" in output
