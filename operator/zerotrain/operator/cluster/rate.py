"""The client's own limits: a token bucket over all requests, so that a storm of jobs cannot flood the API."""

from __future__ import annotations

import asyncio
import time


class TokenBucket:
    """`rate` requests per second on average, `burst` at once. Fair: waiters are served in order."""

    def __init__(self, *, rate: float, burst: int) -> None:
        if rate <= 0 or burst < 1:
            raise ValueError(f"rate must be above 0 and burst at least 1; got {rate} and {burst}")
        self._rate, self._burst = rate, float(burst)
        self._tokens, self._at = float(burst), time.monotonic()
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Wait for one token."""
        async with self._turn:
            while True:
                now = time.monotonic()
                self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
                self._at = now
                if self._tokens >= 1:
                    self._tokens -= 1
                    return
                await asyncio.sleep((1 - self._tokens) / self._rate)
