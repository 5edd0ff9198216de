"""Admission of connections to the worker's HTTP server when there are more than it can serve: the decisions,
without sockets.

A client that sends its request byte by byte, or never reads its answer, occupies a thread. So every request
has a deadline, and a connection that comes when all slots are taken does not wait for it: it displaces
another connection, the oldest of the peer that holds the most. A connection that presented the attempt's
token is never displaced, and slots are reserved for the address that it came from: whatever the other clients
do, the operator is served.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_CONNECTIONS = 32
MAX_OF_ONE_PEER = 8
KEPT_CONNECTIONS = 4
"""Slots beyond the others, for addresses from which the token came."""
MAX_TRUSTED_PEERS = 16
"""Largest number of remembered addresses, the newest: replicas of the operator, and their former
addresses."""
REQUEST_S = 10.0
"""Seconds from the first byte to the last of a request."""
ANSWER_S = 60.0
"""Seconds from there to the last byte of the answer."""


@dataclass(slots=True)
class _Connection:
    peer: str
    until: float
    number: int
    is_answered: bool = False
    """Whether its request is complete."""
    is_trusted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission(Generic[K]):
    """Decision about a new connection."""

    admitted: bool
    displaced: K | None = None
    """Connection that lost its slot and must be closed."""


class Slots(Generic[K]):
    """The open connections; may be used from any thread. Times are seconds of any monotonic clock."""

    def __init__(self, *, request_s: float = REQUEST_S, answer_s: float = ANSWER_S) -> None:
        self._request_s, self._answer_s = request_s, answer_s
        self._open: dict[K, _Connection] = {}
        self._trusted: dict[str, None] = {}
        self._lock = threading.Lock()
        self._count = 0

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: K, peer: str, now: float) -> Admission[K]:
        """Give a new connection a slot, possibly that of another one."""
        with self._lock:
            displaced = None
            if not self._has_free_slot(peer):
                displaced = self._to_displace(peer)
                if displaced is None:
                    return Admission(admitted=False)
                del self._open[displaced]
            self._count += 1
            self._open[connection] = _Connection(peer, now + self._request_s, self._count)
            return Admission(admitted=True, displaced=displaced)

    def request_came(self, connection: K, now: float, *, trusted: bool) -> None:
        """Record that the request, or its head, has arrived; `trusted`: with the token."""
        with self._lock:
            found = self._open.get(connection)
            if found is None:
                return
            found.is_answered, found.until = True, now + self._answer_s
            if trusted:
                found.is_trusted = True
                self._trusted.pop(found.peer, None)
                self._trusted[found.peer] = None
                while len(self._trusted) > MAX_TRUSTED_PEERS:
                    del self._trusted[next(iter(self._trusted))]

    def release(self, connection: K) -> None:
        """Free the slot of a connection that has ended; it may have lost the slot before."""
        with self._lock:
            self._open.pop(connection, None)

    def overdue(self, now: float) -> list[K]:
        """Remove the connections past their deadline and return them: the caller must close them."""
        with self._lock:
            late = [connection for connection, found in self._open.items() if found.until < now]
            for connection in late:
                del self._open[connection]
            return late

    def _has_free_slot(self, peer: str) -> bool:
        of_peer = sum(found.peer == peer for found in self._open.values())
        if peer in self._trusted:
            return len(self._open) < MAX_CONNECTIONS + KEPT_CONNECTIONS
        return len(self._open) < MAX_CONNECTIONS and of_peer < MAX_OF_ONE_PEER

    def _to_displace(self, peer: str) -> K | None:
        """Return the connection to displace: the oldest of the peer itself where it has its share, else of
        the peer that holds the most; one whose request is incomplete before one that is being answered."""
        held = Counter(found.peer for found in self._open.values())
        may = {key: found for key, found in self._open.items() if not found.is_trusted}
        if peer not in self._trusted:
            if held[peer] >= MAX_OF_ONE_PEER:
                may = {key: found for key, found in may.items() if found.peer == peer}
            else:
                may = {key: found for key, found in may.items() if found.peer not in self._trusted}

        def order(key: K) -> tuple[bool, int, bool, int]:
            found = may[key]
            return found.peer in self._trusted, -held[found.peer], found.is_answered, found.number

        return min(may, key=order, default=None)
