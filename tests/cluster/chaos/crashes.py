"""Ways to crash, and runs of operator lives that end in crashes."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.cluster.chaos.operator_run import OperatorRun, Setup
from tests.cluster.chaos.scenario import Scenario
from tests.operator.operator_process import OperatorProcess
from tests.support.devcluster import PATIENCE_S

LIVES_S = (1.5,) * 9 + (5.0,)
"""Lengths of lives in seconds; a life that has not reached its doom by then is killed wherever it is.

Now and then a life is long enough for work that happens some time after a start, such as for the creations of
the life before. Otherwise jobs that need it would accumulate.
"""

LIVES_PER_CRASH = 3
"""Largest average of lives per crash; a run that needs more kills by the clock and not at await points."""

OFTEN = 30
"""Number of lives in which a pass waited at a point, from which on the point must have been crashed at.

More than half of these lives look for points at which no life has ended.
"""

CLOCKS_OFF_S = (0.0, 0.0, -7200.0, 7200.0)
"""Clock errors in seconds of the machines of the lives: half of them are wrong by two hours."""


@dataclass(kw_only=True, slots=True)
class Record:
    """The operator's await points that a run of lives has seen."""

    passed: Counter[str] = field(default_factory=Counter)
    lives: Counter[str] = field(default_factory=Counter)
    """Number of lives that passed an await point, by await point of a pass."""
    crashed: Counter[str] = field(default_factory=Counter)
    by_clock: int = 0
    """Number of lives that ended by the clock, at no await point of the operator."""
    problems: list[str] = field(default_factory=list)

    def shortcomings(self, wanted: int) -> list[str]:
        """Return what makes the run weaker than claimed: too few crashes, or a point without a crash."""
        found, hit = [], self.crashed.total()
        if hit < wanted:
            found.append(
                f"{hit} of {wanted} crashes hit an await point, {self.by_clock} lives ended by the clock"
            )
        missed = sorted(
            place for place, lives in self.lives.items() if lives >= OFTEN and not self.crashed[place]
        )
        return found + [f"{self.lives[place]} lives passed {place} and none ended there" for place in missed]

    def report(self) -> str:
        """Return for users how much of the operator was hit."""
        missed = sorted(place for place in self.passed if not self.crashed[place])
        lines = [
            f"{self.crashed.total()} crashes at {len(self.crashed)} of {len(self.passed)} await points "
            f"that were passed, {self.by_clock} by the clock"
        ]
        return "\n".join(lines + [f"  never at {place}" for place in missed])


class Doom:
    """The end of one life: after so many await points, or at the first point where no life has ended yet."""

    def __init__(self, chance: random.Random, record: Record) -> None:
        self._record = record
        self._seeks = chance.random() < 0.6
        self._anywhere = chance.random() < 0.2
        self._left = chance.randint(40, 120) if self._seeks else int(1.15 ** chance.uniform(0, 40))
        self._seen: set[str] = set()

    def __call__(self, place: str, in_pass: bool) -> bool:
        self._record.passed[place] += 1
        if in_pass and place not in self._seen:
            self._seen.add(place)
            self._record.lives[place] += 1
        if not in_pass and not self._anywhere:
            return False
        self._left -= 1
        if self._left <= 0 or (self._seeks and not self._record.crashed[place]):
            self._record.crashed[place] += 1
            return True
        return False


def immortal(place: str, in_pass: bool) -> bool:
    return False


def crash(scenario: Scenario, count: int, *, log: Callable[[str], None] = lambda _text: None) -> Record:
    """Run lives in this process until so many ended at an await point, and one that sees all jobs end.

    The problems of the returned record contain what the run fell short of.
    """
    record, setup = Record(), scenario.setup()
    for number in range(1, LIVES_PER_CRASH * count + 1):
        _live(scenario, setup, record)
        if number % 50 == 0:
            log(f"{record.crashed.total()} crashes in {number} lives, {dict(scenario.fault_injector.ended)}")
        if record.crashed.total() >= count:
            break
    life = OperatorRun(setup, immortal)
    life.start()
    try:
        scenario.finish()
    finally:
        life.retire()
        _end(life, record)
    record.problems += record.shortcomings(count)
    return record


def _live(scenario: Scenario, setup: Setup, record: Record) -> None:
    """Run one life until its doom or the end of its time."""
    machine = replace(setup, clock_off_s=scenario.chance.choice(CLOCKS_OFF_S))
    life = OperatorRun(machine, Doom(scenario.chance, record))
    life.start()
    length_s = scenario.chance.choice(LIVES_S)
    end = time.monotonic() + length_s
    scenario.while_(
        lambda: not life.dead.is_set() and time.monotonic() < end,
        timeout_s=length_s + PATIENCE_S,
        what="a life does not end",
    )
    record.by_clock += not life.dead.is_set()
    _end(life, record)


def _end(life: OperatorRun, record: Record) -> None:
    life.kill()
    if life.error is not None:
        record.problems.append(f"the operator ended by itself: {life.error!r}")
    record.problems += life.ended


def sigkill(scenario: Scenario, count: int, *, log: Callable[[str], None] = lambda _text: None) -> None:
    """Kill so many real processes: while they start, right after they lead, or later."""
    process = OperatorProcess(scenario.kubeconfig, scenario.folder)
    try:
        for number in range(count):
            process.start(wait=False)
            if number % 4:
                scenario.while_(
                    lambda: not process.leads(),
                    timeout_s=PATIENCE_S,
                    what=lambda: f"no leader:\n{process.tail()}",
                )
            scenario.pass_time(scenario.chance.uniform(0.0, 1.5))
            process.kill()
            if number % 10 == 9:
                log(f"{number + 1} SIGKILLs, {dict(scenario.fault_injector.ended)}")
        process.start()
        scenario.finish()
        process.terminate()
    finally:
        process.kill()
