"""Twenty-four hours of a slow but healthy job give no alarm; a hang in the middle of it is found and named.

The launcher's own board (its tracker of motion), the poller's own rules for polling all workers, and the real
reconcile, on one simulated clock. Steps of two minutes with outliers of a factor of eight, a checkpoint of up
to forty minutes every hour, restarts with a slow start, polls that are lost.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.operator.reconcile_builders import job, pending, ready, settled
from zerotrain.contract.progress import Phase, Progress
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.reconcile import CollectStacks, Observed, StacksView, reconcile
from zerotrain.operator.reconcile.hangs import HangLimits, stands_still, suspect_after_s
from zerotrain.operator.reconcile.inspection import Inspection, inspect
from zerotrain.runtime.launch.activity import MotionTracker

pytestmark = pytest.mark.ranks


START = datetime(2026, 1, 1, tzinfo=UTC)
DAY_S = 24 * 3600
POLL_S = 30
"""Seconds between two polls, as with three thousand running jobs."""

RANKS = 4
LIMITS = HangLimits.read(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """Timing of the simulated program. Times in seconds."""

    step_s: float = 120.0
    spread: float = 0.3
    """Standard deviation of a step's logarithm."""
    outliers: tuple[float, float] = (4.0, 8.0)
    """Range of the factor by which one step in a hundred is longer."""
    start_s: tuple[float, float] = (60, 1700)
    """Range of the start's duration, as for pulling a model of terabytes from a slow file system."""
    first_step_s: tuple[float, float] | None = (200, 1700)
    """Range of the first step's duration.

    None: a program of the user's own, which first reports when a step is done. The start includes it.
    """
    every: int = 1
    """Steps from one report to the next."""


SLOW = Life()


