"""Signals: SIGTERM reaches every rank once and ends with 75; no process survives the launcher."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.launcher import FAST, alive, end, eventually, launched
from zerotrain.runtime.launch.reaper import children

pytestmark = pytest.mark.ranks


COOPERATIVE = """
channel = RankChannel.from_env()
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1))
while not stop:
    time.sleep(0.02)
for _ in range(50):
    time.sleep(0.02)
print(f"signals {len(stop)}", flush=True)
sys.exit(75)
"""

STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
RankChannel.from_env().publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1))
while True:
    time.sleep(0.05)
"""

RANK_0_SAVES = """
saved = []
def save(*_):
    time.sleep(2)
    print("saved", flush=True)
    saved.append(1)
if RANK == 0:
    signal.signal(signal.SIGTERM, save)
RankChannel.from_env().publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1))
while not saved:
    time.sleep(0.02)
sys.exit(75)
"""

RANK_2_LOSES_RANK_1 = (
    """
pid_file = f"{os.environ['ZEROTRAIN_RUN_DIR']}/pid-1"
def lose(*_):
    pid = int(open(pid_file).read())
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.02)
    sys.exit(1)
if RANK == 1:
    open(pid_file, "w").write(str(os.getpid()))
if RANK == 2:
    signal.signal(signal.SIGTERM, lose)
"""
    + RANK_0_SAVES
)

WITH_A_CHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=bool(RANK))
open(f"{os.environ['ZEROTRAIN_RUN_DIR']}/child-{RANK}", "w").write(f"{os.getpid()} {child.pid}")
RankChannel.from_env().publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1))
while True:
    time.sleep(0.05)
"""


def pids(run_dir: Path) -> list[int]:
    """Return the ranks and their children of WITH_A_CHILD."""
    return [int(pid) for rank in (0, 1) for pid in (run_dir / f"child-{rank}").read_text().split()]


def test_sigterm_makes_every_rank_yield(tmp_path: Path) -> None:
    with launched(tmp_path, COOPERATIVE) as launcher:
        launcher.wait_for_ranks()
        launcher.popen.send_signal(signal.SIGTERM)
        eventually(lambda: launcher.report()["stopping"])
        launcher.popen.send_signal(signal.SIGTERM)
        code, output = launcher.finish()
    assert code == 75
    assert output.count("signals 1") == 2


def test_ranks_that_do_not_stop_in_time_are_killed_and_it_reports_terminated(tmp_path: Path) -> None:
    limits = FAST | {"stop_grace_s": 0.3, "exit_margin_s": 60.0}
    with launched(tmp_path, STUBBORN, limits=limits) as launcher:
        launcher.wait_for_ranks()
        launcher.popen.send_signal(signal.SIGTERM)
        eventually(lambda: launcher.report()["stopping"])
        code, output = launcher.finish()
        assert launcher.termination.code == 143
    assert code == 143
    assert "rank.py" in output, "the stacks of the ranks that hung are missing"


@pytest.mark.parametrize(("built_in", "code"), [(False, 75), (True, 143)])
def test_the_rank_that_saves_outlives_those_that_sigterm_ended(
    tmp_path: Path, built_in: bool, code: int
) -> None:
    """A user's own program ends so. The trainer's ranks save together: none waits for a lost peer."""
    with launched(tmp_path, RANK_0_SAVES, built_in=built_in) as launcher:
        launcher.wait_for_ranks()
        launcher.popen.send_signal(signal.SIGTERM)
        ended, output = launcher.finish()
        assert launcher.termination.code == code
    assert (ended, "saved" in output) == (code, not built_in)


def test_a_peer_of_the_rank_that_sigterm_ended_does_not_undo_what_was_saved(tmp_path: Path) -> None:
    with launched(tmp_path, RANK_2_LOSES_RANK_1, ranks=3) as launcher:
        launcher.wait_for_ranks()
        launcher.popen.send_signal(signal.SIGTERM)
        code, output = launcher.finish()
        assert (launcher.termination.code, launcher.termination.rank) == (75, None)
    assert (code, "saved" in output) == (75, True)


def test_sigusr1_to_the_launcher_prints_the_stacks_and_no_rank_dies(tmp_path: Path) -> None:
    with launched(tmp_path, COOPERATIVE) as launcher:
        launcher.wait_for_ranks()
        launcher.popen.send_signal(signal.SIGUSR1)
        eventually(lambda: (launcher.spec.run_dir / "stacks-1.txt").stat().st_size)
        launcher.popen.send_signal(signal.SIGTERM)
        code, output = launcher.finish()
    assert code == 75
    assert "=== rank 1" in output


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_the_signals_for_stacks_pass_over_a_program_without_a_handler(tmp_path: Path, name: str) -> None:
    script = f"kill -{name} $$; sleep 0.1; echo survived"
    with launched(tmp_path, "", command=["/bin/sh", "-c", script], ranks=1) as launcher:
        code, output = launcher.finish()
    assert (code, "survived" in output) == (0, True)


def test_killed_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    with launched(tmp_path, STUBBORN) as launcher:
        launcher.wait_for_ranks()
        ranks = children(launcher.popen.pid)
        assert len(ranks) == 2
        launcher.popen.kill()
        launcher.wait()
        eventually(lambda: not any(alive(pid) for pid in ranks), what="ranks end with their launcher")


def test_killed_rank_ends_its_peers_and_all_they_started(tmp_path: Path) -> None:
    """Rank 1's child even left the session; the launcher adopts and ends it."""
    with launched(tmp_path, WITH_A_CHILD) as launcher:
        launcher.wait_for_ranks()
        everybody = pids(launcher.spec.run_dir)
        assert all(alive(pid) for pid in everybody)
        end(everybody[2], signal.SIGKILL)
        assert launcher.wait() == 137
        assert launcher.termination.rank == 1
        eventually(lambda: not any(alive(pid) for pid in everybody), what="nothing is left behind")


