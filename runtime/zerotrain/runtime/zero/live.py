"""Manager of gathered units: gathers sharded units before use, frees them after it, keeps those needed soon.

Called by `ShardedModel` on every hook. All decisions follow from the units' sizes and from the order of the
last pass, so they are the same on every rank that runs the same modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import Protocol

from zerotrain.runtime.zero.unit import Unit, UnitState


class HasUnits(Protocol):
    """A step of the recorded order."""

    units: list[Unit]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveLimits:
    """Limits of gathered weights, in elements."""

    prefetch_numel: int = 0
    """Elements gathered before use: at least one unit, several as long as they stay within this; 0 = none."""
    max_live_numel: int = 1 << 62
    """Maximum of elements gathered at once: above it nothing is prefetched or kept."""
    max_reuse_numel: int = 0
    """Number of elements of other units within which a unit's backward must follow for it to stay whole after
    forward."""


class LiveWeights:
    """The sharded units of one model that are whole."""

    def __init__(self, limits: LiveLimits) -> None:
        self._limits = limits
        self.replace(())

    def replace(self, units: Sequence[Unit]) -> None:
        """Use these units from now on."""
        self._units = [unit for unit in units if unit.placement.params_sharded]
        self._largest = max((unit.layout.padded_numel for unit in self._units), default=0)
        self._are_spilled = any(unit.stored.is_spilled for unit in self._units)

    @property
    def numel(self) -> int:
        """Number of elements gathered now."""
        return sum(unit.layout.padded_numel for unit in self._units if unit.is_gathered)

    def prefetch(self, upcoming: Iterable[HasUnits], *, waits: bool = False) -> None:
        """Start the gathers of what is used next, within the limits.

        It stops at a unit whose update may still be pending, unless `waits`, for a caller that can wait for
        it. The progress of the update must not matter, as it differs between ranks.
        """
        if not self._units:
            return
        upcoming, further = tee(upcoming)
        self._gather_ahead(upcoming, waits=waits)
        if self._are_spilled:
            self._read_ahead(further)

    def _gather_ahead(self, upcoming: Iterable[HasUnits], *, waits: bool) -> None:
        if not self._limits.prefetch_numel:
            return
        live, ahead = self.numel, 0
        for step in upcoming:
            for unit in step.units:
                if not unit.placement.params_sharded:
                    continue
                numel = unit.layout.padded_numel
                ahead += numel
                if ahead > max(numel, self._limits.prefetch_numel):
                    return
                if unit.state is UnitState.SHARDED:
                    if unit.pending is not None and not waits:
                        return
                    live += numel
                    if live > self._limits.max_live_numel:
                        return
                    unit.start_gather()
                if ahead >= self._limits.prefetch_numel:
                    return

    def _read_ahead(self, upcoming: Iterable[HasUnits]) -> None:
        """Load spilled shards of upcoming units that are not being gathered, as far as their tier has free
        memory. Local to the rank."""
        for step in upcoming:
            for unit in step.units:
                if unit.state is not UnitState.SHARDED or not unit.stored.is_spilled:
                    continue
                if unit.pending is not None or not unit.read_ahead():
                    return

    def keeps(self, units: Iterable[Unit], upcoming: Iterable[HasUnits]) -> bool:
        """Return whether units whose forward ends now stay whole until their backward, after all that is
        upcoming.

        The last units of a pass have priority: one stays only if all that follow fit, too.
        """
        limits = self._limits
        if not limits.max_reuse_numel:
            return False
        live = {unit for unit in self._units if unit.is_wide and unit.is_gathered}
        live.update(unit for unit in units if unit.placement.params_sharded)
        between = 0  # elements of forward and then backward of all units that follow
        for step in upcoming:
            for unit in step.units:
                if unit.placement.params_sharded:
                    live.add(unit)
                    between += 2 * unit.layout.padded_numel
                    if between > limits.max_reuse_numel:
                        return False
        needed_numel = sum(unit.layout.padded_numel for unit in live) + self._largest
        return needed_numel <= limits.max_live_numel

    def free(self, units: Iterable[Unit], *, everything: bool = False) -> None:
        """Free the units, except those that `full_parameters` holds and, unless `everything`, those that the
        whole pass uses."""
        for unit in units:
            if unit.state is not UnitState.HELD and (everything or not unit.is_wide):
                unit.free()

    def end_forward(self, *, keep: bool) -> None:
        """Free, after the model's forward, what lived through it (unless `keep`) and prefetches that were not
        used, except what `full_parameters` holds."""
        for unit in self._units:
            if unit.state is UnitState.HELD:
                continue
            if unit.state is UnitState.GATHERING or (unit.is_wide and not keep):
                unit.free()
