"""Children of a program that asked for `stop_on_sigterm`: SIGTERM ends them, and stops no other process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launcher import ROOT

pytestmark = pytest.mark.ranks


PROGRAM = """
import json, multiprocessing, os, signal, threading, time
import zerotrain.runtime as zt
from zerotrain.runtime.train.stopping import StopRequest

fork = multiprocessing.get_context("fork")


def ended(wait):
    child = fork.Process(target=time.sleep, args=(600,))
    child.start()
    time.sleep(wait)
    child.terminate()
    child.join(10)
    code = child.exitcode
    child.kill()
    return code


def from_a_thread():
    found.append(ended(0))


reporter = zt.ProgressReporter()
reporter.stop_on_sigterm()
found = [ended(wait) for wait in (0.2, *[0] * 20)]
thread = threading.Thread(target=from_a_thread)
thread.start()
thread.join()
with fork.Pool(2) as pool:
    squares = pool.map(abs, (-1, -2))  # leaving the block sends SIGTERM to both
mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
asked = [reporter._stop.requested]
os.kill(os.getpid(), signal.SIGTERM)
deadline = time.monotonic() + 60
while not reporter._stop.requested and time.monotonic() < deadline:
    time.sleep(0.01)
asked.append(reporter._stop.requested)
reporter.close()
found.append(ended(0.2))
print(json.dumps({"codes": found, "squares": squares, "mask": mask, "asked": asked}))
"""


def test_sigterm_ends_a_forked_child_and_is_no_request_to_stop(tmp_path: Path) -> None:
    """The signal may come at any time: right after the fork, from a thread, in a pool, after `close`."""
    environ = {name: text for name, text in os.environ.items() if "ZEROTRAIN" not in name}
    paths = os.pathsep.join((str(ROOT / "operator"), str(ROOT / "runtime")))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["codes"]) == {-15}, result
    assert result["asked"] == [False, True], "only the process itself was asked"
    assert (result["squares"], result["mask"]) == ([1, 2], [])
