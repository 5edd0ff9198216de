"""The record of a crash run counts only crashes at await points, and names what is missing."""

from __future__ import annotations

import random

import pytest

from tests.cluster.chaos.crashes import OFTEN, Doom, Record

pytestmark = pytest.mark.unit


PLACE = "cluster/executor.py:Executor.perform:91"


class Chance(random.Random):
    """Random source that makes a process aim at no place and die at nothing but a late point."""

    def random(self) -> float:
        return 0.99


def live(record: Record, chance: random.Random, points: int = 1, *, in_pass: bool = True) -> bool:
    doom = Doom(chance, record)
    return any(doom(PLACE, in_pass) for _ in range(points))


def test_lives_that_the_clock_ended_are_no_crashes() -> None:
    record = Record(by_clock=7)
    record.crashed[PLACE] = 3
    assert record.shortcomings(3) == []
    assert record.shortcomings(10) == ["3 of 10 crashes hit an await point, 7 lives ended by the clock"]


@pytest.mark.parametrize(("lives", "found"), [(OFTEN - 1, 0), (OFTEN, 1)])
def test_a_point_that_many_lives_passed_and_none_ended_at_is_named(lives: int, found: int) -> None:
    record = Record()
    record.lives[PLACE] = lives
    assert [PLACE in text for text in record.shortcomings(0)] == [True] * found
    record.crashed[PLACE] = 1
    assert record.shortcomings(0) == []


def test_a_life_counts_once_at_a_point_however_often_it_passes() -> None:
    record = Record()
    assert not live(record, Chance(1), points=5)
    assert (record.passed[PLACE], record.lives[PLACE]) == (5, 1)


def test_points_outside_of_passes_need_not_be_hit() -> None:
    record = Record()
    assert not live(record, Chance(1), points=5, in_pass=False)
    assert record.lives[PLACE] == 0


def test_lives_that_seek_die_at_the_first_new_point() -> None:
    record = Record()
    assert sum(live(record, random.Random(seed)) for seed in range(20)) >= 1
    assert record.crashed[PLACE] >= 1
