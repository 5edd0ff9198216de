"""The choice of a tier for the states of every unit, and a step's pass over all of them.

There are three tiers: the device beside the weights, host memory, the spill store. Made by the engine's setup
(`make_tiers`), driven by `ZeroOptimizer`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.memory import kept_states
from zerotrain.runtime.offload.deferred import DeferredStates, KeptOn
from zerotrain.runtime.offload.device import ResidentStates, device_states
from zerotrain.runtime.offload.host import HostStates
from zerotrain.runtime.offload.states import Encoding, UnitStates, UnitUpdate
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.unit import Unit

if TYPE_CHECKING:  # the spill store is compiled code, and nothing else here is
    from zerotrain.runtime.offload.spilled import SpillStates, StateRecords
    from zerotrain.runtime.spill.store import SpillStore
    from zerotrain.runtime.spill.tile_pipeline import Tile


class TierName(Enum):
    """Tiers to which states are offloaded, by the configuration's names."""

    DEVICE = "none"
    HOST = "cpu"
    SPILL = "nvme"


class StateTiers:
    """Factory of the states of units, and of passes over them."""

    def __init__(
        self,
        *,
        name: TierName = TierName.DEVICE,
        ratio: float = 1.0,
        pinned: bool = True,
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
        self._ratio, self._pinned, self._spill_store = ratio, pinned, spill_store
        self._kept: frozenset[str] = frozenset()
        self._records: StateRecords | None = None
        self._on_host: list[HostStates] = []
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

    def add(self, unit: Unit, kinds: tuple[str, ...], ledger: MemoryLedger) -> UnitStates:
        """Return the states of a trainable unit: its initial values and zeros."""
        initial = unit.initial_master
        assert initial is not None  # frozen units have no states
        unit.initial_master = None
        encoding = Encoding.of(unit)
        has_states = bool(kinds) or encoding.stored is not None
        kept_on: KeptOn | None = KeptOn(device=unit.comm.device, kind=MemoryKind.STATES, ledger=ledger)
        if self.name is TierName.DEVICE or unit.name in self._kept or not has_states:
            build = partial(_on_device, unit, kinds, encoding, ledger)
        elif self.name is TierName.HOST:
            build = partial(self._on_the_host, unit, kinds, encoding, ledger)
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

    def _on_the_host(
        self,
        unit: Unit,
        kinds: tuple[str, ...],
        encoding: Encoding,
        ledger: MemoryLedger,
        initial: torch.Tensor,
    ) -> UnitStates:
        states = HostStates(unit, kinds, encoding, initial=initial, ledger=ledger, pinned=self._pinned)
        self._on_host.append(states)
        return states

    def forget(self, states: UnitStates) -> None:
        """Release the memory of states, or their record in the spill store."""
        place = self._places.pop(states.unit, None)
        if isinstance(states, DeferredStates):
            states.drop()
            if place is not None and self._records is not None:
                self._records.forget(place)
        elif isinstance(states, ResidentStates):
            states.drop()
            self._on_host = [other for other in self._on_host if other is not states]
        elif self._records is not None:
            self._records.forget(cast("SpillStates", states))

    def open_pass(self, order: Sequence[UnitStates]) -> UpdatePass:
        """Return a pass that updates each of these states once, in this order."""
        if self._records is not None:
            self._records.cache.close()
        spilled = [cast("SpillStates", states) for states in order if states.is_spilled]
        return UpdatePass(spilled, self._spill_store)

    def close(self) -> None:
        """Unlock the memory that the device's driver has page-locked. Host states stay readable."""
        for states in self._on_host:
            states.unpin()

    def _state_records(self, ledger: MemoryLedger) -> StateRecords:
        if self._records is None:
            from zerotrain.runtime.offload.spilled import StateRecords

            assert self._spill_store is not None
            self._records = StateRecords(self._spill_store, ledger)
        return self._records


def _on_device(
    unit: Unit, kinds: tuple[str, ...], encoding: Encoding, ledger: MemoryLedger, initial: torch.Tensor
) -> UnitStates:
    return device_states(unit, kinds, encoding, initial, ledger)


def _in_place(states: SpillStates, initial: torch.Tensor) -> UnitStates:
    states.take_initial(initial)
    return states


class UpdatePass:
    """One step's pass over the states. Used by one thread, from the first `update` to `close`.

    The states in the spill store are one sweep over all units, so that the next unit's tiles are read while
    the last one's are written.
    """

    def __init__(self, spilled: Sequence[SpillStates], spill_store: SpillStore | None) -> None:
        self._spilled, self._spill_store = spilled, spill_store
        self._stack = ExitStack()
        self._tiles: Iterator[Tile] | None = None

    def update(self, states: UnitStates, update: UnitUpdate) -> None:
        """Pass a unit's states to `update`. After an error the pass is over."""
        try:
            if isinstance(states, ResidentStates):
                states.update(update)
            else:
                cast("SpillStates", states).update(update, self._sweep())
        except BaseException:
            self._stack.__exit__(*sys.exc_info())
            raise

    def close(self) -> None:
        """Wait until everything is stored. Raises the first error."""
        self._stack.close()

    def _sweep(self) -> Iterator[Tile]:
        if self._tiles is None:
            assert self._spill_store is not None
            refs = [ref for states in self._spilled for ref in states.record.tiles()]
            self._tiles = iter(self._stack.enter_context(self._spill_store.sweep(refs, writes=True)))
        return self._tiles


def make_tiers(config: EngineConfig, spill_store: SpillStore | None, *, defers: bool = False) -> StateTiers:
    """Return the tiers of a configuration. `spill_store`: this rank's, where anything is spilled; `defers`:
    see `StateTiers`."""
    block = config.zero.offload_optimizer
    if block is None:
        return StateTiers(defers=defers)
    return StateTiers(
        name=TierName(block.device),
        ratio=block.ratio,
        pinned=block.pin_memory,
        spill_store=spill_store,
        defers=defers,
    )
