"""Limit on the creations in flight at once: for each namespace, as many as the API server answers soon.

Further creations would queue up in the API server instead of here, in the middle of passes, and the requests
of all other clients with them. The limit follows additive increase and multiplicative decrease, as TCP's
congestion control does (Jacobson 1988, "Congestion Avoidance and Control"; with its slow start), by the time
of an answer. It is kept per namespace, since the cause of late answers may concern one tenant alone, such as
a slow admission webhook. A creation that hangs there leaves its slot among those of all namespaces to others.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

T = TypeVar("T")

MOST: Final = 40
"""Maximum of creations in flight over all namespaces, without those that hang: more would queue up inside the
API server, each with a connection."""
MOST_OF_ONE: Final = 24
"""Maximum of creations in flight of one namespace: a slow namespace must leave some slots for the others."""
LEAST: Final = 8
"""Limit that a namespace starts with and does not fall below. It is enough to keep an API server that is near
always busy."""
FAST_S: Final = 0.2
"""Seconds after which an answer counts as late: a creation that does not wait takes a tenth of it or less."""
MAX_FAST_S: Final = 1.0
"""Largest threshold for a late answer. Where every answer takes long, as through slow webhooks, the threshold
is twice the shortest time, but no more than this."""
HANGS_S: Final = 1.0
"""Seconds without an answer after which a creation hangs: it waits for something behind the API server, and
does not keep the API server busy."""
LIMIT_WHEN_HANGING: Final = 2
"""Limit of one namespace while as many creations hang as may be in flight, so that every namespace keeps
some."""
REST_S: Final = 60.0
"""Seconds without a creation after which the learned limit of a namespace is forgotten."""
_CUT: Final = 0.8
_SHARE: Final = 0.6


@dataclass(slots=True, eq=False)
class _NamespaceQueue:
    """State of one namespace."""

    allowed: float
    cut_at: float | None = None
    """Time of the last cut; None while no answer was late. Until then the limit grows with each answer in
    time (slow start), and later with each round of answers."""
    shortest_s: float = math.inf
    held: int = 0
    """Creations in flight, including those that hang."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    """Creations that wait for a slot, in the order of their requests."""
    used_at: float = 0.0
    jobs: int = 0
    """Number of jobs that create pods now."""
    asked: int = 0
    """Creations that those jobs make or wait for."""

    @property
    def share(self) -> int:
        """Return how many creations one job should have at once. It is rounded up: the shares of all jobs
        together may exceed the limit."""
        return math.ceil(self.allowed * min(_SHARE, 1 / max(self.jobs, 1)))

    @property
    def is_idle(self) -> bool:
        return not (self.held or self.waiting or self.jobs)

    @property
    def is_used(self) -> bool:
        """Return whether most of the limit is in use. An unused limit teaches nothing."""
        return self.held >= int(_SHARE * self.allowed)


@dataclass(slots=True)
class _Part:
    """Share of one job in its namespace's queue: always one creation, and more as long as no other job waits
    for them."""

    queue: _NamespaceQueue
    asked: int = 0

    def grow(self) -> bool:
        """Take one more creation if there is one. Return whether there was."""
        if self.asked and (self.asked >= self.queue.share or self.queue.asked >= int(self.queue.allowed)):
            return False
        self._add(1)
        return True

    def shrink(self) -> None:
        self._add(-1)

    def end(self) -> None:
        self._add(-self.asked)

    @property
    def is_too_large(self) -> bool:
        """Return whether the job holds more than its share, because other jobs came or the limit fell."""
        return self.asked > 1 and (
            self.asked > self.queue.share or self.queue.asked > int(self.queue.allowed)
        )

    def _add(self, number: int) -> None:
        self.asked += number
        self.queue.asked += number


@dataclass(slots=True)
class Slot:
    """Slot of one creation."""

    began: float
    void: bool = False
    """Whether the holder did not use the slot: its time then says nothing. Set by the holder."""
    hangs: bool = False


@dataclass(slots=True)
class _Tally:
    """Progress of one `spread`."""

    time_is_over: Callable[[], bool]
    begun: int = 0
    done: int = 0
    error: Exception | None = None
    """First error that was raised."""

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.time_is_over()


class Creations:
    """Limiter of the creations of all namespaces. Not thread-safe: one event loop owns it. `clock` returns
    seconds that never jump; `hangs_s` is counted by the event loop's own clock."""

    def __init__(
        self,
        most: int = MOST,
        *,
        least: int = LEAST,
        clock: Callable[[], float] = time.monotonic,
        hangs_s: float = HANGS_S,
    ) -> None:
        self._most, self._clock, self._hangs_s = most, clock, hangs_s
        self._most_of_one, self._least = min(MOST_OF_ONE, most), min(least, most)
        self._held = self._hanging = 0
        """Creations of all namespaces in flight: those that do not hang, and those that hang."""
        self._queues: dict[str, _NamespaceQueue] = {}
        self._queue: dict[_NamespaceQueue, None] = {}
        """Lanes with creations that wait; the next one to be served first."""

    def limit(self, namespace: str) -> int:
        """Return how many creations may be in flight in the namespace now."""
        return int(self._queue_of(namespace).allowed)

    def share(self, namespace: str) -> int:
        """Return how many creations one job should request at once: what the other jobs that create now
        leave, and some for another that may come. A job that requests more waits for them in the middle of a
        pass."""
        return self._queue_of(namespace).share

    @asynccontextmanager
    async def one(self, namespace: str) -> AsyncIterator[Slot]:
        """Wait for a slot, and hold it for the length of one creation. Slots are given first come, first
        served within a namespace; namespaces with free slots alternate."""
        queue = self._queue_of(namespace)
        await self._enter(queue)
        slot, answered = Slot(self._clock()), False
        alarm = asyncio.get_running_loop().call_later(self._hangs_s, self._hangs, queue, slot)
        try:
            yield slot
            answered = not slot.void
        finally:
            alarm.cancel()
            if not slot.void:
                self._learn(queue, slot.began, answered)
            self._leave(queue, slot)

    async def spread(
        self,
        namespace: str,
        items: Iterator[T],
        act: Callable[[T], Awaitable[None]],
        *,
        is_over: Callable[[], bool] = lambda: False,
    ) -> int:
        """Call `act` on each item, as many at once as one job should. Return how many were done, at least
        one, when no items are left or `is_over` returns true. Raise the first error. An error stops the items
        that wait, as a quota rejects a thousand pods for the same reason, but none that is in flight: the
        quota may have counted a creation that is broken off."""
        queue, tally = self._queue_of(namespace), _Tally(is_over)
        part = _Part(queue)

        async def work(group: asyncio.TaskGroup) -> None:
            for item in items:  # shared by all tasks, so that no item is built before its slot is free
                if not await self._one_of(namespace, tally, act, item):
                    return
                if part.is_too_large:
                    part.shrink()
                    return
                if part.grow():
                    group.create_task(work(group))

        queue.jobs += 1
        try:
            async with asyncio.TaskGroup() as group:
                while part.grow():
                    group.create_task(work(group))
        finally:
            queue.jobs -= 1
            part.end()
        if tally.error is not None:
            raise tally.error
        return tally.done

    async def _one_of(
        self, namespace: str, tally: _Tally, act: Callable[[T], Awaitable[None]], item: T
    ) -> bool:
        """Call `act` on the item, unless the time is over before it gets a slot. Return whether there is time
        for more."""
        try:
            async with self.one(namespace) as slot:
                if tally.begun and tally.is_over:
                    slot.void = True
                    return False
                tally.begun += 1
                await act(item)
        except Exception as error:
            tally.error = tally.error or error
            return False
        tally.done += 1
        return not tally.is_over

    def _queue_of(self, namespace: str) -> _NamespaceQueue:
        now, queue = self._clock(), self._queues.get(namespace)
        if queue is None or (queue.is_idle and now - queue.used_at > REST_S):
            self._queues = {
                name: other
                for name, other in self._queues.items()
                if not other.is_idle or now - other.used_at <= REST_S
            }
            queue = self._queues[namespace] = _NamespaceQueue(allowed=float(self._least), used_at=now)
        return queue

    def _is_open(self, queue: _NamespaceQueue) -> bool:
        limit = LIMIT_WHEN_HANGING if self._hanging >= self._most else self._most
        return self._held < self._most and queue.held < min(int(queue.allowed), limit)

    async def _enter(self, queue: _NamespaceQueue) -> None:
        if not queue.waiting and self._is_open(queue):
            self._take(queue)
            return
        slot = asyncio.get_running_loop().create_future()
        queue.waiting.append(slot)
        self._queue[queue] = None
        self._wake()  # those ahead may have been cancelled
        try:
            await slot  # `_wake` has counted this creation already
        except asyncio.CancelledError:
            if not slot.cancelled():  # its slot had just become free
                self._leave(queue, Slot(self._clock()))
            raise

    def _take(self, queue: _NamespaceQueue) -> None:
        self._held += 1
        queue.held += 1

    def _hangs(self, queue: _NamespaceQueue, slot: Slot) -> None:
        """Mark a creation as hanging: it frees its slot among those of all namespaces, but not the one of its
        namespace."""
        slot.hangs = True
        self._held -= 1
        self._hanging += 1
        self._cut(queue, slot.began)
        self._wake()

    def _leave(self, queue: _NamespaceQueue, slot: Slot) -> None:
        self._held -= not slot.hangs
        self._hanging -= slot.hangs
        queue.held -= 1
        queue.used_at = self._clock()
        self._wake()

    def _learn(self, queue: _NamespaceQueue, began: float, answered: bool) -> None:
        """Adjust the namespace's limit by the time of one answer. A late error lowers it; an early error does
        not raise it, since it shows only that the request is rejected."""
        now = self._clock()
        took = now - began
        if answered:
            queue.shortest_s = min(queue.shortest_s, took)
        if took > min(max(FAST_S, 2 * queue.shortest_s), MAX_FAST_S):
            self._cut(queue, began)
        elif answered and queue.is_used:
            more = 1.0 if queue.cut_at is None else 1 / queue.allowed
            queue.allowed = min(self._most_of_one, queue.allowed + more)

    def _cut(self, queue: _NamespaceQueue, began: float) -> None:
        if queue.cut_at is None or began >= queue.cut_at:  # only once for all that were in flight together
            queue.allowed, queue.cut_at = max(self._least, queue.allowed * _CUT), self._clock()

    def _wake(self) -> None:
        while (queue := next(filter(self._is_open, self._queue), None)) is not None:
            del self._queue[queue]
            while queue.waiting:
                slot = queue.waiting.popleft()
                if not slot.done():  # a future that is done was cancelled
                    self._take(queue)
                    slot.set_result(None)
                    break
            if queue.waiting:
                self._queue[queue] = None  # behind the others
