"""Rate limits of the operator itself: a token bucket over all requests, so that a storm of jobs cannot flood
the API server, and a budget of events per job, so that one job cannot crowd out the events of all others."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable


class TokenBucket:
    """Token bucket of `rate` requests per second on average and `burst` at once. It is fair: waiters are
    served in order."""

    def __init__(self, *, rate: float, burst: int) -> None:
        if rate <= 0 or burst < 1:
            raise ValueError(f"rate must be above 0 and burst at least 1; got {rate} and {burst}")
        self._rate, self._burst = rate, float(burst)
        self._tokens, self._at = float(burst), time.monotonic()
        self._lock = asyncio.Lock()

    async def take(self, *, urgent: bool = False) -> None:
        """Wait for one token. An urgent request is sent at once and leaves a debt: the renewal of the lease
        must not wait behind the creations that the lease allows."""
        if urgent:
            self._refill()
            self._tokens -= 1
            return
        async with self._lock:
            while True:
                self._refill()
                if self._tokens >= 1:
                    self._tokens -= 1
                    return
                await asyncio.sleep((1 - self._tokens) / self._rate)

    def _refill(self) -> None:
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now


class Budgets:
    """Small token buckets by key: `burst` at once, then one every `every_s` seconds. The buckets that were
    unused for longest are forgotten first, so that a million keys stay small."""

    def __init__(
        self, *, burst: int, every_s: float, max_keys: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._every_s, self._max_keys, self._clock = burst, every_s, max_keys, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tokens left and the time at which they were counted, by key; the longest unused first."""

    def spend(self, key: str) -> bool:
        """Take a token of the key, without waiting. Return whether there was one."""
        now = self._clock()
        tokens, at = self._buckets.pop(key, (float(self._burst), now))
        tokens = min(float(self._burst), tokens + (now - at) / self._every_s)
        allowed = tokens >= 1
        self._buckets[key] = (tokens - 1 if allowed else tokens, now)
        while len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        return allowed
