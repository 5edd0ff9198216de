"""`zerotrain run` restarts as the operator does, resumes, stops on request and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.launcher import alive, eventually
from tests.support.local_jobs import job_file, running, zerotrain

pytestmark = pytest.mark.ranks


FAILS_ONCE = """
if step == 3 and ATTEMPT == 1:
    if RANK == 0:
        time.sleep(600)
    channel.failure(RuntimeError("cosmic ray"))
    sys.exit(1)
"""

WAITS = """
while step == 10 and ATTEMPT == 1 and not (folder / "go").exists():
    time.sleep(0.02)
"""
"""Code that holds the first attempt until the test has done what it wants to do to it."""


def test_job_runs_to_its_end_and_reports_it(tmp_path: Path) -> None:
    done = zerotrain("run", job_file(tmp_path), "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny is complete" in done.stdout
    assert "steps:      5 of 5" in done.stdout
    assert "loss:       4.5" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "tiny" / "rank-1").read_text() == "5"
    assert (
        json.loads((tmp_path / "run" / "ds_config.json").read_text())["train_micro_batch_size_per_gpu"] == 1
    )


def test_failure_is_restarted_from_the_checkpoint(tmp_path: Path) -> None:
    done = zerotrain("run", job_file(tmp_path, FAILS_ONCE), "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 1 ended with 1 at step 2" in done.stdout
    assert "attempts:   2 (restarts: app 1)" in done.stdout
    termination = json.loads((tmp_path / "run" / "attempts" / "1" / "termination.json").read_text())
    assert (termination["rank"], termination["exception"]) == (1, "RuntimeError: cosmic ray")


def test_no_more_restarts_than_allowed(tmp_path: Path) -> None:
    job = job_file(tmp_path, "sys.exit(7)")
    done = zerotrain("run", job, "--run-dir", tmp_path / "run", "--max-restarts", "1")
    assert done.returncode == 7
    assert "attempts:   2 (restarts: app 1)" in done.stdout
    assert "exit code:  7 (the training program failed, rank" in done.stdout


def test_a_rule_ends_the_run(tmp_path: Path) -> None:
    policy = {"rules": [{"onMessagePatterns": ["bad sector$"], "action": "FailJob"}]}
    program = "print('disk nvme0n1: bad sector', flush=True)\nsys.exit(7)"
    job = job_file(tmp_path, program, failurePolicy=policy)
    done = zerotrain("run", job, "--run-dir", tmp_path / "run")
    assert done.returncode == 7
    assert "failurePolicy.rules[0] requires FailJob" in done.stdout
    assert "attempts:   1\n" in done.stdout


@pytest.mark.parametrize("code", [64, 65, 66, 69, 83])
def test_what_the_user_must_correct_is_never_retried(tmp_path: Path, code: int) -> None:
    job = job_file(tmp_path, f"print('data/x.txt: no such file', flush=True)\nsys.exit({code})")
    done = zerotrain("run", job, "--run-dir", tmp_path / "run")
    assert done.returncode == code
    assert "attempts:   1\n" in done.stdout
    assert "cause:      data/x.txt: no such file" in done.stdout
    assert "next:" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_checkpoints_and_the_same_command_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    job, run_dir = job_file(tmp_path, steps=5000), tmp_path / "run"
    with running(job, run_dir) as command:
        command.wait_for_step(3)
        command.popen.send_signal(number)
        code, output = command.finish()
        # These ranks do not wait for each other; the one that is ahead must step again, too.
        stopped_at = max(rank.step for rank in command.last_report(1).ranks)
    assert code == 75
    assert "tiny stopped on request" in output
    assert 3 <= stopped_at < 5000
    with running(job, run_dir) as command:
        command.wait_for_step(stopped_at + 1)
        assert command.launcher(2)
        command.popen.send_signal(number)
        assert command.finish()[0] == 75
        assert command.last_report(2).ranks[0].step > stopped_at


def test_killed_rank_is_recovered_from(tmp_path: Path) -> None:
    with running(job_file(tmp_path, WAITS, steps=40), tmp_path / "run") as command:
        ranks = command.ranks(1)
        command.wait_for_step(3)
        os.kill(ranks[1], signal.SIGKILL)
        (tmp_path / "run" / "checkpoints" / "tiny" / "go").touch()
        code, output = command.finish()
    assert code == 0, output
    assert "ended with 137" in output
    assert "attempts:   2" in output
    assert not any(alive(pid) for pid in ranks)


def test_killed_launcher_is_recovered_from(tmp_path: Path) -> None:
    with running(job_file(tmp_path, WAITS, steps=40), tmp_path / "run") as command:
        launcher, ranks = command.launcher(1), command.ranks(1)
        command.wait_for_step(3)
        os.kill(launcher, signal.SIGKILL)
        code, output = command.finish()
    assert code == 0, output
    assert "attempt 1 ended with 137" in output
    assert "attempts:   2" in output
    assert not any(alive(pid) for pid in ranks)


def test_killed_command_lets_the_ranks_checkpoint_and_end(tmp_path: Path) -> None:
    with running(job_file(tmp_path, steps=5000), tmp_path / "run") as command:
        processes = [command.launcher(1), *command.ranks(1)]
        command.wait_for_step(3)
        command.popen.kill()
        eventually(lambda: not any(alive(pid) for pid in processes), what="nothing is left behind")
        termination = json.loads((command.run_dir / "attempts" / "1" / "termination.json").read_text())
    assert termination["code"] == 75


def test_yield_by_another_process_is_resumed_without_charge(tmp_path: Path) -> None:
    job = job_file(tmp_path, "if step == 3 and ATTEMPT == 1: stop.append(1)")
    done = zerotrain("run", job, "--run-dir", tmp_path / "run", "--max-restarts", "0")
    assert done.returncode == 0, done.stdout
    assert "restarts: preemption 1" in done.stdout


def test_attempts_are_never_numbered_twice(tmp_path: Path) -> None:
    job = job_file(tmp_path)
    for attempt in (1, 2):
        done = zerotrain("run", job, "--run-dir", tmp_path / "run")
        assert f"attempt {attempt}: 2 ranks" in done.stdout
