"""Status writes that the API server rejects: when each is retried, and the message about them.

A rejection lasts until an administrator changes a role or applies the CustomResourceDefinition of this
version, and passes come all the time: the pause between two tries is counted here, whatever the passes in
between do.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass

from zerotrain.contract.text import cut
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.errors import ApiError
from zerotrain.operator.cluster.store import JobKey

MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
MAX_MESSAGE_CHARS = 300
"""Maximum number of characters of one rejection in the answer of /readyz."""


class StatusHeld(Exception):
    """Error of a pass that may do nothing before its status is written, while the write waits after a
    rejection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refusal:
    key: JobKey
    message: str
    times: int
    """Number of rejections in a row."""
    due: float


class StatusWrites:
    """Statuses that the API server rejected, by the UID of their job."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[str, _Refusal] = {}

    def __len__(self) -> int:
        """Return the number of statuses that cannot be written."""
        return len(self._refused)

    def wait_s(self, uid: str) -> float:
        """Return the seconds until the next try; 0 when the status may be written now."""
        found = self._refused.get(uid)
        return max(found.due - self._clock(), 0.0) if found is not None else 0.0

    async def tried(self, uid: str, key: JobKey, write: Awaitable[Json]) -> Json:
        """Await the write and return its answer. Errors are raised again; a rejection is recorded first."""
        try:
            written = await write
        except ApiError as error:
            if error.is_refusal:
                self.refused(uid, key, error)
            raise
        self.settled(uid)
        return written

    def refused(self, uid: str, key: JobKey, error: ApiError) -> None:
        before = self._refused.get(uid)
        times = before.times + 1 if before is not None else 1
        pause_s = min(MIN_PAUSE_S * 2.0 ** min(times - 1, 10), MAX_PAUSE_S)
        message = cut(str(error), MAX_MESSAGE_CHARS)
        self._refused[uid] = _Refusal(key=key, message=message, times=times, due=self._clock() + pause_s)

    def settled(self, uid: str) -> None:
        """Forget the rejection: the status is written, need not be written any more, or the job is gone."""
        self._refused.pop(uid, None)

    def prune(self, alive: Set[str]) -> None:
        self._refused = {uid: found for uid, found in self._refused.items() if uid in alive}

    def lines(self) -> list[str]:
        """Return one line for the user; empty when all statuses can be written."""
        if not self._refused:
            return []
        first = next(iter(self._refused.values()))
        count = len(self._refused)
        jobs = "1 job" if count == 1 else f"{count} jobs"
        return [
            f"the status of {jobs} cannot be written, so the status shown is outdated; "
            f"{first.key.namespace}/{first.key.name}: {first.message}. Check that the "
            "CustomResourceDefinition is of this version and that the operator may update "
            "zerotrainingjobs/status"
        ]
