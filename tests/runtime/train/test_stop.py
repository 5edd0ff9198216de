"""SIGTERM to any rank: all ranks stop after the same step, the checkpoint is durable, all end with 75."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_runs import TIMEOUT_S, TrainerRun, job
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.checkpoint.names import committed
from zerotrain.runtime.train.stopping import StopRequest

pytestmark = pytest.mark.ranks


ENDLESS = 100_000


def endless(**changes: Any) -> dict[str, Any]:
    """Return a job that only a signal ends, at a pace of about 50 steps a second."""
    spec = job(steps=ENDLESS, checkpoint={"every_steps": ENDLESS, "keep_last": 3}, **changes)
    spec["model"]["factory_args"] = {"step_seconds": 0.02}
    return spec


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether the process has a handler for the signal."""
    (line,) = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")
    ]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_request_to_one_rank_stops_all_at_the_same_step(tmp_path: Path, rank: int) -> None:
    run = TrainerRun(tmp_path / "a", endless(), world_size=2, checkpoint_dir=tmp_path / "c").start()
    run.wait_for("\nstep 3/")
    run.signal(rank, signal.SIGTERM)
    assert run.wait() == [ExitCode.YIELDED, ExitCode.YIELDED]
    (checkpoint,) = committed(tmp_path / "c")
    assert f"stopped after step {checkpoint.step} on request" in run.log(0)
    assert max(run.losses()) == checkpoint.step
    assert "stop requested" in run.log(rank)
    assert "stop requested" not in run.log(1 - rank)
    again = TrainerRun(
        tmp_path / "b",
        {**run.job, "steps": checkpoint.step + 1},
        world_size=2,
        attempt=2,
        checkpoint_dir=tmp_path / "c",
    ).start()
    assert f"resumed from step {checkpoint.step}" in again.finish()
    assert list(again.losses()) == [checkpoint.step + 1]


def test_signal_during_the_rendezvous_is_not_lost(tmp_path: Path) -> None:
    """Rank 1 gets the request while it waits for rank 0; the run then stops after its first step."""
    run = TrainerRun(tmp_path / "a", endless(), world_size=2, checkpoint_dir=tmp_path / "c")
    run.start(range(1, 2))
    wait_until(lambda: catches(run.processes[0].pid, signal.SIGTERM))
    run.signal(0, signal.SIGTERM)
    run.wait_for("stop requested", rank=1)
    run.start(range(1))
    assert run.wait() == [ExitCode.YIELDED, ExitCode.YIELDED]
    assert [item.step for item in committed(tmp_path / "c")] == [1]


def test_policy_without_saving_on_termination(tmp_path: Path) -> None:
    spec = endless()
    spec["checkpoint"]["on_termination"] = False
    run = TrainerRun(tmp_path / "a", spec, checkpoint_dir=tmp_path / "c").start()
    run.wait_for("\nstep 2/")
    run.signal(0, signal.SIGTERM)
    assert run.wait() == [ExitCode.TERMINATED]
    assert "stopped after step" in run.log(0)
    assert committed(tmp_path / "c") == []


def test_peer_is_gone_so_the_grace_ends_the_rank(tmp_path: Path) -> None:
    """The main thread sits in a collective that never ends; the signal must still be handled."""
    run = TrainerRun(
        tmp_path / "a",
        endless(),
        world_size=2,
        checkpoint_dir=tmp_path / "c",
        env={"ZEROTRAIN_GRACE_SECONDS": "1"},
    ).start()
    run.wait_for("\nstep 2/")
    run.signal(1, signal.SIGSTOP)
    time.sleep(0.3)
    run.signal(0, signal.SIGTERM)
    run.processes[0].join(TIMEOUT_S / 2)
    run.signal(1, signal.SIGKILL)
    assert run.wait() == [ExitCode.TERMINATED, -signal.SIGKILL]
    log = run.log(0)
    assert "no step boundary and checkpoint within 1 s of SIGTERM" in log
    assert re.search(r'File ".*loop\.py", line \d+ in _one_step|_micro_batches', log), "no stacks in the log"


def test_stacks_are_dumped_on_request(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks.txt"
    run = TrainerRun(tmp_path / "a", endless(), env={"ZEROTRAIN_STACKS_FILE": str(stacks)}).start()
    run.wait_for("\nstep 1/")
    run.signal(0, signal.SIGUSR1)
    wait_until(lambda: "Thread" in stacks.read_text())
    run.signal(0, signal.SIGTERM)
    run.wait()
    assert "loop.py" in stacks.read_text()


def test_request_reaches_a_listener_that_comes_late() -> None:
    previous = signal.getsignal(signal.SIGTERM)
    calls: list[str] = []
    try:
        request = StopRequest(grace_seconds=60.0)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: request.requested)
        request.set_callback(lambda: calls.append("late"))
        request.finished()
        assert calls == ["late"]
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, previous)


def test_grace_ends_the_process_unless_it_finished_first() -> None:
    previous = signal.getsignal(signal.SIGTERM)
    codes: list[int] = []
    try:
        request = StopRequest(grace_seconds=0.05, end=codes.append)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: bool(codes))
        assert codes == [ExitCode.TERMINATED]
        assert request.requested
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, previous)
