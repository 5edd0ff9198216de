"""Splits units into the values of their parameters, so that other units can be built from them.

Called by `relayout`, module by module: at most one module's weights and states are whole at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.zero.buffer import flat_zeros
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.layout import UnitLayout
from zerotrain.runtime.zero.state import MASTER, StateTensors
from zerotrain.runtime.zero.unit import Unit, UnitState


class Repartition:
    """Whole values of some parameters, by name: weights in compute precision and every state stream.

    Gives new units their initial values (`InitialValues`): the saved master if there is one, else the weight.
    """

    def __init__(self, comm: Comm, *, averages: bool = True) -> None:
        """`averages`: the step averages the gradients of the ranks; False = it sums them."""
        self._comm = comm
        self._averages = averages
        self._weights: dict[str, torch.Tensor] = {}
        self._streams: dict[tuple[str, str], torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._late: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, unit: Unit, states: StateTensors | None) -> None:
        """Copy a unit's contents. Collective; the unit is whole afterwards (HELD)."""
        unit.require(UnitState.HELD)
        pairs = zip(unit.layout.segments, unit.views_of(unit.full.tensor), strict=True)
        for segment, view in pairs:
            self._weights[segment.fqn] = view.reshape(-1).clone()
        if states is None:
            return
        for kind in (MASTER, *states.kinds):
            full = states.read(kind).to(self._comm.device)
            if unit.placement.states_sharded:
                own, full = full, flat_zeros(unit.layout.padded_numel, dtype=full.dtype, device=full.device)
                self._comm.all_gather(full, own, label=unit.name).wait()
            for segment in unit.layout.segments:
                self._streams[segment.fqn, kind] = full[segment.start : segment.stop].clone()

    @torch.no_grad()
    def add_gradients(self, gradients: UnitGradients) -> None:
        """Copy what a step has summed so far, and what is in no sum yet.

        The sum is the ranks' mean if that is computed, else this rank's own sum. Collective if ranks hold
        parts.
        """
        if gradients.is_open:
            flat = gradients.take()
            views = zip(gradients.unit.layout.segments, gradients.unit.views_of(flat), strict=True)
            self._late.update((segment.fqn, view.clone()) for segment, view in views)
            gradients.release(flat)
        unit = gradients.unit
        placement, full = unit.placement, gradients.accumulator
        if placement.grads_sharded or (placement.states_sharded and gradients.is_reduced):
            own = gradients.own_part.to(self._comm.device)
            full = flat_zeros(unit.layout.padded_numel, dtype=own.dtype, device=own.device)
            self._comm.all_gather(full, own, label=unit.name).wait()
        is_summed = gradients.is_reduced and not placement.grads_sharded and not self._averages
        for segment in unit.layout.segments:
            values = full[segment.start : segment.stop].clone()
            self._gradients[segment.fqn] = values / self._comm.world_size if is_summed else values

    @torch.no_grad()
    def interval(
        self, layout: UnitLayout, parameters: Sequence[nn.Parameter], own: tuple[int, int], *, whole: bool
    ) -> torch.Tensor:
        """Return elements `own` of a new unit, or all of them; trainable ones in fp32. Local."""
        dtype = torch.float32 if layout.trainable else TORCH_DTYPES[layout.dtype]
        low, high = (0, layout.padded_numel) if whole else own
        flat = flat_zeros(high - low, dtype=dtype, device=self._comm.device)
        for segment in layout.segments:
            values = self._weights[segment.fqn]
            if layout.trainable:
                values = self._streams.get((segment.fqn, MASTER), values)
            _copy_part(values, segment.start, flat, low)
        return flat

    @torch.no_grad()
    def restore(self, unit: Unit, states: StateTensors) -> list[str]:
        """Write the streams of parameters that were trained before; return the names of those that were
        not."""
        fresh = []
        for segment in unit.layout.segments:
            if (segment.fqn, MASTER) not in self._streams:
                fresh.append(segment.fqn)
                continue
            for kind in states.kinds:
                values, low = self._streams[segment.fqn, kind], states.interval[0]
                begin = max(segment.start, low)
                end = min(segment.start + values.numel(), states.interval[1])
                if begin < end:
                    states.write(kind, begin - low, values[begin - segment.start : end - segment.start])
        return fresh

    def show_late_gradients(self, unit: Unit) -> None:
        """Put what was in no sum into `p.grad`, where the new unit finds it like autograd's gradients."""
        with torch._C.DisableTorchFunctionSubclass():
            for segment, parameter in zip(unit.layout.segments, unit.parameters, strict=True):
                if (late := self._late.get(segment.fqn)) is not None:
                    parameter.grad = late

    @torch.no_grad()
    def restore_gradients(self, gradients: UnitGradients) -> None:
        """Add what `add_gradients` copied of a new unit's parameters. Local.

        If ranks keep whole gradients, a mean counts as every rank's own sum, and the step averages it (or
        sums it, where `add_gradients` divided a sum by the number of ranks).
        """
        unit = gradients.unit
        if self._gradients.keys().isdisjoint(segment.fqn for segment in unit.layout.segments):
            return
        sums = gradients.accumulator
        low = unit.start if unit.placement.grads_sharded else 0
        for segment in unit.layout.segments:
            values = self._gradients.get(segment.fqn)
            if values is not None:
                begin, end = max(segment.start, low), min(segment.stop, low + sums.numel())
                if begin < end:
                    mine = values[begin - segment.start : end - segment.start]
                    sums[begin - low : end - low] += mine.to(sums.device)


def _copy_part(values: torch.Tensor, start: int, flat: torch.Tensor, low: int) -> None:
    """Write the overlap: `values` begin at element `start` of the unit, `flat` at element `low`."""
    begin, end = max(start, low), min(start + values.numel(), low + flat.numel())
    if begin < end:
        flat[begin - low : end - low].copy_(values[begin - start : end - start])
