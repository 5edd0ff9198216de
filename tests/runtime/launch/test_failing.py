"""A rank that reports its failure: stuck after it, it ends the worker; going on, it retracts the failure."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launcher import FAST, launched, rank_program, spec_for
from zerotrain.contract.progress import Phase, Progress
from zerotrain.contract.worker_environment import LaunchSpec
from zerotrain.runtime.launch import supervisor as supervising
from zerotrain.runtime.launch.container_exit import RankExit
from zerotrain.runtime.launch.rank_table import RankTable
from zerotrain.runtime.launch.supervisor import Limits, Supervisor

FIRST, SECOND = "12/1", "12/2"
"""Channels of one process."""


class Ranks:
    """A stand-in for the processes."""

    def __init__(self, spec: LaunchSpec, board: RankTable) -> None:
        self.ended: list[RankExit] = []
        self.killed = False
        made.append(self)

    def exits(self) -> list[RankExit]:
        return self.ended

    def runs(self, rank: int) -> bool:
        return rank not in [end.rank for end in self.ended]

    def signal(self, number: signal.Signals) -> None:
        assert number is signal.SIGTERM

    def kill(self) -> None:
        self.killed = True


made: list[Ranks] = []


def at(phase: Phase, step: int) -> Progress:
    return Progress(rank=0, attempt=3, phase=phase, step=step, heartbeat_at=1.0)


Events = Callable[[RankTable, Supervisor, Ranks], None]


def reports(*records: Progress) -> Events:
    def happens(board: RankTable, *_: object) -> None:
        for record in records:
            board.progressed(0, record)

    return happens


def ends(status: int) -> Events:
    return lambda _board, _supervisor, ranks: ranks.ended.append(
        RankExit(rank=0, status=status, at=time.monotonic())
    )


def stops(*left: int) -> Events:
    """A stop is asked for, and these ranks ended of it before rank 0 reported that it fails."""

    def happens(board: RankTable, supervisor: Supervisor, ranks: Ranks) -> None:
        supervisor.request_stop()
        ranks.ended += [RankExit(rank=rank, status=-signal.SIGTERM, at=0.0) for rank in left]

    return happens


def is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *events: Events, built_in: bool = False
) -> tuple[bool, str | None]:
    """Return whether the worker was killed, and its failure.

    Rank 0 fails at step 4, and then these events happen.
    """
    monkeypatch.setattr(supervising, "RankGroup", Ranks)

    async def run() -> tuple[bool, str | None]:
        spec = spec_for(folder, ranks=3)
        board = RankTable(spec, built_in_trainer=built_in)
        supervisor = Supervisor(spec, board, limits=Limits(failing_rank_s=0.0))
        board.connected(0, FIRST)
        board.progressed(0, at(Phase.STEP, 4))
        board.failing(0, "MemoryError: too large", FIRST)
        supervisor.rank_announced_failure(0)
        for happens in events:
            happens(board, supervisor, made[-1])
        await asyncio.sleep(0.05)
        return made[-1].killed, board.failure_of(0)[0]

    return asyncio.run(run())


@pytest.mark.unit
@pytest.mark.parametrize(
    "events",
    [
        [],
        [reports(at(Phase.STEP, 4), at(Phase.STEP, 4))],
        [reports(at(Phase.CHECKPOINT, 4), at(Phase.STEP, 4), at(Phase.DONE, 4))],
        [lambda board, *_: board.connected(0, FIRST)],
    ],
    ids=["is silent", "repeats itself", "saves and comes back", "connects again"],
)
def test_what_a_rank_still_reports_while_it_is_stuck_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Events]
) -> None:
    assert is_killed(tmp_path, monkeypatch, *events) == (True, "MemoryError: too large")


@pytest.mark.unit
@pytest.mark.parametrize(
    "events",
    [
        [reports(at(Phase.STEP, 5))],
        [reports(at(Phase.STEP, 2))],
        [reports(at(Phase.INIT, 0))],
        [lambda board, *_: board.connected(0, SECOND)],
    ],
    ids=["the next step", "an earlier step", "from the start", "over a new channel"],
)
def test_a_rank_that_goes_on_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Events]
) -> None:
    assert is_killed(tmp_path, monkeypatch, *events) == (False, None)


@pytest.mark.unit
@pytest.mark.parametrize("status", [0, 1])
def test_the_end_of_the_rank_is_classified_as_every_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The peers have the same grace as after any failure."""
    assert is_killed(tmp_path, monkeypatch, ends(status)) == (False, "MemoryError: too large")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("left", "built_in", "killed"), [([1], False, False), ([], False, True), ([1], True, True)]
)
def test_during_a_stop_it_ends_whom_its_end_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: list[int], built_in: bool, killed: bool
) -> None:
    """The end of a peer by SIGTERM does not stop the rank that saves for all."""
    assert is_killed(tmp_path, monkeypatch, stops(*left), built_in=built_in)[0] is killed


CAUGHT = """
channel = RankChannel.from_env()
channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=4))
channel.failure(MemoryError("too large"))
"""

GOES_ON = """
channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=5))
channel.close()
os._exit(7)
"""

BEGINS_ANEW = """
channel.close()
channel = RankChannel.from_env()
channel.publish(Progress(rank=RANK, attempt=ATTEMPT))
channel.close()
os._exit(7)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("way", [GOES_ON, BEGINS_ANEW], ids=["goes on", "begins anew"])
def test_a_failure_that_was_caught_is_not_reported_as_the_reason_of_a_later_end(
    tmp_path: Path, way: str
) -> None:
    with launched(tmp_path, CAUGHT + way, ranks=1) as launcher:
        assert launcher.wait() == 7
        assert launcher.termination.exception is None


@pytest.mark.ranks
def test_a_second_program_of_a_shell_does_not_inherit_the_failure_of_the_first(tmp_path: Path) -> None:
    first = " ".join(rank_program(tmp_path, f"{CAUGHT}\nif len(sys.argv) == 1:\n    os._exit(1)\n{GOES_ON}"))
    command = ["/bin/sh", "-c", f"{first} || {first} second"]
    with launched(tmp_path, "", ranks=1, command=command) as launcher:
        assert launcher.wait() == 7
        assert launcher.termination.exception is None


SAVES_FOR_ALL = """
pid_file = f"{os.environ['ZEROTRAIN_RUN_DIR']}/pid-1"
saved = []
def save(*_):
    time.sleep(3)
    saved.append(1)
def lose(*_):
    pid = int(open(pid_file).read())
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.02)
    channel.failure(ConnectionError("rank 1 is gone"))
    os._exit(1)
if RANK == 1:
    open(pid_file, "w").write(str(os.getpid()))
else:
    signal.signal(signal.SIGTERM, lose if RANK else save)
channel = RankChannel.from_env()
channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1))
while not saved:
    time.sleep(0.02)
sys.exit(75)
"""


@pytest.mark.ranks
def test_a_peer_that_reports_why_it_ends_leaves_the_one_that_saves_its_grace(tmp_path: Path) -> None:
    limits = FAST | {"failing_rank_s": 0.1}
    with launched(tmp_path, SAVES_FOR_ALL, ranks=3, limits=limits) as launcher:
        launcher.wait_for_ranks()
        launcher.popen.send_signal(signal.SIGTERM)
        assert launcher.wait() == 75
        assert launcher.termination.rank is None
