"""Stacks of ranks that move, and of one that holds the interpreter's lock: told, and nobody dies of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.runtime.test_launch_hang import stacks, token_file
from tests.support.launcher import eventually, launched

IN_MOTION = """
import sys, threading, time
from pathlib import Path
from zerotrain.runtime.channel import dump_stacks_on_signal
dump_stacks_on_signal(Path(sys.argv[1]))
def deep(levels):
    return sum(deep(levels - 1) for _ in range(2)) if levels else 1
def work():
    while True:
        deep(6)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
print("up", flush=True)
while True:
    time.sleep(0.001)
"""

HOLDER = """
import ctypes
channel = RankChannel.from_env()
channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1))
time.sleep(1.0)
def holds_the_lock():
    ctypes.PyDLL(None).sleep(600)
holds_the_lock() if RANK == 0 else time.sleep(600)
"""

SIGNALS = 1500
"""A dump from within the signal handler ended the process after some two hundred."""


def test_stacks_that_move_can_be_asked_for_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt"
    with subprocess.Popen(
        [sys.executable, "-c", IN_MOTION, str(path)], stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "up\n"
            for _ in range(SIGNALS):
                program.send_signal(signal.SIGUSR1)
                time.sleep(0.002)
            assert program.poll() is None
            assert "in deep" in path.read_text()
        finally:
            program.kill()


def test_a_rank_that_keeps_the_interpreters_lock_is_told_of_too(tmp_path: Path) -> None:
    with launched(tmp_path, HOLDER, token_path=token_file(tmp_path)) as launcher:
        launcher.wait_for_ranks()
        # From then on nothing of rank 0's own can run.
        eventually(lambda: "in holds_the_lock" in stacks(launcher).split("=== rank 1")[0])
        assert "rank.py" in stacks(launcher).split("=== rank 1")[1]
        assert launcher.popen.poll() is None
