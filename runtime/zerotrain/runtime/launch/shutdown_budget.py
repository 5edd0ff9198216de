"""Time limits of the launcher's waits, once SIGKILL is near."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SHARE = 4.0
"""Divisor of the remaining time; each wait gets a quarter of it. Stacks (two waits), the last output and the
channel's last messages follow each other, and more than a quarter remains for the termination message and the
end."""


class ShutdownBudget:
    """Limits waits once the end is known; before, waits are limited only by the caller."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf

    def start(self, seconds: float) -> None:
        """Fix the end: SIGKILL comes in `seconds`."""
        self._end = self._clock() + seconds

    def limit(self, wanted_s: float) -> float:
        """Return the seconds that a wait may take now, `wanted_s` at most."""
        return max(0.0, min(wanted_s, (self._end - self._clock()) / SHARE))
