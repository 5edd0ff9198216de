"""Stacks of ranks that move, and of one that holds the interpreter's lock: reported, and no rank dies."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.launch.test_hang import stacks, token_file
from tests.support.launcher import eventually, launched, rank_program
from zerotrain.runtime.launch.output import OutputPump, Sink
from zerotrain.runtime.launch.process import RankProcess
from zerotrain.runtime.launch.stacks import NOTHING, collect_stacks

pytestmark = pytest.mark.ranks


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

WAITS = """
touch "$ZEROTRAIN_RUN_DIR/shell"
while [ ! -e "$ZEROTRAIN_RUN_DIR/go" ]; do sleep 0.05; done
echo survived
"""
"""A shell that always has a sleeping child, until it may end."""

REPORTS = """
channel = RankChannel.from_env()
channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1))
while not channel.connected:
    time.sleep(0.02)
"""

IN_A_SHELL = (
    REPORTS
    + """
time.sleep(600)
"""
)

BECOMES_A_SHELL = (
    REPORTS
    + f"""
os.execv("/bin/sh", ["sh", "-c", {WAITS!r}])
"""
)

SIGNALS = 1500
"""Number of signals; a dump from within the signal handler ended the process after some two hundred."""


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


def test_a_rank_that_keeps_the_interpreters_lock_is_reported_too(tmp_path: Path) -> None:
    with launched(tmp_path, HOLDER, token_path=token_file(tmp_path)) as launcher:
        launcher.wait_for_ranks()
        # From then on no code of rank 0 can run.
        eventually(lambda: "in holds_the_lock" in stacks(launcher).split("=== rank 1")[0])
        assert "rank.py" in stacks(launcher).split("=== rank 1")[1]
        assert launcher.popen.poll() is None


@pytest.mark.parametrize("runs", ["a shell", "a program in a shell", "what a program became"])
def test_a_process_that_cannot_dump_outlives_the_question(tmp_path: Path, runs: str) -> None:
    """The second signal follows if the first one had no effect; its default action ends the process."""
    program = rank_program(tmp_path, IN_A_SHELL if runs == "a program in a shell" else BECOMES_A_SHELL)
    command = {
        "a shell": ["/bin/sh", "-c", WAITS],
        "a program in a shell": ["/bin/sh", "-c", f"{' '.join(program)} & {WAITS}"],
        "what a program became": program,
    }[runs]
    with launched(tmp_path, "", ranks=1, command=command, token_path=token_file(tmp_path)) as launcher:
        eventually(lambda: launcher.report()["ranks"][0]["step"] or runs == "a shell")
        # A signal that is sent at the moment of the exec ends the shell, whatever was looked at before.
        eventually(lambda: (launcher.spec.run_dir / "shell").exists())
        eventually(lambda: "pid" in stacks(launcher))
        assert NOTHING in stacks(launcher)
        assert "ended" not in stacks(launcher)
        (launcher.spec.run_dir / "go").touch()
        code, output = launcher.finish()
    assert (code, "survived" in output) == (0, True)


def test_a_process_that_is_not_yet_a_rank_is_not_asked(tmp_path: Path) -> None:
    """Both signals would end the process until the guard runs."""
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE) as popen:
        try:
            assert popen.stdout is not None
            pump = OutputPump(0, popen.stdout, Sink(sys.stdout.buffer))
            early = RankProcess(rank=0, popen=popen, pump=pump, stacks_path=tmp_path / "stacks.txt")
            assert NOTHING in asyncio.run(collect_stacks([early], timeout_s=0.1))
            assert popen.poll() is None
        finally:
            popen.kill()
