"""How many creations are in flight at once: in each namespace as many as the API server answers soon.

Those that it cannot work on yet would wait there instead of here, in the middle of passes, and with them the
requests of everybody else. Additive increase and multiplicative decrease, as TCP's congestion control does it
(Jacobson 1988, "Congestion Avoidance and Control"; with its slow start), by the time of an answer. By
namespace, since what makes an answer late may be one tenant's alone: a slow admission webhook. A creation
that hangs there leaves its place among those of all namespaces to others.
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
"""Over all namespaces, without those that hang: more queue up inside the API server, each with a
connection."""
MOST_OF_ONE: Final = 24
"""Of one namespace: what is slow there must leave some for the others."""
LEAST: Final = 8
"""Of one namespace, which begins with it. Enough for an API server that is near to have always some to work
on."""
SOON_S: Final = 0.2
"""An answer that takes longer has waited: alone, a creation takes a tenth of it or less."""
MOST_SOON_S: Final = 1.0
"""Where every one takes long, as through slow webhooks, twice the shortest is soon; but no more than this."""
HANGS_S: Final = 1.0
"""What has no answer after so long waits for something behind the API server, and does not keep it busy."""
FEW: Final = 2
"""Of one namespace while as many creations hang as may be in flight: nobody is left without."""
REST_S: Final = 60.0
"""What was learned of a namespace is forgotten after so long without a creation there."""
_CUT: Final = 0.8
_SHARE: Final = 0.6


@dataclass(slots=True, eq=False)
class _Lane:
    """One namespace."""

    allowed: float
    cut_at: float | None = None
    """None while no answer was late: then each one that was not counts, instead of each round of them."""
    shortest_s: float = math.inf
    held: int = 0
    """Those that hang as well."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    """In the order of asking."""
    used_at: float = 0.0
    jobs: int = 0
    """That create now."""
    asked: int = 0
    """Creations that those jobs make or wait for."""

    @property
    def share(self) -> int:
        """Rounded up: those of all jobs together are more than there is."""
        return math.ceil(self.allowed * min(_SHARE, 1 / max(self.jobs, 1)))

    @property
    def is_idle(self) -> bool:
        return not (self.held or self.waiting or self.jobs)

    @property
    def is_used(self) -> bool:
        """Of what nobody uses nothing can be learned."""
        return self.held >= int(_SHARE * self.allowed)


@dataclass(slots=True)
class _Part:
    """What one job has of its lane: one creation always, more of them where that keeps nobody waiting."""

    lane: _Lane
    asked: int = 0

    def grow(self) -> bool:
        """Whether there is one more now."""
        if self.asked and (self.asked >= self.lane.share or self.lane.asked >= int(self.lane.allowed)):
            return False
        self._add(1)
        return True

    def shrink(self) -> None:
        self._add(-1)

    def end(self) -> None:
        self._add(-self.asked)

    @property
    def is_too_large(self) -> bool:
        """Others came, or the limit fell."""
        return self.asked > 1 and (self.asked > self.lane.share or self.lane.asked > int(self.lane.allowed))

    def _add(self, number: int) -> None:
        self.asked += number
        self.lane.asked += number


@dataclass(slots=True)
class Turn:
    """Leave to create."""

    began: float
    void: bool = False
    """Set by a holder that did not use it: its time says nothing."""
    hangs: bool = False


@dataclass(slots=True)
class _Tally:
    """How far one `spread` is."""

    time_is_over: Callable[[], bool]
    begun: int = 0
    done: int = 0
    error: Exception | None = None
    """The first one."""

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.time_is_over()


class Creations:
    """Not thread-safe: one event loop owns it. `clock`: seconds that never jump. `hangs_s`: of the event
    loop's own clock."""

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
        """In flight, of all namespaces: the second hang, and are not among the first."""
        self._lanes: dict[str, _Lane] = {}
        self._queue: dict[_Lane, None] = {}
        """Lanes in which somebody waits; the next to be served first."""

    def limit(self, namespace: str) -> int:
        """How many may be in flight there now."""
        return int(self._lane(namespace).allowed)

    def share(self, namespace: str) -> int:
        """How many of them one job should ask for at once: what the others that create now leave, and some
        for one that comes. Who asks for more waits for them in the middle of a pass."""
        return self._lane(namespace).share

    @asynccontextmanager
    async def one(self, namespace: str) -> AsyncIterator[Turn]:
        """Wait for a turn, and hold it for the length of one creation. First come first served within a
        namespace; those that may have more take turns."""
        lane = self._lane(namespace)
        await self._enter(lane)
        turn, answered = Turn(self._clock()), False
        alarm = asyncio.get_running_loop().call_later(self._hangs_s, self._hangs, lane, turn)
        try:
            yield turn
            answered = not turn.void
        finally:
            alarm.cancel()
            if not turn.void:
                self._learn(lane, turn.began, answered)
            self._leave(lane, turn)

    async def spread(
        self,
        namespace: str,
        items: Iterator[T],
        act: Callable[[T], Awaitable[None]],
        *,
        is_over: Callable[[], bool] = lambda: False,
    ) -> int:
        """`act` on one item after the other, as many at once as one job should. Returns how many were done,
        which is one at least, when none are left or it `is_over`. The first error is raised. It stops those
        that wait, for a quota refuses a thousand pods for the same reason, and none that is in flight: one
        that is broken off may have been counted by the quota already."""
        lane, tally = self._lane(namespace), _Tally(is_over)
        part = _Part(lane)

        async def work(group: asyncio.TaskGroup) -> None:
            for item in items:  # shared, so that nothing is built before its turn
                if not await self._one_of(namespace, tally, act, item):
                    return
                if part.is_too_large:
                    part.shrink()
                    return
                if part.grow():
                    group.create_task(work(group))

        lane.jobs += 1
        try:
            async with asyncio.TaskGroup() as group:
                while part.grow():
                    group.create_task(work(group))
        finally:
            lane.jobs -= 1
            part.end()
        if tally.error is not None:
            raise tally.error
        return tally.done

    async def _one_of(
        self, namespace: str, tally: _Tally, act: Callable[[T], Awaitable[None]], item: T
    ) -> bool:
        """`act` on the item, unless the time is over before its turn. Whether there is time for more."""
        try:
            async with self.one(namespace) as turn:
                if tally.begun and tally.is_over:
                    turn.void = True
                    return False
                tally.begun += 1
                await act(item)
        except Exception as error:
            tally.error = tally.error or error
            return False
        tally.done += 1
        return not tally.is_over

    def _lane(self, namespace: str) -> _Lane:
        now, lane = self._clock(), self._lanes.get(namespace)
        if lane is None or (lane.is_idle and now - lane.used_at > REST_S):
            self._lanes = {
                name: other
                for name, other in self._lanes.items()
                if not other.is_idle or now - other.used_at <= REST_S
            }
            lane = self._lanes[namespace] = _Lane(allowed=float(self._least), used_at=now)
        return lane

    def _is_open(self, lane: _Lane) -> bool:
        few = FEW if self._hanging >= self._most else self._most
        return self._held < self._most and lane.held < min(int(lane.allowed), few)

    async def _enter(self, lane: _Lane) -> None:
        if not lane.waiting and self._is_open(lane):
            self._take(lane)
            return
        turn = asyncio.get_running_loop().create_future()
        lane.waiting.append(turn)
        self._queue[lane] = None
        self._wake()  # who stood before may have gone
        try:
            await turn  # who wakes us has counted us already
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had just come
                self._leave(lane, Turn(self._clock()))
            raise

    def _take(self, lane: _Lane) -> None:
        self._held += 1
        lane.held += 1

    def _hangs(self, lane: _Lane, turn: Turn) -> None:
        """Its place is somebody else's now, and its namespace has it still."""
        turn.hangs = True
        self._held -= 1
        self._hanging += 1
        self._cut(lane, turn.began)
        self._wake()

    def _leave(self, lane: _Lane, turn: Turn) -> None:
        self._held -= not turn.hangs
        self._hanging -= turn.hangs
        lane.held -= 1
        lane.used_at = self._clock()
        self._wake()

    def _learn(self, lane: _Lane, began: float, answered: bool) -> None:
        """Errors may be late as well; that one came soon says only who refuses, not who works."""
        now = self._clock()
        took = now - began
        if answered:
            lane.shortest_s = min(lane.shortest_s, took)
        if took > min(max(SOON_S, 2 * lane.shortest_s), MOST_SOON_S):
            self._cut(lane, began)
        elif answered and lane.is_used:
            more = 1.0 if lane.cut_at is None else 1 / lane.allowed
            lane.allowed = min(self._most_of_one, lane.allowed + more)

    def _cut(self, lane: _Lane, began: float) -> None:
        if lane.cut_at is None or began >= lane.cut_at:  # once for all that were in flight together
            lane.allowed, lane.cut_at = max(self._least, lane.allowed * _CUT), self._clock()

    def _wake(self) -> None:
        while (lane := next(filter(self._is_open, self._queue), None)) is not None:
            del self._queue[lane]
            while lane.waiting:
                turn = lane.waiting.popleft()
                if not turn.done():  # else it was cancelled
                    self._take(lane)
                    turn.set_result(None)
                    break
            if lane.waiting:
                self._queue[lane] = None  # behind the others
