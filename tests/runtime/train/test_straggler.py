"""The slowest rank, from the numbers of every step: medians, so one slow step makes no straggler."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from zerotrain.runtime.step import StepResult
from zerotrain.runtime.train.stragglers import WINDOW, OwnTimes

pytestmark = pytest.mark.unit


def step(own: Sequence[float]) -> StepResult:
    """Return a step in lockstep: every rank takes as long as the slowest and waits for the rest of it."""
    whole = max(own)
    return StepResult(
        step=1,
        at_boundary=True,
        rank_seconds=tuple(whole for _ in own),
        rank_wait_seconds=tuple(whole - seconds for seconds in own),
    )


def after(steps: int, slow: float = 1.0, *, spike: float = 0.0) -> OwnTimes:
    """Add steps of eight ranks of about a second.

    Rank 5 takes `slow` times as long, rank 0 once `spike` seconds more.
    """
    chance, times = random.Random(4), OwnTimes(8)
    for number in range(steps):
        own = [chance.uniform(0.9, 1.1) * (slow if rank == 5 else 1.0) for rank in range(8)]
        own[0] += spike if number == steps // 2 else 0.0
        times.add(step(own))
    return times


def test_a_slow_rank_stands_out_although_all_steps_take_the_same_time() -> None:
    found = after(WINDOW, slow=2.0).slowest
    assert found is not None
    assert found.rank == 5
    assert 1.8 < found.own_seconds / found.median_seconds < 2.2


def test_no_rank_is_slow_before_the_window_is_full() -> None:
    assert after(WINDOW - 1, slow=5.0).slowest is None


def test_one_long_pause_does_not_make_a_rank_slow() -> None:
    found = after(WINDOW, spike=600.0).slowest
    assert found is not None
    assert found.own_seconds / found.median_seconds < 1.1


def test_it_recovers_when_the_rank_does() -> None:
    times = after(WINDOW, slow=3.0)
    for _ in range(WINDOW):
        times.add(step([1.0] * 8))
    assert times.slowest is not None
    assert times.slowest.own_seconds == times.slowest.median_seconds


def test_a_single_rank_has_no_peers() -> None:
    times = OwnTimes(1)
    for _ in range(2 * WINDOW):
        times.add(step([1.0]))
    assert times.slowest is None
