"""How long status writes that can wait do wait: the longer, the more jobs start at once. Asked by passes."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_PER_JOB_S = 0.1
MAX_WAIT_S = 10.0
"""Counts of starting pods are never older than this."""


class Pace:
    """Ten writes a second over all jobs are worth their price at any time, so one job alone hardly waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        """When the status of each job began to wait, by its UID."""

    def wait_s(self, uid: str) -> float:
        """How much longer this job's write waits for company; 0 when it is due."""
        since = self._since.setdefault(uid, self._clock())
        limit = min(WAIT_PER_JOB_S * len(self._since), MAX_WAIT_S)
        return max(since + limit - self._clock(), 0.0)

    def settled(self, uid: str) -> None:
        """The status is written, equal to what is stored, or the job is gone."""
        self._since.pop(uid, None)
