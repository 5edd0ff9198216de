"""Progress counters in memory that all ranks of a host read; each word is written by one rank.

[Note: order of stores] Counters are aligned 8-byte words. x86 makes stores visible in program order, so once
a number is visible, the data written before it is visible too. `sharing.py` does not use shared memory on
other machines.

[Note: waiting] Ranks may outnumber cores. So a wait polls a few times, then yields, then sleeps: each time a
tenth of the time it has waited, at most 1 ms. No rank burns a core, and the delay stays small against the
wait.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from zerotrain.runtime.comm.mismatch import CommError

RING = 4096
"""Maximum number of unfinished collectives of one channel."""

GATHERS, EXCHANGES = 0, 1
_CHANNELS = 2
_CLOSED = _CHANNELS
_HEAD = 8
COUNTERS_BYTES = 8 * (_HEAD + _CHANNELS * 2 * RING)
"""Size of a rank's counters in bytes: a head with the number of started collectives per channel and the
closed flag, then per channel a ring of buffer offsets and a ring of finished collectives."""

_SPINS = 32
_SHORTEST_SLEEP, _LONGEST_SLEEP = 20e-6, 1e-3
_LIVENESS_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class PeerCounters:
    """Counters of another rank."""

    words: memoryview
    pidfd: int | None
    """Descriptor that becomes readable when the process ends; None if the process cannot be watched."""


class BarrierCounters:
    """Counters of this rank and of all other ranks."""

    def __init__(
        self, rank: int, mine: memoryview, others: dict[int, PeerCounters], *, timeout_seconds: float
    ) -> None:
        self.rank = rank
        self.words = mine
        self.others = others
        self._timeout = timeout_seconds
        self.on_long_wait: Callable[[], None] = lambda: None
        """Function called repeatedly during a long wait; may raise."""

    def start(self, channel: int, offset: int = 0) -> int:
        """Announce the next collective, whose buffer is ready at `offset`, and return its number."""
        number: int = self.words[channel] + 1
        if number > RING:
            oldest = number - RING
            self._until(lambda: self.behind(channel, oldest), f"finishing collective {oldest}")
        self.words[_ring(channel, 0) + number % RING] = offset
        self.words[channel] = number
        return number

    def arrive(self, channel: int, number: int, what: str) -> None:
        """Wait until every rank has announced this collective. Raises CommError naming a rank that has
        not."""
        if self._missing(channel, number) is not None:
            self._until(lambda: self._missing(channel, number), what)

    def offset(self, channel: int, number: int, rank: int) -> int:
        """Return the offset of a rank's buffer in a collective; valid after `arrive`."""
        words = self.words if rank == self.rank else self.others[rank].words
        found: int = words[_ring(channel, 0) + number % RING]
        return found

    def finish(self, channel: int, number: int) -> None:
        """Announce that this rank has read all it needs of a collective."""
        self.words[_ring(channel, 1) + number % RING] = number

    def behind(self, channel: int, number: int) -> int | None:
        """Return another rank that has not finished a collective and still may; None if there is none."""
        slot = _ring(channel, 1) + number % RING
        for rank, other in self.others.items():
            if other.words[slot] < number and not other.words[_CLOSED] and not _ended(other):
                return rank
        return None

    def wait_for_readers(self, channel: int, number: int, *, seconds: float) -> bool:
        """Wait up to `seconds` for the other ranks to finish a collective; return whether all ranks,
        including this one, have."""
        if self.words[_ring(channel, 1) + number % RING] < number:
            return False
        deadline = time.monotonic() + seconds
        while self.behind(channel, number) is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_SHORTEST_SLEEP)
        return True

    def _missing(self, channel: int, number: int) -> int | None:
        for rank, other in self.others.items():
            if other.words[channel] < number:
                return rank
        return None

    def close(self) -> None:
        """Announce that this rank starts no more collectives. A second call does nothing: by then the
        descriptor numbers may refer to other files."""
        self.words[_CLOSED] = 1
        watched, self.others = (
            self.others,
            {rank: replace(other, pidfd=None) for rank, other in self.others.items()},
        )
        for other in watched.values():
            if other.pidfd is not None:
                with suppress(OSError):
                    os.close(other.pidfd)

    def _until(self, late_rank: Callable[[], int | None], what: str) -> None:
        """Wait until `late_rank` returns None; see [Note: waiting]."""
        for _ in range(_SPINS):
            if late_rank() is None:
                return
            os.sched_yield()
        began = looked = time.monotonic()
        while (late := late_rank()) is not None:
            now = time.monotonic()
            if now - looked > _LIVENESS_SECONDS:
                looked = now
                self._check(late_rank, late, now - began, what)
            time.sleep(min(_LONGEST_SLEEP, max(_SHORTEST_SLEEP, (now - began) / 10)))

    def _check(self, late_rank: Callable[[], int | None], late: int, waited: float, what: str) -> None:
        other = self.others.get(late)
        has_left = other is not None and (other.words[_CLOSED] or _ended(other))
        if has_left and late_rank() == late:  # it may have announced this collective just before it left
            raise CommError(f"{what} failed, because another rank ended or left: rank {late}")
        if waited > self._timeout:
            raise CommError(f"{what} failed: rank {late} did not reach it within {waited:.0f} s")
        self.on_long_wait()


def _ring(channel: int, which: int) -> int:
    return _HEAD + (2 * channel + which) * RING


def _ended(other: PeerCounters) -> bool:
    if other.pidfd is None:
        return False
    poll = select.poll()
    poll.register(other.pidfd, select.POLLIN)
    return bool(poll.poll(0))
