"""Finds writes into parameters that torch does not count (`p.data.clamp_()`): for debugging, on request.

Weights that ranks hold whole are compared with their values after the last step. Gathered weights are
compared with the shard when they are freed. Each check reads the weights once.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerotrain.runtime.zero.live import LiveLimits, LiveWeights
from zerotrain.runtime.zero.unit import Unit, UnitState, versions_of

if TYPE_CHECKING:
    from zerotrain.runtime.zero.sharded_model import ShardedModel

_IN_USE = (UnitState.FORWARD, UnitState.BACKWARD, UnitState.LENT)


@dataclass(frozen=True, slots=True)
class _Seen:
    """State of one unit after a step."""

    digests: list[int]
    versions: list[int]
    num_writes: int


class DataWatch:
    """Watch over the units of one engine, until `end`."""

    def __init__(self, core: ShardedModel) -> None:
        self._core = core
        self._seen: dict[Unit, _Seen] = {}
        self.live = core.live = WatchedLiveWeights(core.options.live)
        core.live.replace(core.units)
        self.remember()

    def end(self) -> None:
        """Stop watching."""
        self._core.live = LiveWeights(self._core.options.live)
        self._core.live.replace(self._core.units)

    def remember(self) -> None:
        """Record the weights as the engine made them. Collective while an update is pending, as it is waited
        for."""
        self._core.updates.settle_all()
        whole = [unit for unit in self._core.units if not unit.placement.params_sharded]
        self._seen = {
            unit: _Seen(digests_of(unit), versions_of(unit.parameters), unit.num_writes) for unit in whole
        }

    def changed(self) -> list[str]:
        """Return the parameters whose values changed without a known write. No communication."""
        changed = []
        for unit, seen in self._seen.items():
            if unit.num_writes != seen.num_writes:
                continue  # written by the engine, within full_parameters or through the state functions
            now = zip(digests_of(unit), versions_of(unit.parameters), strict=True)
            for segment, (digest, version), before in zip(
                unit.layout.segments, now, zip(seen.digests, seen.versions, strict=True), strict=True
            ):
                if digest != before[0] and version == before[1]:
                    changed.append(segment.fqn)
        return changed


class WatchedLiveWeights(LiveWeights):
    """Compares gathered weights with this rank's shard before they are freed."""

    def __init__(self, limits: LiveLimits) -> None:
        super().__init__(limits)
        self.changed: list[str] = []
        """Names of parameters whose values differed."""

    def free(self, units: Iterable[Unit], *, everything: bool = False) -> None:
        units = list(units)
        for unit in units:
            if unit.placement.params_sharded and unit.state in _IN_USE and unit.is_exact:
                self.changed += _changed(unit)
        super().free(units, everything=everything)


def _changed(unit: Unit) -> Iterator[str]:
    """Yield the parameters whose gathered weights differ from this rank's shard."""
    for segment in unit.layout.segments:
        start, stop = max(unit.start, segment.start), min(unit.stop, segment.stop)
        if start < stop:
            shard = unit.read_weights(start - unit.start, stop - unit.start)
            if not torch.equal(unit.full.tensor[start:stop], shard.to(unit.full.tensor.device)):
                yield segment.fqn


def digests_of(unit: Unit, *, is_held: bool = False) -> list[int]:
    """Return a checksum per parameter, which changes with its bits; zeros for partitioned ones, unless
    `full_parameters` holds them."""
    if unit.placement.params_sharded and not is_held:
        return [0] * len(unit.layout.segments)
    return [_crc(unit.full.tensor[part.start : part.stop]) for part in unit.layout.segments]


def _crc(values: torch.Tensor) -> int:
    there = values.detach().cpu()
    if not there.numel():
        return 0
    return zlib.crc32((ctypes.c_char * there.nbytes).from_address(there.data_ptr()))
