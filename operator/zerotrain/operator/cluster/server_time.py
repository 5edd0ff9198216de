"""Clock of the API server, from the Date header of its answers: one clock for the operator, whatever its
machine says.

Every time that a pass compares with "now" was stamped by the API server (deletions) or by a replica of the
operator on another machine (status). A replica with a wrong clock would force the deletion of pods that are
still ending, or wait an hour for a hold-off. `Api` reports the Date headers, and all code that needs the time
reads it here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

TOLERANCE_S = 2.0
"""Difference below which Date says nothing about our clock: it has whole seconds and is as old as the
answer's transit."""

READ_EVERY_S = 5.0


def _wall() -> datetime:
    return datetime.now(UTC)


class ServerTime:
    """Clock that runs by the monotonic clock, so that a correction of the machine's clock does not move
    it."""

    def __init__(
        self, *, wall: Callable[[], datetime] = _wall, ticks: Callable[[], float] = time.monotonic
    ) -> None:
        self._ticks = ticks
        self._base, self._base_at = wall(), ticks()
        self._read_at: float | None = None

    def now(self) -> datetime:
        """Return the present time in UTC."""
        return self._base + timedelta(seconds=self._ticks() - self._base_at)

    def record_date(self, date: str | None) -> None:
        """Take the Date header of an answer that has just arrived."""
        ticks = self._ticks()
        if date is None or (self._read_at is not None and ticks - self._read_at < READ_EVERY_S):
            return
        self._read_at = ticks
        try:
            server_time = parsedate_to_datetime(date)
        except ValueError:
            return  # a proxy wrote it
        if server_time.tzinfo is None:
            return
        if abs((server_time - self.now()).total_seconds()) > TOLERANCE_S:
            self._base, self._base_at = server_time.astimezone(UTC), ticks
