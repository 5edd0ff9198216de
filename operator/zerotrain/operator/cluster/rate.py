"""Rate limits of the operator itself: of all its requests, so that a storm of jobs cannot flood the API
server; of the events of each job, so that one job cannot crowd out those of others; and of its calls to
workers."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

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