@dataclass
class Ranks:
    """Four ranks of one attempt in lockstep, and the motion that their launchers saw."""

    attempt: int
    now: float
    random: random.Random
    life: Life = SLOW
    resumed: int = 0
    """Step from which the attempt resumes."""
    phase: Phase = Phase.INIT
    step: int = 0
    until: float = 0.0
    hung: int | None = None
    """The rank that hangs for good."""
    checkpoint_at: float = 0.0
    first_took_s: float | None = None
    """Duration of the first step, where the program reports it separately."""
    trackers: list[MotionTracker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trackers = [MotionTracker(self.now) for _ in range(RANKS)]
        self.until = self.now + self.random.uniform(*self.life.start_s)
        self.checkpoint_at = self.now + 3600

    def to(self, now: float) -> None:
        """Advance to `now`."""
        while self.hung is None and self.until <= now:
            self.now = self.until
            self._next()
            self._say()
        self.now = now
        for number, tracker in enumerate(self.trackers):
            if number != self.hung:
                tracker.message_arrived(now)

    def _next(self) -> None:
        match self.phase:
            case Phase.INIT if self.life.first_step_s is not None:
                lasts = self.first_took_s = self.random.uniform(*self.life.first_step_s)
                self.phase, self.step = Phase.FIRST_STEP, self.resumed
            case Phase.INIT:
                self.phase, self.step, lasts = Phase.STEP, self.resumed + self.life.every, self._steps_s()
            case Phase.STEP if self.now >= self.checkpoint_at:
                self.phase, lasts = Phase.CHECKPOINT, self.random.choice([90, 300, 1700])
                self.checkpoint_at = self.now + 3600
            case Phase.CHECKPOINT:
                self.phase, lasts = Phase.STEP, self._steps_s()
            case _:
                self.phase, self.step, lasts = Phase.STEP, self.step + self.life.every, self._steps_s()
        self.until = self.now + lasts

    def _steps_s(self) -> float:
        return sum(self._step_s() for _ in range(self.life.every))

    def _step_s(self) -> float:
        life, outlier = self.life, self.random.random() < 0.01
        times = self.random.uniform(*life.outliers) if outlier else self.random.lognormvariate(0, life.spread)
        return life.step_s * times

    def _say(self) -> None:
        for rank, tracker in enumerate(self.trackers):
            tracker.progress_arrived(self.record(rank), self.now)

    def record(self, rank: int) -> Progress:
        wait = 0.0 if rank == self.hung else 60.0
        return Progress(
            rank=rank,
            attempt=self.attempt,
            phase=self.phase,
            step=self.step,
            heartbeat_at=START.timestamp() + self.now,
            step_at=START.timestamp() + self.now,
            collective_wait_seconds=wait,
            motion=self.trackers[rank].motion(self.now),
        )

    def report(self, worker: int) -> WorkerReport:
        ranks = (self.record(2 * worker), self.record(2 * worker + 1))
        return WorkerReport(
            job="gpt", job_uid="u", attempt=self.attempt, node_rank=worker, world_size=4, ranks=ranks
        )


@dataclass
class Operator:
    """The operator's reaction to the answers: the poller's rules and the pass, without a network."""

    job: dict[str, Any]
    events: list[tuple[float, str, str]] = field(default_factory=list)
    progress: Progress | None = None
    inspection: Inspection | None = None
    stacks: StacksView | None = None
    rests: bool = False
    """Whether to skip passes that could see nothing but a step that moved, to save the test's time."""
    _last_report: tuple[int, Phase] | None = None

    def poll(self, ranks: Ranks, now_s: float) -> None:
        at = START + timedelta(seconds=now_s)
        first = ranks.record(0)
        if self.progress is None or (first.step, first.phase) != (self.progress.step, self.progress.phase):
            self.inspection = None
        self.progress = first
        if first.motion is not None and first.motion.idle_seconds >= suspect_after_s(LIMITS, first):
            answers = {worker: ranks.report(worker) for worker in (0, 1)}
            look = inspect(answers, attempt=ranks.attempt, at=at)
            self.inspection = look if stands_still(LIMITS, look) else None
        last_report, self._last_report = self._last_report, (ranks.attempt, ranks.phase)
        is_calm = self.inspection is None and "hang" not in self.job["status"]
        if not (self.rests and is_calm and last_report == self._last_report):
            self.reconcile(ranks, at)

    def reconcile(self, ranks: Ranks, at: datetime) -> None:
        observed = Observed(
            pods=(ready(0, ranks.attempt), ready(1, ranks.attempt)),
            synced_at=START,
            progress=self.progress,
            inspection=self.inspection,
            stacks=self.stacks,
        )
        plan = reconcile(self.job, observed, at)
        self.events += [((at - START).total_seconds(), event.reason, event.message) for event in plan.events]
        if plan.status is not None:
            stored = plan.status.model_dump(mode="json", by_alias=True, exclude_none=True)
            self.job = {**self.job, "status": stored}
        if any(isinstance(action, CollectStacks) for action in plan.actions):
            self.stacks = StacksView(attempt=ranks.attempt, at=at, config_map=f"gpt-{ranks.attempt}-stacks")


def started(attempt: int, now_s: float) -> dict[str, Any]:
    """Return a job whose attempt starts now."""
    at = START + timedelta(seconds=now_s)
    state = {"phase": "Restarting", "attempt": attempt - 1, "podsCreated": True} if attempt > 1 else {}
    spec = {"ranksPerWorker": 2, "failurePolicy": {"maxRestarts": 1000}}
    first = job(status=state, spec=spec)
    made = settled(first, Observed(synced_at=START), at)
    return settled(made, Observed(pods=(pending(0, attempt), pending(1, attempt)), synced_at=START), at)


def day(
    seed: int, life: Life = SLOW, *, lose: float = 0.1, rests: bool = False
) -> Iterator[tuple[float, Ranks, Operator]]:
    """Yield every poll of a day, with a restart about every five hours."""
    chance = random.Random(seed)
    ranks, operator = Ranks(1, 0.0, chance, life), Operator(started(1, 0), rests=rests)
    restart_at = chance.uniform(3, 7) * 3600
    now_s = 0.0
    while now_s < DAY_S:
        now_s += POLL_S * chance.uniform(0.8, 1.2)
        if now_s >= restart_at:
            restart_at += chance.uniform(3, 7) * 3600
            ranks = Ranks(ranks.attempt + 1, now_s, chance, life, resumed=ranks.step)
            operator.job = started(ranks.attempt, now_s)
        ranks.to(now_s)
        if chance.random() >= lose:
            operator.poll(ranks, now_s)
        yield now_s, ranks, operator


def test_a_day_of_slow_but_healthy_steps_gives_no_alarm() -> None:
    suspected = 0
    for _, ranks, operator in day(1):  # noqa: B007
        suspected += operator.inspection is not None
    last_report = {reason for _, reason, _ in operator.events}
    assert last_report <= {"AllRanksJoined"}, operator.events
    assert ranks.attempt >= 3, "restarts are part of the day"
    assert suspected, "the day was too easy: nobody was ever suspected"


def test_a_rank_that_stops_in_the_same_day_is_found_within_the_limit_and_named() -> None:
    stopped_at, idle_limit_s = None, 0.0
    for now_s, ranks, operator in day(3):
        is_late = now_s > 20 * 3600 and ranks.step > ranks.resumed + 20
        if stopped_at is None and is_late and ranks.phase is Phase.STEP:
            stopped_at, ranks.hung = now_s, 2
            motion = ranks.trackers[0].motion(now_s)
            idle_limit_s = max(
                300.0, 10 * (motion.step_p99_seconds or 0), 2 * (motion.longest_step_seconds or 0)
            )
        if any(reason == "Hang" for _, reason, _ in operator.events):
            break
    found_at, _, message = next(event for event in operator.events if event[1] == "Hang")
    assert stopped_at is not None
    assert found_at - stopped_at <= idle_limit_s + 3 * POLL_S
    assert "rank 2 blocks the others: its process reports nothing" in message
    assert "(pod gpt-" in message
    for _ in range(4):
        found_at += 5
        ranks.to(found_at)
        operator.poll(ranks, found_at)
    (failure, *_) = operator.job["status"]["failures"]
    assert (failure["reason"], failure["rank"], failure["node"]) == ("Hang", 2, "node-1")
    assert failure["stacks"] == f"gpt-{ranks.attempt}-stacks"
