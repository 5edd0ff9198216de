"""Two replicas, and a leader that stops in the middle of a pass for longer than its lease, then goes on.

As a process that is stopped, a machine that swaps or a paused guest does it: the frozen replica knows nothing
of the time that passed and finishes its sentence. Meanwhile the other one leads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tests.cluster.chaos.crashes import immortal
from tests.cluster.chaos.operator_run import OperatorRun
from tests.cluster.chaos.scenario import Scenario
from tests.support.devcluster import PATIENCE_S
from zerotrain.operator.cluster import election

SHORT = {"LEASE_S": 3, "RENEW_S": 2, "RETRY_S": 0.3}
"""The lease's times in seconds, so that a run holds many takeovers."""


@contextmanager
def short_lease() -> Iterator[None]:
    """All elections of this process run by the short times."""
    usual = {name: getattr(election, name) for name in SHORT}
    try:
        for name, value in SHORT.items():
            setattr(election, name, value)
        yield
    finally:
        for name, value in usual.items():
            setattr(election, name, value)


class Freeze:
    """A doom that only stops the clock: at the n-th await point of a pass, once."""

    def __init__(self, nth: int) -> None:
        self._left = nth
        self.at = ""
        """Where the replica froze; empty until then."""
        self.thaw = threading.Event()
        """Set, it goes on: not before another one leads, however long that takes to start."""
        self.thawed = False

    def __call__(self, place: str, in_pass: bool) -> bool:
        if in_pass:
            self._left -= 1
            if self._left == 0:
                self.at = place
                self.thaw.wait()  # in the replica's own thread: its whole loop stands still
                self.thawed = True
        return False


def freeze_and_thaw(season: Scenario, nths: Iterable[int]) -> list[str]:
    """One takeover per number. Returns the places where the leaders froze, and what ended of the operator."""
    froze: list[str] = []
    with short_lease():
        for nth in nths:
            froze += _takeover(season, nth)
        last = _start(season, "last", immortal)
        try:
            season.finish()
        finally:
            last.retire()
    return froze


def _takeover(season: Scenario, nth: int) -> list[str]:
    """The leader freezes, the other one takes over, the first goes on; both stay for a moment."""
    freeze = Freeze(nth)
    leader = _start(season, "one", freeze)
    season.while_(lambda: not leader.leads(), timeout_s=PATIENCE_S, what="the first replica does not lead")
    other = _start(season, "two", immortal)
    try:
        season.while_(lambda: not freeze.at, timeout_s=PATIENCE_S, what="the leader never froze")
        season.while_(lambda: not other.leads(), timeout_s=PATIENCE_S, what="nobody takes over")
        freeze.thaw.set()
        season.while_(lambda: not freeze.thawed, timeout_s=PATIENCE_S, what="the leader stays frozen")
        season.pass_time(1.0)
    finally:
        freeze.thaw.set()
        leader.retire()
        other.retire()
    return [freeze.at, *leader.ended, *other.ended]


def _start(season: Scenario, identity: str, doom: Callable[[str, bool], bool]) -> OperatorRun:
    life = OperatorRun(season.setup(identity), doom)
    life.start()
    return life
