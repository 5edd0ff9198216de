"""A rank stopped by SIGSTOP behind the real launcher: the report, the accused rank, the stacks."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.launcher import RunningLauncher, eventually, launched, spec_for
from tests.support.ports import free_port
from tests.support.trainer_runs import TEXT, config, job
from zerotrain.contract import channel_token
from zerotrain.contract.progress import Motion, Phase, Progress
from zerotrain.contract.worker_http import MAX_STACKS_BYTES, WorkerReport, bearer
from zerotrain.operator.reconcile import inspection
from zerotrain.operator.reconcile.hangs import HangLimits, stands_still
from zerotrain.runtime.launch.activity import KEPT_STEPS, MotionTracker
from zerotrain.runtime.launch.rank_table import RankTable

TOKEN = channel_token.derive(b"k" * 32, "uid-1", 3)
QUIET_S = 12.0
"""Seconds longer than a heartbeat's interval, and for the test shorter than the operator's limit."""


def token_file(folder: Path) -> Path:
    path = folder / "token"
    path.write_text(TOKEN)
    return path


def report_of(launcher: RunningLauncher) -> WorkerReport:
    return WorkerReport.from_json(launcher.request("/progress")[1].decode())


def motion_of(launcher: RunningLauncher, rank: int) -> Motion:
    return report_of(launcher).ranks[rank].motion or Motion(idle_seconds=0.0, silent_seconds=0.0)


def stacks(launcher: RunningLauncher) -> str:
    status, body = launcher.request("/stacks", headers=bearer(TOKEN))
    assert status == 200
    return body.decode()


def trainer_file(folder: Path) -> Path:
    """Write the training file of two endless real ranks with about twenty steps a second."""
    spec = job(steps=100_000, checkpoint={"every_steps": 100_000}, data_path=str(folder / "data.txt"))
    spec["model"]["factory_args"] = {"step_seconds": 0.05}
    (folder / "data.txt").write_text(TEXT)
    (folder / "train.json").write_text(json.dumps(spec))
    (folder / "ds_config.json").write_text(json.dumps(config()))
    return folder / "train.json"


@pytest.mark.ranks
def test_a_stopped_rank_of_a_real_training_is_distinguished_from_the_rank_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "SILENT_S", QUIET_S)
    trainer = [sys.executable, "-m", "zerotrain.runtime.train"]
    with launched(
        tmp_path,
        "",
        command=trainer,
        token_path=token_file(tmp_path),
        master_port=free_port(),
        train_spec_path=trainer_file(tmp_path),
    ) as launcher:
        eventually(lambda: motion_of(launcher, 0).steps_seen >= 20, what="twenty steps")
        assert (motion_of(launcher, 0).step_p99_seconds or 0.0) > 0.0, "what a step takes is learned"
        (pid,) = re.findall(r"=== rank 1 \(pid (\d+),", stacks(launcher))
        os.kill(int(pid), signal.SIGSTOP)
        eventually(lambda: motion_of(launcher, 1).silent_seconds >= QUIET_S, what="rank 1 is silent")
        report = report_of(launcher)
        look = inspection.inspect({0: report}, attempt=3, at=datetime.now(UTC))
        assert stands_still(HangLimits(min_s=QUIET_S), look), look
        assert look.slow_rank is not None
        assert (look.slow_rank.rank, "reports nothing" in look.slow_rank.why) == (1, True)
        assert (report.ranks[0].collective_wait_seconds or 0.0) > 0.0, "rank 0 waits for it"
        output = stacks(launcher)
        assert "stopped by a signal" in output[output.index("=== rank 1") :]
        assert "runtime/comm/" in output[: output.index("=== rank 1")], "rank 0 stands in a collective"
        os.kill(int(pid), signal.SIGCONT)
        before = report.ranks[0].step
        eventually(lambda: report_of(launcher).ranks[0].step > before, what="the step advances again")
        assert motion_of(launcher, 0).idle_seconds < QUIET_S


TRAINING = """
channel = RankChannel.from_env()
channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1))
time.sleep(600)
"""


@pytest.mark.ranks
def test_only_who_has_the_attempts_token_may_interrupt_the_ranks(tmp_path: Path) -> None:
    other = channel_token.derive(b"k" * 32, "uid-1", 2)
    with launched(tmp_path, TRAINING, token_path=token_file(tmp_path)) as launcher:
        launcher.wait_for_ranks()
        assert launcher.request("/stacks")[0] == 401
        assert launcher.request("/stacks", headers=bearer(other))[0] == 403
        assert "rank.py" in stacks(launcher)


DEEP = """
import faulthandler
channel = RankChannel.from_env()
names = [f"a_function_with_a_very_long_name_{number}_" + "x" * 400 for number in range(95)]
source = "".join(f"def {name}(): return {later}()\\n" for name, later in zip(names, names[1:]))
exec(compile(source + f"def {names[-1]}(): time.sleep(600)\\n", "deep.py", "exec"))
import threading
for _ in range(40):
    threading.Thread(target=globals()[names[0]], daemon=True).start()
channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1))
globals()[names[0]]()
"""


@pytest.mark.ranks
def test_the_answer_is_bounded_and_every_rank_has_its_share(tmp_path: Path) -> None:
    with launched(tmp_path, DEEP, token_path=token_file(tmp_path)) as launcher:
        launcher.wait_for_ranks()
        text = stacks(launcher)
    assert len(text.encode()) <= MAX_STACKS_BYTES
    first, second = text.split("=== rank 1")
    assert "(cut: each rank has" in first
    assert "(cut: each rank has" in second


@pytest.mark.ranks
def test_a_rank_cannot_choose_how_it_is_timed_and_one_that_never_reported_is_not_blamed(
    tmp_path: Path,
) -> None:
    text = """
    from dataclasses import replace
    from zerotrain.contract.progress import Motion
    if RANK:
        time.sleep(600)
    liar = Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1)
    RankChannel.from_env().publish(replace(liar, motion=Motion(idle_seconds=9e9, silent_seconds=9e9)))
    time.sleep(600)
    """
    with launched(tmp_path, text) as launcher:
        eventually(lambda: report_of(launcher).ranks[0].step == 1)
        report = report_of(launcher)
    assert report.ranks[0].motion is not None
    assert report.ranks[0].motion.idle_seconds < 1e6
    assert report.ranks[1].motion is None


@pytest.mark.unit
def test_a_rank_that_has_ended_is_not_silent(tmp_path: Path) -> None:
    """An operator may know of ends, or may be older and only see the silence."""
    now = [0.0]
    board = RankTable(spec_for(tmp_path, ranks=2), built_in_trainer=True, monotonic=lambda: now[0])
    for rank in (0, 1):
        board.set_running(rank, True)
        board.progressed(rank, Progress(rank=rank, attempt=3, phase=Phase.DONE, step=9))
    now[0] = 10.0
    board.set_running(1, False)
    now[0] = 400.0
    runs, ended = (rank.motion for rank in WorkerReport.from_json(board.report().to_json()).ranks)
    assert runs == Motion(idle_seconds=400.0, silent_seconds=400.0)
    assert ended == Motion(idle_seconds=400.0, silent_seconds=0.0, ended_seconds=390.0)


def record(phase: Phase, step: int) -> Progress:
    return Progress(rank=0, attempt=1, phase=phase, step=step)


@pytest.mark.unit
def test_the_pace_of_steps_is_learned_apart_from_the_first_step_and_from_checkpoints() -> None:
    tracker, now = MotionTracker(0.0), 0.0
    for phase, step, at in (
        (Phase.FIRST_STEP, 0, 60.0),
        (Phase.STEP, 1, 400.0),
        (Phase.STEP, 2, 402.0),
        (Phase.STEP, 4, 408.0),  # the record of step 3 was dropped
        (Phase.CHECKPOINT, 4, 409.0),  # the time before it belongs to step 5
        (Phase.STEP, 4, 500.0),
        (Phase.STEP, 5, 505.0),
    ):
        now = at
        tracker.progress_arrived(record(phase, step), now)
    tracker.progress_arrived(record(Phase.STEP, 5), 507.0)  # a heartbeat
    motion = tracker.motion(510.0)
    assert (motion.idle_seconds, motion.silent_seconds) == (5.0, 3.0)
    assert (motion.step_p99_seconds, motion.longest_step_seconds, motion.steps_seen) == (6.0, 6.0, 4)
    assert (motion.first_step_seconds, motion.longest_checkpoint_seconds) == (340.0, 91.0)


@pytest.mark.unit
def test_a_program_without_a_phase_for_its_first_step_reports_nothing_of_it() -> None:
    tracker = MotionTracker(0.0)
    tracker.progress_arrived(record(Phase.STEP, 501), 400.0)
    tracker.progress_arrived(record(Phase.STEP, 502), 420.0)
    motion = tracker.motion(425.0)
    assert (motion.first_step_seconds, motion.longest_step_seconds, motion.steps_seen) == (None, 20.0, 1)


@pytest.mark.unit
def test_a_program_that_reports_every_hundredth_step_stands_still_for_a_hundred() -> None:
    tracker = MotionTracker(0.0)
    for number in range(1, 4):
        tracker.progress_arrived(record(Phase.STEP, 100 * number), 400.0 * number)
    motion = tracker.motion(1200.0)
    assert (motion.step_p99_seconds, motion.longest_step_seconds, motion.steps_seen) == (4.0, 400.0, 200)


@pytest.mark.unit
def test_one_slow_step_in_a_hundred_does_not_set_the_percentile_but_is_remembered() -> None:
    tracker, now = MotionTracker(0.0), 0.0
    for step in range(1, KEPT_STEPS + 1):
        now += 60.0 if step == 100 else 1.0
        tracker.progress_arrived(record(Phase.STEP, step), now)
    motion = tracker.motion(now)
    assert motion.step_p99_seconds == 1.0
    assert motion.longest_step_seconds == 60.0
