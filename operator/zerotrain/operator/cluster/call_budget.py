"""How many calls per second the operator makes to workers, whatever hangs."""

from __future__ import annotations

LARGE = 50
"""Workers from which on a job's looks draw on a budget that only such jobs share: one look at thousands of
workers is paid for long after, and nobody else's hang may go unseen for so long."""


class CallBudget:
    """Calls per second on average; one look at a large job may run into debt that later ones wait for."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate, self._at = rate, now
        self._tokens = rate

    def take(self, calls: int, now: float) -> bool:
        """Whether the calls may be made now."""
        self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= calls
        return True

    def give_back(self, calls: int) -> None:
        """Calls that were not made."""
        self._tokens = min(self._rate, self._tokens + calls)


class CallBudgets:
    """One for all small questions and one for all large ones."""

    def __init__(self, rate: float, now: float) -> None:
        self._small, self._large = CallBudget(rate, now), CallBudget(rate, now)

    def of(self, calls: int) -> CallBudget:
        return self._small if calls < LARGE else self._large
