"""The work queue: keys that need a pass, now or at a moment. One key is never handled twice at once.

Level-triggered: a key that is added while it waits is one key; one that is added while its pass runs gets
another pass afterwards.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from typing import Generic, TypeVar

K = TypeVar("K")

MAX_VOID = 64
"""So many void entries the heap may have beyond one for each key before they are thrown out."""


class WorkQueue(Generic[K]):
    """For one event loop. `get` and `done` belong together."""

    def __init__(self) -> None:
        self._ready: deque[K] = deque()
        self._waiting: dict[K, float] = {}
        """Keys in `_ready`, plus those that became due while their pass runs; since when."""
        self._busy: set[K] = set()
        self._heap: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}
        """The earliest moment of each delayed key; later entries in the heap are void."""
        self._count = 0
        self._takers: deque[asyncio.Future[None]] = deque()
        """Those that wait in `get`. One is woken for one key: thirty would cost more than its pass."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_age_s(self) -> float:
        """How long the key that waits longest has waited; 0 while none does."""
        return max(time.monotonic() - min(self._waiting.values()), 0.0) if self._waiting else 0.0

    def add(self, key: K) -> None:
        """The key needs a pass now."""
        if key in self._waiting:
            return
        self._waiting[key] = time.monotonic()
        if key not in self._busy:
            self._ready.append(key)
            self._wake()

    def add_after(self, key: K, seconds: float) -> None:
        """The key needs a pass after so long; an earlier moment that was asked for stays."""
        due = time.monotonic() + max(seconds, 0.0)
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, key))
        if self._heap[0][1] == self._count:
            self._set_alarm()
        if len(self._heap) > 2 * len(self._due) + MAX_VOID:
            self._compact()

    async def get(self) -> K:
        """The next key; it is busy until `done`."""
        while True:
            self._ripen()
            if self._ready and not self._closed:
                key = self._ready.popleft()
                self._waiting.pop(key, None)
                self._busy.add(key)
                self._quiet.clear()
                return key
            await self._woken()

    def done(self, key: K) -> None:
        self._busy.discard(key)
        if not self._busy:
            self._quiet.set()
        if key in self._waiting:
            self._ready.append(key)
            self._wake()

    async def drain(self, limit_s: float) -> int:
        """Give out no key any more and wait until no pass runs; how many still ran at the limit."""
        self._closed = True
        try:
            async with asyncio.timeout(limit_s):
                await self._quiet.wait()
        except TimeoutError:
            return len(self._busy)
        return 0

    def forget(self, key: K) -> None:
        """Drop the key's delayed pass: its job is gone."""
        self._due.pop(key, None)

    async def _woken(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._alarm is None:
            self._set_alarm()
        taker = self._loop.create_future()
        self._takers.append(taker)
        try:
            await taker
        except asyncio.CancelledError:
            if taker.done() and not taker.cancelled():
                self._wake()  # it was this one's turn: the key must not wait for the next
            raise

    def _wake(self) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                return

    def _set_alarm(self) -> None:
        """Ring when the earliest delayed key is due; without a loop nobody waits yet."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._loop is not None and self._heap:
            self._alarm = self._loop.call_later(max(self._heap[0][0] - time.monotonic(), 0.0), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._ripen()
        self._set_alarm()

    def _compact(self) -> None:
        """Throw out void entries. A job looks again within seconds and at its far deadline after that, over
        and over: each time an entry for the deadline becomes void, and would stay until then."""
        self._heap = [item for item in self._heap if self._due.get(item[2]) == item[0]]
        heapq.heapify(self._heap)

    def _ripen(self) -> None:
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                self.add(key)
