"""The operator's clock is the API server's: wrong and corrected clocks of its own machine do not count."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from zerotrain.operator.cluster.connection import READ_DATE_EVERY_S, ServerTime

pytestmark = pytest.mark.unit


TRUE = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


class Machine:
    """A machine whose clock is off by so many seconds."""

    def __init__(self, off_s: float) -> None:
        self.ticks = 1000.0
        self.off_s = off_s

    def wall(self) -> datetime:
        return self.true + timedelta(seconds=self.off_s)

    @property
    def true(self) -> datetime:
        return TRUE + timedelta(seconds=self.ticks - 1000)

    def server_time(self) -> ServerTime:
        return ServerTime(wall=self.wall, ticks=lambda: self.ticks)


@pytest.mark.parametrize("off_s", [-7200.0, -3.0, 3.0, 7200.0])
def test_a_wrong_clock_is_set_right_by_the_first_answer(off_s: float) -> None:
    machine = Machine(off_s)
    clock = machine.server_time()
    assert clock.now() == machine.wall()
    clock.record_date(format_datetime(machine.true, usegmt=True))
    machine.ticks += 90.5
    assert clock.now() == machine.true


def test_a_clock_that_is_nearly_right_is_left_alone() -> None:
    """The whole seconds of the answer would only make the clock jump."""
    machine = Machine(0.7)
    clock = machine.server_time()
    clock.record_date(format_datetime(machine.true, usegmt=True))
    assert clock.now() == machine.wall()


def test_a_correction_of_the_machines_clock_moves_nothing() -> None:
    machine = Machine(0.0)
    clock = machine.server_time()
    machine.off_s = 3600
    machine.ticks += 10
    assert clock.now() == machine.true


def test_a_clock_that_drifts_is_set_again() -> None:
    machine = Machine(0.0)
    clock = machine.server_time()
    clock.record_date(format_datetime(machine.true, usegmt=True))
    machine.ticks += READ_DATE_EVERY_S
    later = machine.true + timedelta(seconds=5)
    clock.record_date(format_datetime(later, usegmt=True))
    assert clock.now() == later


@pytest.mark.parametrize("text", [None, "", "yesterday", "Thu, 01 Jan 2026 12:00:00"])
def test_an_answer_without_a_date_changes_nothing(text: str | None) -> None:
    machine = Machine(3600)
    clock = machine.server_time()
    clock.record_date(text)
    assert clock.now() == machine.wall()
