"""Budgets that bound the calls per second that the operator makes to workers, whatever hangs."""

from __future__ import annotations

LARGE = 50
"""Number of workers from which on a job's inspections draw on a budget that only such jobs share. One
inspection of thousands of workers leaves a long debt, during which the hangs of other jobs must not go
unseen."""


class CallBudget:
    """Budget of calls per second on average. One inspection of a large job may run into debt that later ones
    wait for."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate, self._at = rate, now
        self._tokens = rate

    def take(self, calls: int, now: float) -> bool:
        """Take the calls from the budget if it is not in debt. Return whether they may be made now."""
        self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= calls
        return True

    def give_back(self, calls: int) -> None:
        """Return calls to the budget that were not made."""
        self._tokens = min(self._rate, self._tokens + calls)


class CallBudgets:
    """One budget for all inspections of small jobs and one for all of large jobs."""

    def __init__(self, rate: float, now: float) -> None:
        self._small, self._large = CallBudget(rate, now), CallBudget(rate, now)

    def of(self, calls: int) -> CallBudget:
        return self._small if calls < LARGE else self._large
