"""How many jobs create pods at once. The controller asks before a pass writes what its creations need.

Creations of all jobs share the API server. A thousand jobs that begin together would each wait for the pods
of all others in the middle of a pass, and hold a worker meanwhile that a failure elsewhere waits for. So a
few begin, and the others stand in line without a pass: one line for each namespace, which take turns. Where
a pass takes long, as behind a webhook that hangs, the places of its namespace are not those of others.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")

MAX_STARTS = 16
"""Of all namespaces but those in which a pass takes long."""

MAX_STARTS_OF_ONE = 8
"""Of one namespace: enough to keep all creations that are allowed at once in flight. Behind a webhook that
does not answer, each keeps its place for as long as a request is tried again."""

MIN_STARTS = 4
"""Of each namespace, however slow its creations are: while some jobs write what their pods need, those of the
others are made."""

LARGE = 24
"""Jobs that create more pods have lines of their own: eight of a thousand would keep all others waiting."""

MAX_LARGE = 8
MAX_LARGE_OF_ONE = 1
"""Of one namespace. They share all that it may create, so that more at once would be ready no sooner; and
two that together exceed its quota would each get a part."""

TIGHT_S = 600.0
"""So long after a refusal a namespace counts as one where not all may get what they ask for."""


class Starts(Generic[K]):
    """Places for jobs that create, and the lines in front of them.

    `namespace_of` gives the namespace of a key, `room` how many pods those who create there may
    have together before the next one comes; the last to come may exceed it.
    """

    def __init__(
        self,
        limit: int = MAX_STARTS,
        *,
        least: int = MIN_STARTS,
        most: int = MAX_STARTS_OF_ONE,
        namespace_of: Callable[[K], str] = lambda key: "",
        room: Callable[[str], float] = lambda namespace: math.inf,
    ) -> None:
        self._limit, self._least, self._most = limit, least, most
        self._namespace_of, self._room = namespace_of, room
        self._busy: dict[K, int] = {}
        """Pods of each."""
        self._staying: set[K] = set()
        """Of `_busy`, until `leave`."""
        self._latest = 0
        """Pods of the job that came last: the best guess for those that were called."""
        self._late: dict[K, str] = {}
        """Keys whose passes take long, and their namespaces."""
        self._called: set[K] = set()
        """Keys whose turn it is and that did not come back yet: their places are kept."""
        self._lines: OrderedDict[str, OrderedDict[K, None]] = OrderedDict()
        """None is empty; the next to be served first."""

    def enter(self, key: K, *, pods: int, begun: bool = False, first: bool = False) -> bool:
        """Whether the key may create so many pods now; else it is called, in the order of asking, or before
        the others where it shall be `first`. One that has `begun` always may: an earlier pass ended before
        all of them were made."""
        if pods <= 0:
            return True
        if not begun and key not in self._busy and self.stand(key, first=first):
            return False
        self._called.discard(key)
        self._step_out(key)
        self._busy[key] = self._latest = pods
        return True

    def stand(self, key: K, *, first: bool = False) -> bool:
        """Whether the key has to stand in line if it wants to create, and now does; spares it a pass that
        finds out. One that turns out to create nothing has waited for nothing."""
        namespace = self._namespace_of(key)
        if key in self._called or self._has_place(namespace):
            return False
        line = self._lines.setdefault(namespace, OrderedDict())
        line[key] = None
        if first:
            line.move_to_end(key, last=False)
        return True

    def forget(self, key: K) -> None:
        """It is gone for good; if it was called, the pass that comes of it finds out."""
        self._step_out(key)

    def is_in_line(self, key: K) -> bool:
        """Whether the key stands in line and was not called yet."""
        return key in self._lines.get(self._namespace_of(key), ())

    def holds(self, key: K) -> bool:
        """Whether the key has a place."""
        return key in self._busy

    def stay(self, key: K) -> None:
        """The pass that ends now left pods for the next one, which goes on in the same place."""
        if key in self._busy:
            self._staying.add(key)

    def leave(self, key: K) -> list[K]:
        """After every pass: the key has no place and wants none, unless it stays. Returns those whose turn it
        is now."""
        if key not in self._staying:
            self._busy.pop(key, None)
            self._called.discard(key)
        self._staying.discard(key)
        self._late.pop(key, None)
        return self._call()

    def late(self, key: K) -> list[K]:
        """The key's pass, whether it creates or not, takes long: until its end the places of its namespace
        are not counted among those of all. Returns those whose turn it is now."""
        self._late[key] = self._namespace_of(key)
        return self._call()

    def _call(self) -> list[K]:
        following: list[K] = []
        while (namespace := self._next_namespace()) is not None:
            self._lines.move_to_end(namespace)
            waiting = next(iter(self._lines[namespace]))
            self._step_out(waiting)
            self._called.add(waiting)
            following.append(waiting)
        return following

    def _step_out(self, key: K) -> None:
        namespace = self._namespace_of(key)
        line = self._lines.get(namespace, OrderedDict())
        line.pop(key, None)
        if not line:
            self._lines.pop(namespace, None)

    def _next_namespace(self) -> str | None:
        if not self._late and not self._has_any(""):
            return None
        return next(filter(self._has_place, self._lines), None)

    def _has_any(self, namespace: str) -> bool:
        slow = set(self._late.values())
        if not slow:
            return len(self._busy) + len(self._called) < self._limit
        counted = sum(
            self._namespace_of(key) not in slow for keys in (self._busy, self._called) for key in keys
        )
        return namespace in slow or counted < self._limit

    def _has_place(self, namespace: str) -> bool:
        if not self._has_any(namespace):
            return False
        busy = [pods for key, pods in self._busy.items() if self._namespace_of(key) == namespace]
        called = sum(1 for key in self._called if self._namespace_of(key) == namespace)
        if len(busy) + called >= self._most:
            return False
        return len(busy) + called < self._least or sum(busy) + called * self._latest < self._room(namespace)


class StartLines(Generic[K]):
    """Lines for jobs of few pods, and others for large ones, so that neither keep the other waiting.

    In a namespace where the API server refused pods a while ago, all jobs of more than one pod stand in the
    line of large ones, in which one creates at a time: of two that create together each may get a part.
    """

    def __init__(
        self,
        small: Starts[K] | None = None,
        *,
        namespace_of: Callable[[K], str] = lambda key: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._small = small or Starts[K](namespace_of=namespace_of)
        self._large = Starts[K](
            MAX_LARGE, least=MAX_LARGE_OF_ONE, namespace_of=namespace_of, room=lambda _: 0
        )
        self._entered: dict[K, Starts[K]] = {}
        self._namespace_of, self._clock = namespace_of, clock
        self._refused_at: dict[str, float] = {}
        """By namespace, of the last TIGHT_S."""

    def enter(self, key: K, *, pods: int, begun: bool = False) -> bool:
        """As `Starts.enter`; a large job that has begun comes before those that have not, but not beside
        them: an operator that starts anew may find many."""
        tight = pods > 1 and self._is_tight(self._namespace_of(key))
        if pods > LARGE or tight or self._large.holds(key):  # to its last pod
            starts, may = self._large, self._large.enter(key, pods=pods, first=begun)
        else:
            starts, may = self._small, self._small.enter(key, pods=pods, begun=begun)
        if may and pods > 0:
            self._entered[key] = starts
        return may

    def stand(self, key: K) -> bool:
        """As `Starts.stand`, for a job of few pods."""
        return self._small.stand(key)

    def is_in_line(self, key: K) -> bool:
        """Whether the key stands in the line of large jobs, where others create for minutes."""
        return self._large.is_in_line(key)

    def refused(self, key: K) -> None:
        """The API server refused pods of the key."""
        now = self._clock()
        self._refused_at = {namespace: at for namespace, at in self._refused_at.items() if now - at < TIGHT_S}
        self._refused_at[self._namespace_of(key)] = now

    def _is_tight(self, namespace: str) -> bool:
        at = self._refused_at.get(namespace)
        return at is not None and self._clock() - at < TIGHT_S

    def stay(self, key: K) -> None:
        """As `Starts.stay`, in the line of this pass."""
        if key in self._entered:
            self._entered[key].stay(key)

    def forget(self, key: K) -> None:
        """As `Starts.forget`."""
        self._small.forget(key)
        self._large.forget(key)

    def leave(self, key: K) -> list[K]:
        """As `Starts.leave`."""
        self._entered.pop(key, None)
        return [*self._small.leave(key), *self._large.leave(key)]

    def late(self, key: K) -> list[K]:
        """As `Starts.late`."""
        return [*self._small.late(key), *self._large.late(key)]
