"""Work queue: keys that need a pass, now or at a later time. A key never has two passes at once.

Level-triggered: a key that is added while it waits is one key; one that is added while its pass runs gets
another pass afterwards. A namespace in which a pass takes long has a limited number of passes at once.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")

MAX_VOID = 64
"""Maximum number of void entries that the heap may have beyond two for each key before they are removed."""


MAX_PASSES_WHEN_LATE = 16
"""Maximum number of passes at once of a namespace in which a pass takes long: enough for an API server that
is slow to all."""


class NamespacePasses(Generic[K]):
    """Passes of each namespace. `namespace_of` returns the namespace of a key."""

    def __init__(self, namespace_of: Callable[[K], str]) -> None:
        self._namespace_of = namespace_of
        self._running: Counter[str] = Counter()
        self._late: dict[K, str] = {}
        """Keys whose passes take long, and their namespaces."""
        self._aside: dict[str, list[K]] = {}
        """Keys that were ready while their namespace could have no more passes, in order."""

    def begin(self, key: K) -> bool:
        """Return whether the key may have a pass now; if not, it is put aside."""
        namespace = self._namespace_of(key)
        if self._is_full(namespace):
            self._aside.setdefault(namespace, []).append(key)
            return False
        self._running[namespace] += 1
        return True

    def late(self, key: K) -> None:
        """Mark the key's pass as late. Until it ends, its namespace has no more than MAX_PASSES_WHEN_LATE
        passes at once."""
        self._late[key] = self._namespace_of(key)

    def are_late(self, namespace: str) -> bool:
        """Return whether a pass takes long in the namespace now."""
        return namespace in self._late.values()

    def end(self, key: K) -> tuple[bool, list[K]]:
        """End the key's pass. Return whether it was late, and the keys that need no longer be put aside."""
        namespace, was_late = self._namespace_of(key), self._late.pop(key, None) is not None
        self._running[namespace] -= 1
        if not self._running[namespace]:
            del self._running[namespace]
        return was_late, [] if self._is_full(namespace) else self._aside.pop(namespace, [])

    def _is_full(self, namespace: str) -> bool:
        return self._running[namespace] >= MAX_PASSES_WHEN_LATE and self.are_late(namespace)


class WorkQueue(Generic[K]):
    """Queue for one event loop. Each `get` is followed by a `done`. `namespace_of` returns the namespace of a
    key."""

    def __init__(self, namespace_of: Callable[[K], str] = lambda key: "") -> None:
        self.passes = NamespacePasses(namespace_of)
        self._ready: deque[K] = deque()
        self._waiting: dict[K, float] = {}
        """Keys in `_ready`, and keys that became due while their pass runs, with the time since when."""
        self._busy: set[K] = set()
        self._heap: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}
        """Earliest time of each delayed key; later entries in the heap are void."""
        self._count = 0
        self._takers: deque[asyncio.Future[None]] = deque()
        """Futures of the tasks that wait in `get`. One is woken for one key: waking thirty would cost more
        than the pass."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_age_s(self) -> float:
        """Seconds for which the longest-waiting key has waited; 0 while none waits."""
        return max(time.monotonic() - min(self._waiting.values()), 0.0) if self._waiting else 0.0

    def add(self, key: K) -> None:
        """Queue the key for a pass now."""
        if key in self._waiting:
            return
        self._waiting[key] = time.monotonic()
        if key not in self._busy:
            self._ready.append(key)
            self._wake()

    def add_after(self, key: K, seconds: float) -> None:
        """Queue the key for a pass after `seconds`; an earlier time that was requested stays."""
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
        """Return the next key, which is busy until `done`."""
        while True:
            self._ripen()
            while self._ready and not self._closed:
                key = self._ready.popleft()
                if not self.passes.begin(key):
                    continue
                self._waiting.pop(key, None)
                self._busy.add(key)
                self._quiet.clear()
                return key
            await self._woken()

    def done(self, key: K) -> bool:
        """End the key's pass. Return whether it was late (`passes.late`)."""
        was_late, freed = self.passes.end(key)
        self._busy.discard(key)
        if not self._busy:
            self._quiet.set()
        if key in self._waiting:
            self._ready.append(key)
            self._wake()
        self._ready.extendleft(reversed(freed))
        for _ in freed:
            self._wake()
        return was_late

    async def drain(self, limit_s: float) -> int:
        """Give out no more keys and wait until no pass runs. Return how many still ran after `limit_s`."""
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
                self._wake()  # this taker had been woken: the key must not wait for the next event
            raise

    def _wake(self) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                return

    def _set_alarm(self) -> None:
        """Set the timer for the earliest delayed key; without a loop no task waits yet."""
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
        """Remove void entries. A job gets a pass within seconds and another at its far deadline, over and
        over: each time an entry for the deadline becomes void, and would stay until then."""
        self._heap = [item for item in self._heap if self._due.get(item[2]) == item[0]]
        heapq.heapify(self._heap)

    def _ripen(self) -> None:
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                self.add(key)
