"""Random pauses around collectives, so that tests meet orders of events that an idle machine never
produces."""

from __future__ import annotations

import random
import time


class Delays:
    """Random pauses of at most `most_seconds` each, in a different sequence on every rank."""

    def __init__(self, most_seconds: float, *, seed: int) -> None:
        self._most = most_seconds
        self._random = random.Random(seed)

    def pause(self) -> None:
        """Sleep for a random part of `most_seconds`."""
        if self._most > 0.0:
            time.sleep(self._random.random() * self._most)
