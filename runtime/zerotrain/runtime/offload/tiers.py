"""Which tier holds the states of which unit, and the sweep of a step over all of them.

Made by the engine's setup (`make_tiers`), driven by `ZeroOptimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


from zerotrain.runtime.offload.device import ResidentStates, device_states
from zerotrain.runtime.offload.states import Encoding, UnitStates, UpdateBlock
from zerotrain.runtime.zero.ledger import MemoryLedger
from zerotrain.runtime.zero.unit import Unit


class StateTiers:
    """Makes the states of units, and opens passes over them."""

    def add(self, unit: Unit, kinds: tuple[str, ...], ledger: MemoryLedger) -> UnitStates:
        """The states of a trainable unit: its initial values and zeros."""
        initial = unit.initial_master
        assert initial is not None  # frozen units have no states
        unit.initial_master = None
        encoding = Encoding.of(unit.layout.dtype, stores_remainders=unit.placement.splits_masters)
        return device_states(unit, kinds, encoding, initial, ledger)

    def forget(self, states: UnitStates) -> None:
        """Give the memory of states back."""
        assert isinstance(states, ResidentStates)
        states.drop()

    def open_pass(self, order: Sequence[UnitStates]) -> UpdatePass:
        """A pass that updates each of these once, in this order."""
        return UpdatePass(order)


class UpdatePass:
    """One step's way through the states. Any thread, but one at a time."""

    def __init__(self, order: Sequence[UnitStates]) -> None:
        self._order = order

    def update(self, states: UnitStates, update: UpdateBlock) -> None:
        """Hand every block of a unit's states to `update`."""
        assert isinstance(states, ResidentStates)
        states.update(update)

    def close(self) -> None:
        """Wait until everything is stored."""


VaultFactory = Callable[[], object]
"""Makes the vault of this rank."""

