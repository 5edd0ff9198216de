"""Limit on the creations of pods in flight, and batches that double.

The limit is one of each namespace, so that creations of one whose webhook hangs hold up no other. Further
creations would queue up in the API server, before the requests of all other clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Final, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

AT_ONCE: Final = 8
"""Maximum of creations in flight of one namespace, enough to keep an API server that is near always busy."""
MAX_BATCH: Final = 8 * AT_ONCE
"""Maximum size of a batch: it ends when the slowest of its creations does."""


class Creations:
    """Slots of the creations of all namespaces. Not thread-safe: one event loop owns it."""

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
