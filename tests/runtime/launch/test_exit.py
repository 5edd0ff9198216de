"""The container's exit code is the first failing rank's, and the termination message has the reason."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.launcher import FAST, launched
from zerotrain.contract.progress import MAX_TERMINATION_BYTES, RankEnd, Termination

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(75)", 75),
        ("sys.exit(75 if RANK else 0)", 75),
        ("sys.exit(65)", 65),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("raise ValueError('no such thing')", 1),
    ],
)
def test_code_of_the_ranks_becomes_the_containers(tmp_path: Path, text: str, code: int) -> None:
    with launched(tmp_path, text) as launcher:
        assert launcher.finish()[0] == code
        assert launcher.termination.code == code
        assert launcher.termination.attempt == 3


def test_report_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    text = """
    os.makedirs(os.path.join(os.environ["ZEROTRAIN_RUN_DIR"], "report.json", "in-the-way"), exist_ok=True)
    sys.exit(75)
    """
    with launched(tmp_path, text) as launcher:
        code, output = launcher.finish()
        assert (code, launcher.termination.code) == (75, 75)
    assert "report.json: " in output


def test_first_failure_counts_and_the_others_are_ended(tmp_path: Path) -> None:
    """Rank 0 hangs; rank 1's code and last line are the worker's, rank 0's SIGKILL is not."""
    text = """
    if RANK == 0:
        time.sleep(600)
    time.sleep(0.1)
    print("weights.bin not found", flush=True)
    sys.exit(66)
    """
    with launched(tmp_path, text) as launcher:
        code, output = launcher.finish()
        message = launcher.termination
    assert (code, message.rank, message.signal) == (66, 1, None)
    assert message.last_line == "weights.bin not found"
    assert "[rank 1] weights.bin not found" in output


def test_a_peer_that_fails_after_it_does_not_take_the_blame(tmp_path: Path) -> None:
    """Rank 1 dies by SIGKILL; rank 0 notices the lost peer within the grace and exits 1."""
    text = """
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    raise RuntimeError("connection closed by peer")
    """
    with launched(tmp_path, text, limits=FAST | {"peer_grace_s": 60.0}) as launcher:
        assert launcher.wait() == 137
        assert (launcher.termination.rank, launcher.termination.signal) == (1, signal.SIGKILL)


def test_a_rank_that_announced_its_failure_first_is_the_first(tmp_path: Path) -> None:
    """The rank tears down slowly, so that its peer ends before it does."""
    text = """
    channel = RankChannel.from_env()
    if RANK == 0:
        channel.failure(FileNotFoundError("no data in /data"))
        time.sleep(0.5)
        sys.exit(65)
    time.sleep(0.3)
    sys.exit(1)
    """
    with launched(tmp_path, text, limits=FAST | {"peer_grace_s": 60.0}) as launcher:
        assert launcher.wait() == 65
        assert launcher.termination.exception == "FileNotFoundError: no data in /data"


def test_a_rank_that_announced_its_failure_and_hangs_is_ended(tmp_path: Path) -> None:
    text = """
    RankChannel.from_env().failure(RuntimeError("stuck in teardown"))
    time.sleep(600)
    """
    with launched(tmp_path, text, ranks=1, limits=FAST | {"failing_rank_s": 1.0}) as launcher:
        assert launcher.wait() == 137
        assert launcher.termination.exception == "RuntimeError: stuck in teardown"


def test_peers_are_given_the_grace_to_end_by_themselves(tmp_path: Path) -> None:
    text = """
    if RANK == 1:
        sys.exit(1)
    time.sleep(0.5)
    print("said goodbye", flush=True)
    """
    with launched(tmp_path, text, limits=FAST | {"peer_grace_s": 60.0}) as launcher:
        code, output = launcher.finish()
    assert code == 1
    assert "said goodbye" in output


