"""Many simulated days of programs of every kind, each with some five starts: slow steps, steps of twenty
minutes, programs that do not tell their first step apart or report every tenth step only. None gives an
alarm; and a rank that stops in the second step, of which the least is known, is found in time and named.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.operator.reconcile.test_hang_simulation import POLL_S, Life, day
from zerotrain.contract.progress import Phase

LIVES = {
    "two minutes": Life(),
    "400 s": Life(step_s=400, outliers=(2, 4.4), first_step_s=(300, 1700)),
    "1300 s": Life(step_s=1300, spread=0.1, outliers=(1.5, 1.9), first_step_s=(1300, 1750)),
    "own program of 400 s": Life(step_s=400, outliers=(2, 4.4), start_s=(460, 1700), first_step_s=None),
    "own program that reports every tenth step": Life(
        spread=0.1, outliers=(1, 2), start_s=(1260, 1700), first_step_s=None, every=10
    ),
}
ONE_RANK, MANY_RANKS = range(1), range(5)
FLOOR_S, FIRST_STEP_S, FACTOR = 300, 1800, 10
"""Defaults of `minTimeoutSeconds`, `firstStepTimeoutSeconds` and `stepTimeoutFactor`."""


@pytest.mark.unit
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
def test_days_of_slow_but_healthy_steps_give_no_alarm(life: Life) -> None:
    no_alarm(life, ONE_RANK)


@pytest.mark.ranks
@pytest.mark.slow(
    cheaper="tests/operator/reconcile/test_hang_simulation_slow.py::test_days_of_slow_but_healthy_steps_give_no_alarm"
)
def test_many_days_of_slow_but_healthy_steps_give_no_alarm() -> None:
    for life in LIVES.values():
        no_alarm(life, MANY_RANKS)


def no_alarm(life: Life, seeds: Sequence[int]) -> None:
    starts = suspected = 0
    for seed in seeds:
        for _, ranks, operator in day(seed, life, rests=True):  # noqa: B007
            suspected += operator.inspection is not None
        alarms = [event for event in operator.events if event[1] != "AllRanksJoined"]
        assert not alarms, f"seed {seed}: {alarms[0]}"
        starts += ranks.attempt
    assert starts >= 3 * len(seeds), "restarts are part of the day"
    assert suspected, "the days were too easy: nobody was ever suspected"


@pytest.mark.unit
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
def test_a_rank_that_stops_in_the_second_step_of_a_later_attempt_is_found_in_time_and_named(
    life: Life, seed: int
) -> None:
    stopped_at, limit_s = None, 0.0
    for now_s, ranks, operator in day(seed, life, rests=True):
        if stopped_at is None and ranks.attempt == 2 and ranks.phase is Phase.STEP:
            assert ranks.step == ranks.resumed + life.every
            stopped_at, ranks.hung = now_s, 2
            first_s = ranks.first_took_s
            limit_s = (
                FIRST_STEP_S
                if first_s is None
                else max(FLOOR_S, 2 * first_s, min(FACTOR * first_s, FIRST_STEP_S))
            )
        if any(reason == "Hang" for _, reason, _ in operator.events):
            break
    found_at, _, message = next(event for event in operator.events if event[1] == "Hang")
    assert stopped_at is not None
    assert stopped_at < found_at <= stopped_at + limit_s + 3 * POLL_S
    assert "rank 2 blocks the others: its process reports nothing" in message
