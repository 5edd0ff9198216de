"""A pause within a step does not shorten the known duration of a step, so that it raises no alarm."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zerotrain.contract.progress import Phase, Progress
from zerotrain.operator.reconcile.hangs import HangLimits
from zerotrain.operator.reconcile.inspection import pace_of
from zerotrain.runtime.launch.activity import MotionTracker

pytestmark = pytest.mark.unit


STEPS = 50
"""Steps between two reports."""

PAUSE_S = 100.0

Parts = list[float]
"""Seconds of work between the pauses of one report."""


def record(phase: Phase, step: int) -> Progress:
    return Progress(rank=0, attempt=1, phase=phase, step=step)


def observe(reports: list[Parts], *, drops: bool) -> tuple[MotionTracker, float]:
    """Return what a launcher observes of the work; `drops`: a record that another follows at once is not
    sent."""
    tracker, now, step = MotionTracker(0.0), 60.0, 0
    tracker.progress_arrived(record(Phase.FIRST_STEP, step), now)
    for parts in reports:
        phase = Phase.STEP if step else Phase.FIRST_STEP
        for number, seconds in enumerate(parts):
            if number:
                tracker.progress_arrived(record(Phase.CHECKPOINT, step), now)
                now += PAUSE_S
                if seconds or not drops:
                    tracker.progress_arrived(record(phase, step), now)
            now += seconds
        step += STEPS
        tracker.progress_arrived(record(Phase.STEP, step), now)
    return tracker, now


seconds = st.one_of(st.just(0.0), st.floats(1.0, 3000.0))
reports = st.lists(st.lists(seconds, min_size=1, max_size=4).filter(any), min_size=14, max_size=20)


@settings(max_examples=40)
@given(reports=reports, drops=st.booleans())
@example(reports=[[400.0, 0.0]] * 20, drops=True)
@example(reports=[[400.0, 0.0]] * 20, drops=False)
def test_the_parts_of_a_step_before_and_after_a_pause_are_one(reports: list[Parts], drops: bool) -> None:
    tracker, now = observe(reports, drops=drops)
    motion, (first, *later) = tracker.motion(now), [sum(parts) for parts in reports]
    assert motion.first_step_seconds == pytest.approx(first)
    assert motion.longest_step_seconds == pytest.approx(max(later))
    assert motion.step_p99_seconds == pytest.approx(max(later) / STEPS)
    assert motion.steps_seen == STEPS * len(later)
    limit_s = HangLimits().of(Phase.STEP, pace_of(Phase.STEP, [motion]))
    assert limit_s > max(later), "the next report may take as long as the longest"
    if any(len(parts) > 1 for parts in reports):
        assert motion.longest_checkpoint_seconds is not None
        assert motion.longest_checkpoint_seconds >= PAUSE_S * 0.99


def test_work_before_going_back_is_no_part_of_the_next_step() -> None:
    tracker = MotionTracker(0.0)
    for phase, step, at in (
        (Phase.STEP, 5, 10.0),
        (Phase.CHECKPOINT, 5, 110.0),  # a load
        (Phase.STEP, 5, 120.0),
        (Phase.STEP, 2, 120.0),
        (Phase.STEP, 3, 123.0),
    ):
        tracker.progress_arrived(record(phase, step), at)
    assert tracker.motion(123.0).longest_step_seconds == 3.0


HOUR_S, PASS_S = 3600.0, 20.0


def evaluate(tracker: MotionTracker, *, since: float, seconds: float) -> float:
    """Let passes of an evaluation arrive for so long; return the longest time that the rank seemed idle."""
    idle, num_passes = 0.0, int(seconds / PASS_S)
    for number in range(1, num_passes + 1):
        now = since + number * PASS_S
        idle = max(idle, tracker.motion(now).idle_seconds)
        passed = Progress(rank=0, attempt=1, phase=Phase.CHECKPOINT, step=5, evaluated=number)
        tracker.progress_arrived(passed, now)
    return idle


def test_an_hour_of_evaluation_is_no_hang_and_a_rank_that_stops_in_it_is() -> None:
    tracker = MotionTracker(0.0)
    for phase, step, at in ((Phase.FIRST_STEP, 0, 1.0), (Phase.STEP, 4, 3.0), (Phase.STEP, 5, 4.0)):
        tracker.progress_arrived(record(phase, step), at)
    tracker.progress_arrived(record(Phase.CHECKPOINT, 5), 5.0)
    limit_s = HangLimits().of(Phase.CHECKPOINT, pace_of(Phase.CHECKPOINT, [tracker.motion(5.0)]))
    assert limit_s < HOUR_S, "or the test proves nothing"
    assert evaluate(tracker, since=5.0, seconds=HOUR_S) <= PASS_S
    stopped = tracker.motion(5.0 + HOUR_S + limit_s + 1)
    assert stopped.idle_seconds > HangLimits().of(Phase.CHECKPOINT, pace_of(Phase.CHECKPOINT, [stopped]))
    tracker.progress_arrived(record(Phase.STEP, 6), 5.0 + HOUR_S)
    assert tracker.motion(5.0 + HOUR_S).longest_step_seconds == pytest.approx(1.0)
