"""Detects writes into parameters from outside of the engine, and keeps or refuses them.

[Note: outside writes] `load_state_dict` of a part, `reset_parameters()`, `p.clamp_()` under `no_grad` and an
`Embedding(max_norm=...)` write into the weights in use, and no hook sees it. torch counts each such write in
`p._version`, but not the engine's own updates, which write the unit's buffer. So comparing the counters finds
them. If every rank holds whole weights, the written values become the master, once the ranks have found that
they hold the same. The record of a step, and the meeting that opens a save or an export, say whether a rank
wrote, so nothing is exchanged otherwise. If weights are partitioned, a write goes into memory that is freed
after use: it is refused, by name. Writes through `.data` escape torch's counters; `watch.py` finds them on
request.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from zerotrain.runtime.comm.arena import has_copies
from zerotrain.runtime.zero.unit import Unit, accept_writes, versions_of
from zerotrain.runtime.zero.watch import DataWatch, digests_of

if TYPE_CHECKING:
    from zerotrain.runtime.zero.sharded_model import ShardedModel

WAY_OUT = (
    "write within `with zerotrain.runtime.full_parameters(model, modifier_rank=0)`, which, when it "
    "ends, gives every rank the values of one. An Embedding with max_norm writes into its weight in every "
    "forward pass: make it without, and limit the norms like that after the step"
)


class OutsideWrite(RuntimeError):
    """Values were written into parameters that the engine cannot keep."""


class Writes:
    """Detector of writes into the parameters of one engine."""

    def __init__(self, core: ShardedModel) -> None:
        self._core = core
        self._unsettled: set[Unit] = set()
        """Units whose written values were taken over on this rank without knowing yet if the ranks hold the
        same."""
        self.watch: DataWatch | None = None
        """Detector, on request, of writes that torch does not count."""

    def found(self, units: Iterable[Unit] | None = None) -> bool:
        """Return whether this rank wrote into a parameter since the last step; units None = all. No
        communication."""
        if self.watch is not None and units is None:
            if names := self.watch.changed():
                raise OutsideWrite(
                    f"values of parameters {names[:5]} were changed through .data, or through memory that "
                    "they share, which torch does not count and the engine does not keep everywhere; write "
                    "into the parameter itself under torch.no_grad(), or within full_parameters(model, "
                    "modifier_rank=0)"
                )
            if self.watch.live.changed:
                return True
        units = self._core.units if units is None else units
        return any(unit in self._unsettled or _is_written(unit) for unit in units)

    @torch.no_grad()
    def take_over(self, units: Iterable[Unit] | None = None) -> None:
        """Copy to masters and shards what this rank wrote into whole weights; None = all units.

        Call it before they are read. No communication.
        """
        for unit in _whole(self._core.units if units is None else units):
            if _is_written(unit):
                self._unsettled.add(unit)
                accept_writes(unit)
                self._core.callbacks.on_weights_written(unit, unit.full.tensor)
                if not _has_views(unit):
                    unit.shard.copy_(unit.full.tensor[unit.start : unit.stop])
        self.take_private_pages(units)

    @torch.no_grad()
    def take_private_pages(self, units: Iterable[Unit] | None = None) -> None:
        """Copy to shards what this rank wrote, in any way, into its part of whole weights.

        The ranks must have written the same. Call it before shards are updated. No communication. Shards that
        are views of the whole weights have the values already. If the whole weights map all ranks' shards, a
        write makes a private page, which the next publication would drop.
        """
        for unit in _whole(self._core.units if units is None else units):
            if not _has_views(unit):
                part = unit.full.tensor[unit.start : unit.stop]
                if has_copies(part.data_ptr(), part.nbytes):
                    unit.shard.copy_(part)

    def settle(self) -> None:
        """Keep what was written, if every rank holds the same. Collective, called if any rank has `found`
        writes.

        Raises OutsideWrite on every rank, naming parameters, if they differ or are partitioned.
        """
        lost = self._lost()
        self._refuse(self._core.comm.gather_record([lost, self._digest()], label="writes from outside"))
        self.take_over()
        self._unsettled.clear()

    def forget(self, units: Iterable[Unit]) -> None:
        """Accept the writes into these units, whose values are the same on every rank now."""
        for unit in units:
            accept_writes(unit)
            self._unsettled.discard(unit)

    def check_held(self, units: Iterable[Unit]) -> None:
        """Raise OutsideWrite if weights that were whole for reading now differ from the shard.

        Only ranks that own such values raise. No communication.
        """
        changed = []
        for unit in units:
            if unit.placement.params_sharded and (names := _written(unit)):
                accept_writes(unit)
                if not torch.equal(
                    unit.full.tensor[unit.start : unit.stop], unit.read_weights(0, unit.stop - unit.start)
                ):
                    changed += names
        if changed:
            raise OutsideWrite(
                f"parameters {changed[:5]} were written within full_parameters, are partitioned over the "
                "ranks, and no modifier_rank was given, so the values are lost; pass modifier_rank=0 (or "
                "write=True), or put the old values back before the context ends"
            )

    def _lost(self) -> float:
        """Return the index, over all parameters, of the first partitioned one that this rank wrote; -1 =
        none."""
        lost = [] if self.watch is None else self.watch.live.changed
        for unit in self._core.units:
            if unit.placement.params_sharded and not self._core.holds[unit]:
                lost = [*lost, *_written(unit)]
                accept_writes(unit)  # this write is refused now, so the next step may go on
        if self.watch is not None:
            self.watch.live.changed = []
        return float(self._names().index(lost[0])) if lost else -1.0

    def _names(self) -> list[str]:
        return [segment.fqn for unit in self._core.units for segment in unit.layout.segments]

    def _digest(self) -> float:
        """Return a digest of the whole weights that this rank holds."""
        return float(zlib.crc32(repr(self._digests()).encode()))

    def _digests(self) -> list[float]:
        """Return digests by parameter, in the layout's order; partitioned ones count as equal, unless
        `full_parameters` holds them."""
        core = self._core
        if core.comm.world_size == 1:
            return []
        return [
            float(value) for unit in core.units for value in digests_of(unit, is_held=core.holds[unit] > 0)
        ]

    def _refuse(self, rows: Sequence[Sequence[float]]) -> None:
        names = self._names()
        ranks = [rank for rank, row in enumerate(rows) if row[0] >= 0]
        if ranks:
            raise OutsideWrite(
                f"parameter {names[int(rows[ranks[0]][0])]!r} was written on ranks {ranks} while it was "
                "whole for a pass; it is partitioned over the ranks, so the values are lost. Take "
                f"zero_optimization.stage 2, or {WAY_OUT}"
            )
        if all(row[1] == rows[0][1] for row in rows):
            return
        digests = self._core.comm.gather_record(self._digests(), label="writes from outside")
        mismatched = [
            names[place] for place, values in enumerate(zip(*digests, strict=True)) if len(set(values)) > 1
        ]
        raise OutsideWrite(
            f"parameters {mismatched[:5]} hold other values on some ranks than on others, as they were "
            "written outside of the engine; write the same on every rank (a random "
            f"initialisation with one seed), or {WAY_OUT}"
        )


def _whole(units: Iterable[Unit]) -> Iterator[Unit]:
    """Return the units that every rank holds whole and whose weights no pending update hides."""
    return (unit for unit in units if not unit.placement.params_sharded and unit.pending is None)


def _has_views(unit: Unit) -> bool:
    """Return whether the shard is a part of the whole weights' memory."""
    return unit.full.tensor.data_ptr() + unit.start * unit.dtype.itemsize == unit.shard.data_ptr()


def _is_written(unit: Unit) -> bool:
    return versions_of(unit.parameters) != unit.seen_versions


def _written(unit: Unit) -> list[str]:
    """Return the names of the parameters that were written since the last check."""
    pairs = zip(unit.layout.segments, versions_of(unit.parameters), unit.seen_versions, strict=True)
    return [segment.fqn for segment, version, seen in pairs if version != seen]
