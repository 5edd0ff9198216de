"""Two replicas, and a leader that stops in a pass for longer than its lease and then continues.

A stopped process, a machine that swaps or a paused guest behaves like this: the frozen replica does not
notice the time that passed and finishes its current operation. Meanwhile the other replica leads.
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
"""The lease's times in seconds, short so that a run has many takeovers."""


@contextmanager
def short_lease() -> Iterator[None]:
    """Use the short times for all elections of this process within the block."""
    usual = {name: getattr(election, name) for name in SHORT}
    try:
        for name, value in SHORT.items():
            setattr(election, name, value)
        yield
    finally:
        for name, value in usual.items():
            setattr(election, name, value)


class Freeze:
    """A doom that only stops the clock, once, at the n-th await point of a pass."""

    def __init__(self, nth: int) -> None:
        self._left = nth
        self.at = ""
        """Place at which the replica froze; empty until then."""
        self.thaw = threading.Event()
        """Event that lets the replica continue; set once another one leads, however long its start takes."""
        self.thawed = False

    def __call__(self, place: str, in_pass: bool) -> bool:
        if in_pass:
            self._left -= 1
            if self._left == 0:
                self.at = place
                self.thaw.wait()  # in the replica's own thread: its whole loop stands still
                self.thawed = True
        return False


def freeze_and_thaw(scenario: Scenario, nths: Iterable[int]) -> list[str]:
    """Do one takeover per number; return the places of the freezes, and tasks of the operator that ended."""
    froze: list[str] = []
    with short_lease():
        for nth in nths:
            froze += _takeover(scenario, nth)
        last = _start(scenario, "last", immortal)
        try:
            scenario.finish()
        finally:
            last.retire()
    return froze


def _takeover(scenario: Scenario, nth: int) -> list[str]:
    """Freeze the leader, let the other one take over, and thaw the first; both run for a moment."""
    freeze = Freeze(nth)
    leader = _start(scenario, "one", freeze)
    scenario.while_(lambda: not leader.leads(), timeout_s=PATIENCE_S, what="the first replica does not lead")
    other = _start(scenario, "two", immortal)
    try:
        scenario.while_(lambda: not freeze.at, timeout_s=PATIENCE_S, what="the leader never froze")
        scenario.while_(lambda: not other.leads(), timeout_s=PATIENCE_S, what="nobody takes over")
        freeze.thaw.set()
        scenario.while_(lambda: not freeze.thawed, timeout_s=PATIENCE_S, what="the leader stays frozen")
        scenario.pass_time(1.0)
    finally:
        freeze.thaw.set()
        leader.retire()
        other.retire()
    return [freeze.at, *leader.ended, *other.ended]


def _start(scenario: Scenario, identity: str, doom: Callable[[str, bool], bool]) -> OperatorRun:
    life = OperatorRun(scenario.setup(identity), doom)
    life.start()
    return life