def test_orphans_of_ranks_are_reaped_while_the_rank_runs(tmp_path: Path) -> None:
    """A shell that backgrounds a job and exits leaves its orphan to the launcher."""
    text = """
    import subprocess
    RankChannel.from_env().publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1))
    out = subprocess.run(["/bin/sh", "-c", "sleep 0.2 >/dev/null & echo $!"], capture_output=True, text=True)
    orphan = int(out.stdout)
    for _ in range(5000):
        if not os.path.exists(f"/proc/{orphan}"):
            sys.exit(0)
        time.sleep(0.02)
    sys.exit(1)
    """
    with launched(tmp_path, text, ranks=1) as launcher:
        assert launcher.wait() == 0


def test_ranks_find_their_static_place_in_the_environment(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT ZEROTRAIN_ATTEMPT"
    text = f"""
    print([os.environ[name] for name in {names.split()}], flush=True)
    sys.exit("ZEROTRAIN_LAUNCH" in os.environ)
    """
    with launched(tmp_path, text, world_size=4, node_rank=1) as launcher:
        code, output = launcher.finish()
    assert code == 0
    assert "[rank 2] ['2', '0', '4', '2', '1', '127.0.0.1', '29400', '3']" in output
    assert "[rank 3] ['3', '1', '4', '2', '1', '127.0.0.1', '29400', '3']" in output


def test_output_of_rank_0_is_untouched_and_of_others_prefixed(tmp_path: Path) -> None:
    text = r"""
    sys.stdout.write(f"10%\r20%\rdone {RANK}\nno newline {RANK}")
    """
    with launched(tmp_path, text) as launcher:
        _, output = launcher.finish()
    assert "10%\r20%\rdone 0\nno newline 0\n" in output
    assert "[rank 1] 10%\r20%\rdone 1\n" in output
    assert "[rank 1] no newline 1\n" in output


def test_run_folder_is_left_clean(tmp_path: Path) -> None:
    with launched(tmp_path, "sys.exit(0)") as launcher:
        assert launcher.wait() == 0
        left = sorted(os.listdir(launcher.spec.run_dir))
    assert left == ["report.json"]
