"""Delay of status writes that can wait: the more jobs start at once, the longer. Passes ask for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Set

WAIT_PER_JOB_S, MAX_WAIT_S = 0.1, 10.0
"""Seconds of delay per waiting job, and at most. Counts and progress of running jobs are never older than
this."""

START_WAIT_PER_JOB_S, MAX_START_WAIT_S = 0.3, 30.0
"""Seconds of delay per waiting job, and at most, while a job's pods start. The status waits for the moment
when all pods run, which comes later the more jobs start; a write just before it would be the most expensive
of the job."""


class Pace:
    """Delays of status writes. Ten writes a second over all jobs are acceptable at any time, so one job alone
    hardly waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        """Time at which the status of each job began to wait, by the job's UID."""

    def wait_s(self, uid: str, *, starts: bool = False) -> float:
        """Return the seconds for which this job's write still waits, so that later changes share it; 0 when
        it is due."""
        since = self._since.setdefault(uid, self._clock())
        others = len(self._since) - 1
        each, most = (START_WAIT_PER_JOB_S, MAX_START_WAIT_S) if starts else (WAIT_PER_JOB_S, MAX_WAIT_S)
        limit = min(WAIT_PER_JOB_S + each * others, most)
        return max(since + limit - self._clock(), 0.0)

    def prune(self, alive: Set[str]) -> None:
        """Drop jobs that are not among `alive`: each job that is never settled delays all others."""
        self._since = {uid: since for uid, since in self._since.items() if uid in alive}

    def settled(self, uid: str) -> None:
        """End the wait of a job: its status is written or equals the stored one, or the job is gone."""
        self._since.pop(uid, None)
