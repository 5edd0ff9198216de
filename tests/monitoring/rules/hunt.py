"""Search for mutants of the rules that no case notices.

Tests hunt every `for` and every number; `python -m tests.monitoring.rules.hunt PROMTOOL` hunts everything,
which takes some minutes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.monitoring.rules import cases_pace, cases_progress, cases_regression, cases_state
from tests.monitoring.rules.cases_values import RECORDED, Values
from tests.monitoring.rules.model import Case, by_alert
from tests.monitoring.rules.mutants import Mutant, mutants
from tests.monitoring.rules.rulebook import closure, dependents, load
from tests.monitoring.rules.runner import Trial, outcomes

CASES = by_alert((*cases_progress.CASES, *cases_pace.CASES, *cases_regression.CASES, *cases_state.CASES))
RULEBOOK = load()


@dataclass(kw_only=True)
class Hunt:
    """A mutant and the cases that have not yet been tried on it, cheapest first."""

    number: int
    wrong: Mutant
    left: list[tuple[str, Case | Values]] = field(default_factory=list)

    def __post_init__(self) -> None:
        wrong = self.wrong.rule.name
        meets: list[tuple[str, Case | Values]] = [
            *((alert, case) for alert in dependents(RULEBOOK, wrong) for case in CASES[alert]),
            *((case.rule, case) for case in RECORDED if case.rule == wrong),
        ]
        self.left = sorted(meets, key=lambda meet: _cost(meet[1]))

    def next_trial(self) -> Trial:
        """Take the next case and return it as a trial."""
        name, case = self.left.pop(0)
        return Trial(name=f"{self.number:04}", rules=closure(self.wrong.rules, name), cases=(case,))


def _cost(case: Case | Values) -> tuple[bool, int]:
    # Cases that fire come first: they notice most.
    return isinstance(case, Case) and not case.fires, sum(len(values) for values in case.series.values())


def survivors(promtool: Path, folder: Path, wrongs: Iterable[Mutant]) -> list[str]:
    """Return the mutants that pass all cases."""
    hunted = [Hunt(number=number, wrong=wrong) for number, wrong in enumerate(wrongs)]
    found = [str(hunt.wrong) for hunt in hunted if not hunt.left]
    hunted, round_number = [hunt for hunt in hunted if hunt.left], 0
    while hunted:
        place = folder / str(round_number)
        place.mkdir()
        failures = outcomes(promtool, place, [hunt.next_trial() for hunt in hunted])
        escaped = [hunt for hunt in hunted if not failures[f"{hunt.number:04}"]]
        found += [str(hunt.wrong) for hunt in escaped if not hunt.left]
        hunted, round_number = [hunt for hunt in escaped if hunt.left], round_number + 1
    return sorted(found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        every = list(mutants(RULEBOOK))
        left = survivors(Path(sys.argv[1]).resolve(), Path(scratch), every)
    print("\n".join(left))
    print(f"{len(left)} of {len(every)} wrongs are not noticed")
