"""Limits on the number of jobs that create pods at once. The controller asks before a pass writes the objects
that its creations need.

Creations of all jobs share the API server. A thousand jobs that begin together would each wait for the pods
of all others in the middle of a pass, and hold a task of the controller that a failure elsewhere waits for.
So a few begin, and the others wait in line without a pass: one line for each namespace, served in rotation. A
namespace in which a pass takes long, as behind a webhook that hangs, does not use up the slots of others.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")

MAX_STARTS = 16
"""Maximum number of jobs that create pods at once, over all namespaces except those in which a pass takes
long."""

MAX_STARTS_OF_ONE = 8
"""Maximum number of such jobs of one namespace: enough to keep all creations in flight that are allowed at
once. Behind a webhook that does not answer, each job keeps its slot for as long as a request is retried."""

MIN_STARTS = 4
"""Number of such jobs that each namespace may have however slow its creations are: while some jobs write the
objects that their pods need, pods of the others are created."""

LARGE = 24
"""Maximum number of pods that a small job creates. Larger jobs have lines of their own: eight jobs of a
thousand pods would keep all others waiting."""

MAX_LARGE = 8
MAX_LARGE_OF_ONE = 1
"""Maximum number of large jobs of one namespace that create pods at once. They share all creations of the
namespace, so more of them would be ready no sooner, and two that together exceed its quota would each get a
part."""

TIGHT_S = 600.0
"""Seconds after a rejection in which a namespace counts as one where some jobs may not get all their pods."""


class Starts(Generic[K]):
    """Slots for jobs that create pods, and the lines of jobs that wait for one.

    `namespace_of` returns the namespace of a key. `capacity` returns the number of pods that the jobs with a
    slot in a namespace may create together before the next job gets one; the last job may exceed it.
    """

    def __init__(
        self,
        limit: int = MAX_STARTS,
        *,
        least: int = MIN_STARTS,
        most: int = MAX_STARTS_OF_ONE,
        namespace_of: Callable[[K], str] = lambda key: "",
        capacity: Callable[[str], float] = lambda namespace: math.inf,
    ) -> None:
        self._limit, self._least, self._most = limit, least, most
        self._namespace_of, self._capacity = namespace_of, capacity
        self._busy: dict[K, int] = {}
        """Keys that have a slot, with the number of pods that each creates."""
        self._staying: set[K] = set()
        """Keys of `_busy` that keep their slot at the next `leave`."""
        self._latest = 0
        """Pods of the job that got a slot last: the best estimate for the jobs that were called."""
        self._late: dict[K, str] = {}
        """Keys whose passes take long, and their namespaces."""
        self._called: set[K] = set()
        """Keys that were called and have not come back yet: a slot is kept for each."""
        self._lines: OrderedDict[str, OrderedDict[K, None]] = OrderedDict()
        """Waiting keys by namespace, the namespace to be served next in front. No line is empty."""

    def enter(self, key: K, *, pods: int, begun: bool = False, first: bool = False) -> bool:
        """Return whether the key may create `pods` pods now. If not, it is called later, in the order of
        requests, or before the others if `first` is true. A key that has `begun` may always create: an
        earlier pass ended before all of its pods were created."""
        if pods <= 0:
            return True
        if not begun and key not in self._busy and self.stand(key, first=first):
            return False
        self._called.discard(key)
        self._step_out(key)
        self._busy[key] = self._latest = pods
        return True

    def stand(self, key: K, *, first: bool = False) -> bool:
        """Put the key in line unless a slot is free, and return whether it waits. This saves a pass whose
        only result would be that it has to wait. A job that turns out to create nothing has waited for
        nothing."""
        namespace = self._namespace_of(key)
        if key in self._called or self._has_place(namespace):
            return False
        line = self._lines.setdefault(namespace, OrderedDict())
        line[key] = None
        if first:
            line.move_to_end(key, last=False)
        return True

    def forget(self, key: K) -> None:
        """Remove a key that is gone for good from its line. If it was called already, its pass finds out."""
        self._step_out(key)

    def is_in_line(self, key: K) -> bool:
        """Return whether the key waits in line and was not called yet."""
        return key in self._lines.get(self._namespace_of(key), ())

    def holds(self, key: K) -> bool:
        """Return whether the key has a slot."""
        return key in self._busy

    def stay(self, key: K) -> None:
        """Keep the key's slot beyond the pass that ends now: it left pods for the next pass to create."""
        if key in self._busy:
            self._staying.add(key)

    def leave(self, key: K) -> list[K]:
        """Release the key's slot after a pass, unless the key stays. Return the keys that are called now."""
        if key not in self._staying:
            self._busy.pop(key, None)
            self._called.discard(key)
        self._staying.discard(key)
        self._late.pop(key, None)
        return self._call()

    def late(self, key: K) -> list[K]:
        """Mark the key's pass, whether or not it creates pods, as one that takes long: until it ends, the
        slots of its namespace do not count among those of all namespaces. Return the keys that are called
        now."""
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
        return len(busy) + called < self._least or sum(busy) + called * self._latest < self._capacity(
            namespace
        )


