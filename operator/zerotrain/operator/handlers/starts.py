"""How many jobs create pods at once. The controller asks before a pass writes what its creations need.

Creations of all jobs share the API server. A thousand jobs that begin together would each wait for the pods
of all others in the middle of a pass, and hold a worker meanwhile that a failure elsewhere waits for. So a
few begin, and the others stand in line without a pass.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")

MAX_STARTS = 8
"""Enough to keep all creations that are allowed at once in flight."""

LARGE = 24
"""Jobs that create more pods do not stand in line: eight of a thousand pods would keep all others waiting."""


class Starts(Generic[K]):
    """Places for jobs that create, and the line in front of them."""

    def __init__(self, limit: int = MAX_STARTS) -> None:
        self._limit = limit
        self._busy: set[K] = set()
        self._called: set[K] = set()
        """Keys whose turn it is and that did not come back yet: their places are kept."""
        self._line: OrderedDict[K, None] = OrderedDict()

    def enter(self, key: K, *, pods: int) -> bool:
        """Whether the key may create so many pods now; else it is called, in the order of asking."""
        if not 0 < pods <= LARGE:
            return True
        if self.stand(key):
            return False
        self._called.discard(key)
        self._line.pop(key, None)
        self._busy.add(key)
        return True

    def stand(self, key: K) -> bool:
        """Whether the key has to stand in line if it wants to create, and now does; spares it a pass that
        finds out. One that turns out to create nothing has waited for nothing."""
        if key in self._called or len(self._busy) + len(self._called) < self._limit:
            return False
        self._line[key] = None
        return True

    def leave(self, key: K) -> list[K]:
        """After every pass: the key has no place and wants none. Returns those whose turn it is now."""
        self._busy.discard(key)
        self._called.discard(key)
        following = []
        while self._line and len(self._busy) + len(self._called) < self._limit:
            following.append(self._line.popitem(last=False)[0])
            self._called.add(following[-1])
        return following