def test_termination_message_is_bounded_and_names_exception_and_checkpoint(tmp_path: Path) -> None:
    text = r"""
    channel = RankChannel.from_env()
    durable = CheckpointProgress(step=40, path="/checkpoints/step-40", time=1.5)
    channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=47, checkpoint=durable))
    channel.failure(ValueError("\N{FIRE}" * 100_000))
    print("\N{FIRE}" * 100_000)
    os._exit(1)  # as the trainer ends: nothing is flushed on the way out
    """
    with launched(tmp_path, text, ranks=1) as launcher:
        assert launcher.finish()[0] == 1
        assert len((tmp_path / "termination.json").read_bytes()) <= MAX_TERMINATION_BYTES
        message = launcher.termination
    assert message.exception is not None
    assert message.exception.startswith("ValueError: \N{FIRE}")
    assert message.last_line is not None
    assert message.checkpoint is not None
    assert (message.step, message.checkpoint.step) == (47, 40)


def test_termination_message_names_every_rank_that_failed(tmp_path: Path) -> None:
    text = """
    if RANK == 1:
        RankChannel.from_env().failure(RuntimeError("lost its peer"))
        time.sleep(0.3)
        os._exit(1)
    if RANK == 2:
        sys.exit(0)
    sys.exit(65)
    """
    with launched(tmp_path, text, ranks=3, limits=FAST | {"peer_grace_s": 60.0}) as launcher:
        assert launcher.finish()[0] == 65
        message = launcher.termination
    assert (message.code, message.rank) == (65, 0)
    assert message.also_failed == (RankEnd(rank=1, code=1, reason="RuntimeError: lost its peer"),)


def test_yielded_worker_names_its_durable_checkpoint(tmp_path: Path) -> None:
    text = """
    channel = RankChannel.from_env()
    durable = CheckpointProgress(step=12, path="/checkpoints/step-12", time=1.5)
    channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.DONE, step=12, checkpoint=durable))
    channel.close()
    sys.exit(75)
    """
    with launched(tmp_path, text) as launcher:
        assert launcher.wait() == 75
        message = launcher.termination
    assert (message.code, message.rank, message.step) == (75, None, 12)
    assert message.checkpoint is not None
    assert message.checkpoint.path == "/checkpoints/step-12"


def test_name_that_never_resolves_ends_with_82(tmp_path: Path) -> None:
    with launched(
        tmp_path, "sys.exit(0)", master_addr="nowhere.invalid", rendezvous_timeout_seconds=0.5
    ) as launcher:
        assert launcher.wait() == 82
        assert "nowhere.invalid" in str(launcher.termination.exception)


def test_stop_while_the_name_is_awaited_ends_at_once(tmp_path: Path) -> None:
    with launched(
        tmp_path, "sys.exit(0)", master_addr="nowhere.invalid", rendezvous_timeout_seconds=86_400.0
    ) as launcher:
        assert launcher.port
        launcher.popen.send_signal(signal.SIGTERM)
        assert launcher.wait() == 143


def test_command_that_does_not_exist_is_the_users_to_correct(tmp_path: Path) -> None:
    with launched(tmp_path, "", command=["/no/such/program"]) as launcher:
        code, output = launcher.finish()
        assert launcher.termination.last_line is not None
    assert code == 69
    assert "cannot start '/no/such/program'" in output


def test_incomplete_environment_is_refused_with_69(tmp_path: Path) -> None:
    with launched(tmp_path, "sys.exit(0)", token_path=tmp_path / "missing") as launcher:
        code, output = launcher.finish()
    assert code == 69
    assert "missing" in output


def test_taken_port_is_refused_with_69(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "termination.json").touch()
    with launched(tmp_path / "other", "time.sleep(600)") as first:
        with launched(tmp_path, "sys.exit(0)", http_port=first.port) as second:
            assert second.wait() == 69
            assert "in use" in str(second.termination.exception)
        os.kill(first.popen.pid, signal.SIGTERM)


def test_message_written_by_the_launcher_is_read_by_the_contract(tmp_path: Path) -> None:
    with launched(tmp_path, "sys.exit(64)", ranks=1) as launcher:
        launcher.wait()
    assert Termination.from_json((tmp_path / "termination.json").read_text()).rank == 0