class StartLines(Generic[K]):
    """Lines for jobs of few pods, and others for large ones, so that neither keep the other waiting.

    In a namespace where the API server rejected pods a while ago, all jobs of more than one pod wait in the
    line of large ones, in which one creates at a time: two jobs that create together may each get a part.
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
            MAX_LARGE, least=MAX_LARGE_OF_ONE, namespace_of=namespace_of, capacity=lambda _: 0
        )
        self._entered: dict[K, Starts[K]] = {}
        self._namespace_of, self._clock = namespace_of, clock
        self._refused_at: dict[str, float] = {}
        """Time of the last rejection by namespace, within `TIGHT_S`."""

    def enter(self, key: K, *, pods: int, begun: bool = False) -> bool:
        """Return whether the key may create `pods` pods now, as `Starts.enter` does. A large job that has
        begun comes before those that have not, but does not bypass the limit: an operator that restarts may
        find many."""
        tight = pods > 1 and self._is_tight(self._namespace_of(key))
        if pods > LARGE or tight or self._large.holds(key):  # a large job stays one until its last pod
            starts, may = self._large, self._large.enter(key, pods=pods, first=begun)
        else:
            starts, may = self._small, self._small.enter(key, pods=pods, begun=begun)
        if may and pods > 0:
            self._entered[key] = starts
        return may

    def stand(self, key: K) -> bool:
        """Put a job of few pods in line, as `Starts.stand` does."""
        return self._small.stand(key)

    def is_in_line(self, key: K) -> bool:
        """Return whether the key waits in the line of large jobs, where others create for minutes."""
        return self._large.is_in_line(key)

    def refused(self, key: K) -> None:
        """Record that the API server rejected pods of the key."""
        now = self._clock()
        self._refused_at = {namespace: at for namespace, at in self._refused_at.items() if now - at < TIGHT_S}
        self._refused_at[self._namespace_of(key)] = now

    def _is_tight(self, namespace: str) -> bool:
        at = self._refused_at.get(namespace)
        return at is not None and self._clock() - at < TIGHT_S

    def stay(self, key: K) -> None:
        """Keep the slot that the key got in this pass, as `Starts.stay` does."""
        if key in self._entered:
            self._entered[key].stay(key)

    def forget(self, key: K) -> None:
        """Remove the key from all lines, as `Starts.forget` does."""
        self._small.forget(key)
        self._large.forget(key)

    def leave(self, key: K) -> list[K]:
        """Release the key's slots, as `Starts.leave` does."""
        self._entered.pop(key, None)
        return [*self._small.leave(key), *self._large.leave(key)]

    def late(self, key: K) -> list[K]:
        """Mark the key's pass as one that takes long, as `Starts.late` does."""
        return [*self._small.late(key), *self._large.late(key)]
