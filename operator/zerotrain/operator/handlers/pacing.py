"""How long status writes that can wait do wait: the longer, the more jobs start at once. Asked by passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Set

WAIT_PER_JOB_S, MAX_WAIT_S = 0.1, 10.0
"""Counts and progress of jobs that run are never older than this."""

START_WAIT_PER_JOB_S, MAX_START_WAIT_S = 0.3, 30.0
"""A job whose pods start waits for the news that all run, which comes the later the more jobs start: a write
of a moment before would be the dearest that it ever makes."""


class Pace:
    """Ten writes a second over all jobs are worth their price at any time, so one job alone hardly waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        """When the status of each job began to wait, by its UID."""

    def wait_s(self, uid: str, *, starts: bool = False) -> float:
        """How much longer this job's write waits for company; 0 when it is due."""
        since = self._since.setdefault(uid, self._clock())
        others = len(self._since) - 1
        each, most = (START_WAIT_PER_JOB_S, MAX_START_WAIT_S) if starts else (WAIT_PER_JOB_S, MAX_WAIT_S)
        limit = min(WAIT_PER_JOB_S + each * others, most)
        return max(since + limit - self._clock(), 0.0)

    def prune(self, alive: Set[str]) -> None:
        """Drop jobs that are not among `alive`: each one that nobody settles makes all others wait longer."""
        self._since = {uid: since for uid, since in self._since.items() if uid in alive}

    def settled(self, uid: str) -> None:
        """The status is written, equal to what is stored, or the job is gone."""
        self._since.pop(uid, None)
