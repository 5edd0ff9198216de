"""How long the launcher may wait for what, once SIGKILL is in sight."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SHARE = 4.0
"""Each wait has a quarter of what is left: stacks (two waits), the last output and the channel's last words
follow each other, and more than a quarter remains for the message and the end."""


class Patience:
    """Without bounds of its own until the end is known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf

    def ends_in(self, seconds: float) -> None:
        self._end = self._clock() + seconds

    def of(self, most_s: float) -> float:
        """What of a wait of `most_s` can be afforded now."""
        return max(0.0, min(most_s, (self._end - self._clock()) / SHARE))
