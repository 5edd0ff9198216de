"""The end of a process keeps its exit code and prints nothing, even while native work is in flight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks


SCRIPT = """
import sys, threading, time
import numpy
from zerotrain.runtime import _native
file = _native.SpillFile([sys.argv[1]], 1 << 20)
key = _native.SpillKey()
values = numpy.ones(1 << 22, dtype=numpy.float32)  # torch's own code aborts when it is met at the end
started = threading.Event()
def work():
    while True:
        started.set()
        _native.sum_squares(values, threads=1)
threading.Thread(target=work, daemon=True).start()
started.wait()
sys.exit(7)
"""


def test_a_thread_inside_of_native_code_does_not_abort_the_process(tmp_path: Path) -> None:
    """Objects that were never closed make nanobind print nothing either."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (7, "")
