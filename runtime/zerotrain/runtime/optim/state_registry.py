"""The units that an optimizer updates: their states, and the group and age of every stretch of them.

Owned by `ZeroOptimizer`; `relayout` adds and removes units when parameters were frozen or unfrozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zerotrain.runtime.offload.deferred import DeferredStates
from zerotrain.runtime.offload.states import UnitStates
from zerotrain.runtime.offload.tiers import StateTiers
from zerotrain.runtime.optim.groups import GroupError, group_runs
from zerotrain.runtime.zero.ledger import MemoryLedger
from zerotrain.runtime.zero.unit import Unit


@dataclass(frozen=True, slots=True)
class GroupRun:
    """Elements `[start, stop)` of a unit's states that are updated alike."""

    start: int
    stop: int
    group: int
    born: int
    """Number of updates before these elements were trained; their own count starts after it, as in torch."""


class StateRegistry:
    """States and runs of units: `states` and `runs` by unit name, `group_of` and `born` by parameter name."""

    def __init__(self, group_of: dict[str, int], *, takes_all: bool) -> None:
        """Start without units. `takes_all`: without groups of the caller, every trained parameter is in
        one."""
        self.tiers = StateTiers()
        """Tiers of the states; the engine sets its own before the first `add`."""
        self.states: dict[str, UnitStates] = {}
        self.runs: dict[str, tuple[GroupRun, ...]] = {}
        self.group_of = group_of
        self.born: dict[str, int] = {}
        self._takes_all = takes_all

    def add(self, unit: Unit, kinds: tuple[str, ...], ledger: MemoryLedger) -> UnitStates:
        """Make the states of a trainable unit, its values and zeros, or defer them."""
        states = self.states[unit.name] = self.tiers.add(unit, kinds, ledger)
        if isinstance(states, DeferredStates):
            states.on_made = partial(self.states.__setitem__, unit.name)
        self.index(unit)
        return states

    def make_deferred(self) -> None:
        """Make the states that are deferred so far; from now on none is deferred. No communication."""
        if not self.tiers.defers:
            return
        for states in list(self.states.values()):
            if isinstance(states, DeferredStates):
                states.make()
        self.tiers.defers = False

    def index(self, unit: Unit) -> None:
        """Look up the groups and ages of a unit's parameters, after one of them changed."""
        key_of = {
            segment.fqn: (self.group_of[segment.fqn], self.born.get(segment.fqn, 0))
            for segment in unit.layout.segments
        }
        interval = self.states[unit.name].interval
        self.runs[unit.name] = tuple(
            GroupRun(start, stop, *key) for start, stop, key in group_runs(unit.layout, interval, key_of)
        )

    def forget(self, unit: Unit) -> None:
        """Drop the states of a unit that is dissolved."""
        self.runs.pop(unit.name)
        self.tiers.forget(self.states.pop(unit.name))

    def admit(self, fqns: Iterable[str]) -> None:
        """Assign a group to parameters that are to be trained.

        Raises GroupError for a parameter that the caller's groups do not hold.
        """
        missing = [fqn for fqn in fqns if fqn not in self.group_of]
        if missing and not self._takes_all:
            raise GroupError(
                f"parameters {missing[:5]} are trained now but are in no parameter group; pass them in "
                "model_parameters from the start, frozen as they are then"
            )
        self.group_of.update(dict.fromkeys(missing, 0))

    def scalars(self) -> dict[str, Any]:
        """Return the ages as JSON values; empty as long as nothing was unfrozen."""
        return {"born": dict(self.born)} if self.born else {}

    def load_scalars(self, scalars: Mapping[str, Any], units: Iterable[Unit]) -> None:
        """Restore the ages of `scalars`."""
        self.born = {fqn: int(value) for fqn, value in scalars.get("born", {}).items()}
        for unit in units:
            if unit.name in self.states:
                self.index(unit)
