"""The choice of a tier for the states of every unit.

There are three tiers: the device beside the weights, host memory, the spill store. Made by the engine's setup
(`make_tiers`), driven by `ZeroOptimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.memory import kept_states
from zerotrain.runtime.offload.deferred import DeferredStates, KeptOn
from zerotrain.runtime.offload.resident import ResidentStates, device_states, host_states
from zerotrain.runtime.offload.states import Encoding, UnitStates
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.unit import Unit

if TYPE_CHECKING:  # the spill store is compiled code, and nothing else here is
    from zerotrain.runtime.offload.spilled import SpillStates, StateRecords, StateSweep
    from zerotrain.runtime.spill.store import SpillStore


class TierName(Enum):
    """Tiers to which states are offloaded, by the configuration's names."""

    DEVICE = "none"
    HOST = "cpu"
    SPILL = "nvme"


class StateTiers:
    """Factory of the states of units, and of sweeps over those that are spilled."""

    def __init__(
        self,
        *,
        name: TierName = TierName.DEVICE,
        ratio: float = 1.0,
        spill_store: SpillStore | None = None,
        defers: bool = False,
    ) -> None:
        """Choose the tier. `ratio`: the part of the elements that is offloaded, 0..1; `spill_store`: the
        spill store, for SPILL; `defers`: see the attribute."""
        assert (spill_store is not None) or name is not TierName.SPILL
        self.name = name
        self.defers = defers
        """Whether states are added as `DeferredStates`. In the spill store they have their records at
        once."""
        self._ratio, self._spill_store = ratio, spill_store
        self._kept: frozenset[str] = frozenset()
        self._records: StateRecords | None = None
        self._places: dict[Unit, SpillStates] = {}
        """Records of all units whose states are in the spill store, also of units whose states are not made
        yet."""

    def plan(self, layout: ModelLayout, *, replicated: bool) -> None:
        """Take the units of this layout as the complete set from now on. Those at the start of forward stay
        on the device, as many as the ratio leaves. `replicated`: every rank keeps all states. Called before
        `add`."""
        units = [unit for unit in layout.units if unit.trainable]
        ranks = 1 if replicated else layout.world_size
        kept = kept_states([unit.padded_numel // ranks for unit in units], self._ratio)
        self._kept = frozenset(units[index].name for index in kept)

    def leaves(self, unit: Unit, kinds: tuple[str, ...]) -> bool:
        """Return whether a trainable unit has states, of these kinds, off its device."""
        has_states = bool(kinds) or Encoding.of(unit).stored is not None
        return self.name is not TierName.DEVICE and unit.name not in self._kept and has_states

    def add(self, unit: Unit, kinds: tuple[str, ...], ledger: MemoryLedger) -> UnitStates:
        """Return the states of a trainable unit: its initial values and zeros."""
        initial = unit.initial_master
        assert initial is not None  # frozen units have no states
        unit.initial_master = None
        encoding = Encoding.of(unit)
        build: Callable[[torch.Tensor], UnitStates]
        kept_on: KeptOn | None = KeptOn(device=unit.comm.device, kind=MemoryKind.STATES, ledger=ledger)
        if not self.leaves(unit, kinds):
            build = partial(device_states, unit, kinds, encoding, ledger=ledger)
        elif self.name is TierName.HOST:
            build = partial(host_states, unit, kinds, encoding, ledger=ledger)
            kept_on = KeptOn(device=torch.device("cpu"), kind=MemoryKind.HOST_STATES, ledger=ledger)
        else:
            # The record is allocated now, so that a disk that is too small shows at the start.
            spilled = self._state_records(ledger).add(unit, kinds, encoding, initial.numel())
            self._places[unit] = spilled
            build, kept_on = partial(_in_place, spilled), None
        if not self.defers:
            return build(initial)
        states = DeferredStates(unit, kinds, encoding, build=build, kept_on=kept_on)
        states.take_initial(initial)
        return states.made or states

    def forget(self, states: UnitStates) -> None:
        """Release the memory of states, or their record in the spill store."""
        if isinstance(states, (DeferredStates, ResidentStates)):
            states.drop()
        place = self._places.pop(states.unit, None)
        if place is not None and self._records is not None:
            self._records.forget(place)

    def open_sweep(self, order: Sequence[UnitStates]) -> StateSweep | None:
        """Return a sweep over those of these states that are in the spill store, in this order; None where
        nothing ever was."""
        if self._records is None:
            return None
        spilled = [cast("SpillStates", states) for states in order if states.is_spilled]
        return self._records.open_sweep(spilled)

    def _state_records(self, ledger: MemoryLedger) -> StateRecords:
        if self._records is None:
            from zerotrain.runtime.offload.spilled import StateRecords

            assert self._spill_store is not None
            self._records = StateRecords(self._spill_store, ledger)
        return self._records


def _in_place(states: SpillStates, initial: torch.Tensor) -> UnitStates:
    states.take_initial(initial)
    return states


def make_tiers(config: EngineConfig, spill_store: SpillStore | None, *, defers: bool = False) -> StateTiers:
    """Return the tiers of a configuration. `spill_store`: this rank's, where anything is spilled; `defers`:
    see `StateTiers`."""
    block = config.zero.offload_optimizer
    if block is None:
        return StateTiers(defers=defers)
    return StateTiers(
        name=TierName(block.device),
        ratio=block.ratio,
        spill_store=spill_store,
        defers=defers,
    )
