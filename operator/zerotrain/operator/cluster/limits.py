"""Limits of the operator on itself: rates of all its requests, so that a storm of jobs cannot flood the API
server; of the events of each job, so that one job cannot crowd out those of others; and of its calls to
workers. The creations of pods have a limit on how many are in flight, and batches that double.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Final, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")
Clock = Callable[[], float]


class TokenBucket:
    """Token bucket of `rate` tokens per second on average and `burst` at once."""

    def __init__(self, *, rate: float, burst: float, clock: Clock = time.monotonic) -> None:
        """Fill the bucket. `clock`: seconds that never jump. Raises ValueError for limits that let nothing
        through."""
        if rate <= 0 or burst < 1:
            raise ValueError(f"rate must be above 0 and burst at least 1; got {rate} and {burst}")
        self._rate, self._burst, self._clock = rate, float(burst), clock
        self._tokens, self._at = float(burst), clock()
        self._lock = asyncio.Lock()

    def try_take(self, tokens: int = 1) -> bool:
        """Take tokens if there is at least one, and return whether there was. More than there are leave a
        debt, which later calls wait for."""
        self._refill()
        allowed = self._tokens >= 1
        if allowed:
            self._tokens -= tokens
        return allowed

    def refund(self, tokens: int) -> None:
        """Return tokens that were not used."""
        self._tokens = min(self._burst, self._tokens + tokens)

    async def take(self, *, urgent: bool = False) -> None:
        """Wait for one token; waiters are served in order. An urgent request is sent at once and leaves a
        debt: the renewal of the lease must not wait behind the creations that the lease allows."""
        if urgent:
            self._refill()
            self._tokens -= 1
            return
        async with self._lock:
            while True:
                if self.try_take():
                    return
                await asyncio.sleep((1 - self._tokens) / self._rate)

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now


class KeyedBuckets:
    """Token buckets by key: `burst` at once, then one token every `every_s` seconds. The buckets that were
    unused for longest are forgotten first, so that a million keys stay small."""

    def __init__(self, *, burst: int, every_s: float, max_keys: int, clock: Clock = time.monotonic) -> None:
        self._burst, self._every_s, self._max_keys, self._clock = burst, every_s, max_keys, clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        """The longest unused first."""

    def try_take(self, key: str) -> bool:
        """Take a token of the key, without waiting. Return whether there was one."""
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            bucket = TokenBucket(rate=1 / self._every_s, burst=self._burst, clock=self._clock)
        self._buckets[key] = bucket
        while len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        return bucket.try_take()


LARGE = 50
"""Number of calls from which on an inspection draws on a bucket that only such inspections share. One
inspection of thousands of workers leaves a long debt, during which the hangs of other jobs must not go
unseen."""


class InspectionBuckets:
    """One bucket for the calls of all inspections of small jobs and one for those of large jobs."""

    def __init__(self, rate: float, clock: Clock) -> None:
        """Fill both; `rate`: calls per second on average."""
        self._small, self._large = (TokenBucket(rate=rate, burst=rate, clock=clock) for _ in range(2))

    def of(self, calls: int) -> TokenBucket:
        """Return the bucket for an inspection of so many calls."""
        return self._small if calls < LARGE else self._large


AT_ONCE: Final = 8
"""Maximum of creations in flight of one namespace, enough to keep an API server that is near always busy."""
MAX_BATCH: Final = 8 * AT_ONCE
"""Maximum size of a batch: it ends when the slowest of its creations does."""


class Creations:
    """Slots of the creations of all namespaces: creations of one whose webhook hangs hold up no other. More
    creations would queue up in the API server, before the requests of all other clients. Not thread-safe: one
    event loop owns it."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphores in use."""

    def slots(self, namespace: str) -> asyncio.Semaphore:
        """Return the semaphore that is held for the length of one creation in the namespace."""
        slots = self._slots.get(namespace)
        if slots is None:
            slots = self._slots[namespace] = asyncio.Semaphore(self._at_once)
        return slots

    async def in_batches(
        self,
        namespace: str,
        items: Iterable[T],
        number: int,
        act: Callable[[T], Awaitable[None]],
        *,
        first: int = 1,
        is_over: Callable[[], bool] = lambda: False,
    ) -> int:
        """Call `act` on each of `number` items, in a batch of `first` and batches twice as large as the one
        before. Return how many were done, at least one, when all are or `is_over` returns true. Raise the
        first error once all that is in flight has ended: a quota rejects a thousand pods for the same reason,
        and may have counted a creation that is broken off."""
        slots, left, begun, done, error = self.slots(namespace), iter(items), 0, 0, None

        async def act_on_next() -> None:
            nonlocal begun, done, error
            async with slots:
                if error is not None or (begun and is_over()):
                    return
                try:
                    for item in islice(left, 1):  # none is built before its slot is free
                        begun += 1
                        await act(item)
                        done += 1
                except Exception as failure:
                    error = error or failure

        size = first
        while begun < number:
            wanted = min(begun + min(size, MAX_BATCH), number)
            await asyncio.gather(*(act_on_next() for _ in range(wanted - begun)))
            if error is not None:
                raise error
            if begun < wanted:
                break
            size *= 2
        return done
