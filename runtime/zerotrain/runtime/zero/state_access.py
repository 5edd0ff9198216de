"""Access to what the engine keeps of one parameter: fp32 value, gradient, optimizer states.

Public through `zerotrain.runtime`. The `full` functions are collective and use tensors of the parameter's
shape. The `local` ones use this rank's part of the flattened parameter, a 1-D tensor that may be empty.
Results are copies. DeepSpeed documents the same as its "safe" functions (docs/deepspeed.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zerotrain.runtime.zero.access import locate
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.layout import Segment
from zerotrain.runtime.zero.placeholder import fqn_of
from zerotrain.runtime.zero.sharded_model import ShardedModel
from zerotrain.runtime.zero.state import MASTER, StateTensors
from zerotrain.runtime.zero.unit import Unit


def get_full_fp32(parameter: nn.Parameter) -> torch.Tensor:
    """Return the master value, fp32, in the parameter's shape, on this rank's device. Collective.

    A frozen parameter has no master: its value is converted. Raises ValueError for a parameter of no engine,
    OutsideWrite, on every rank, when ranks wrote different values.
    """
    place = _Place.of(parameter, "get_full_fp32")
    place.settle_writes()
    return place.gathered(place.master_part()).float()


def set_full_fp32(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the master value, and with it the weight, on every rank. Collective; equal values on all ranks.

    Raises ValueError for another shape, RuntimeError within `full_parameters` and in forward or backward.
    """
    place = _Place.of(parameter, "set_full_fp32", writes=True)
    place.write_master(place.own_of(_checked(value, parameter.shape, place)))


def get_full_optimizer_state(parameter: nn.Parameter, kind: str) -> torch.Tensor:
    """Return one state, such as "exp_avg", fp32 in the parameter's shape. Collective.

    Raises KeyError for a kind that the optimizer does not keep, ValueError for a frozen parameter.
    """
    place = _Place.of(parameter, "get_full_optimizer_state")
    return place.gathered(place.state_part(kind))


def set_full_optimizer_state(parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
    """Replace one state on every rank. Collective; equal values on all ranks. Errors as for reading it."""
    place = _Place.of(parameter, "set_full_optimizer_state", writes=True)
    place.write_state(place.checked_kind(kind), place.own_of(_checked(value, parameter.shape, place)))


def get_full_grad(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of the step so far: fp32 mean over the ranks, before clipping, unscaled.
    Collective.

    Readable from the first backward of a step to `engine.step()` at its boundary. Within accumulation it is
    the sum of the micro-batches so far, each divided by their number. A parameter that got no gradient has
    zeros. Raises RuntimeError if no backward ran since the last step, ValueError for a frozen parameter.
    """
    place = _Place.of(parameter, "get_full_grad")
    gradients = place.gradients()
    if place.is_summed(gradients):
        mean = place.gathered(place.own_grad(gradients))
    else:
        local = gradients.accumulator[place.segment.start : place.segment.stop]
        mean = place.core.reducer.copy_reduced(local, label=place.segment.fqn).view(place.segment.shape)
        mean = mean.float()
    return mean.div_(place.core.callbacks.gradient_scale())


def set_full_grad(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient that the next step uses. Collective; equal values on all ranks.

    If stages 0 and 1 average it in the step, it is exact within one unit in the last place. Errors as for
    reading.
    """
    place = _Place.of(parameter, "set_full_grad", writes=True)
    gradients = place.gradients()
    flat = _checked(value, parameter.shape, place).flatten() * place.core.callbacks.gradient_scale()
    if place.unit.placement.states_sharded and place.is_summed(gradients):
        place.cut(gradients.own_part, place.unit.start).copy_(place.own_of(flat))
    else:
        gradients.accumulator[place.segment.start : place.segment.stop].copy_(flat)


def get_local_fp32(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of the master value, fp32 1-D. No communication."""
    return _Place.of(parameter, "get_local_fp32").master_part().float()


def set_local_fp32(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the master value. Every rank calls it with its own part."""
    place = _Place.of(parameter, "set_local_fp32", writes=True)
    place.write_master(_checked(value, torch.Size([place.stop - place.start]), place))


def get_local_optimizer_state(parameter: nn.Parameter, kind: str) -> torch.Tensor:
    """Return this rank's part of one state, fp32 1-D. No communication. Errors as
    `get_full_optimizer_state`."""
    place = _Place.of(parameter, "get_local_optimizer_state")
    return place.state_part(kind)


def set_local_optimizer_state(parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
    """Replace this rank's part of one state. Every rank calls it with its own part."""
    place = _Place.of(parameter, "set_local_optimizer_state", writes=True)
    own = _checked(value, torch.Size([place.stop - place.start]), place)
    place.write_state(place.checked_kind(kind), own)


def get_local_grad(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of the result of `get_full_grad`, fp32 1-D. Collective at stages 0 and 1."""
    place = _Place.of(parameter, "get_local_grad")
    gradients = place.gradients()
    if not place.is_summed(gradients):
        return place.own_of(get_full_grad(parameter)).clone()
    return place.own_grad(gradients) / place.core.callbacks.gradient_scale()


def set_local_grad(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the gradient. Every rank calls it with its own part."""
    place = _Place.of(parameter, "set_local_grad", writes=True)
    gradients, own = place.gradients(), _checked(value, torch.Size([place.stop - place.start]), place)
    if not place.unit.placement.grads_sharded:
        set_full_grad(parameter, place.gathered(own.float()))
    else:
        place.cut(gradients.own_part, place.unit.start).copy_(own * place.core.callbacks.gradient_scale())


def local_interval(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the elements of the flattened parameter that this rank owns, `(start, stop)`; equal if none."""
    place = _Place.of(parameter, "local_interval")
    return place.start - place.segment.start, place.stop - place.segment.start


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Position of one parameter: its engine, unit and segment."""

    core: ShardedModel
    unit: Unit
    segment: Segment
    start: int
    """First element of the unit that belongs to this parameter and this rank."""
    stop: int

    @classmethod
    def of(cls, parameter: nn.Parameter, what: str, *, writes: bool = False) -> _Place:
        """Look a parameter up. Raises ValueError and RuntimeError as the public functions say."""
        core, unit = locate(parameter)
        core.check_idle(what)
        if writes and core.holds[unit]:
            raise RuntimeError(
                f"{what} is not possible within full_parameters, whose end would overwrite it; leave it first"
            )
        if writes:
            core.updates.settle_all()
        else:
            core.updates.wait([unit])  # its masters and states; nothing here reads replicas
        core.writes.take_over([unit])
        _, segment = core.layout.find(fqn_of(parameter))
        start, stop = _overlap(segment, unit.start, unit.stop)
        return cls(core=core, unit=unit, segment=segment, start=start, stop=stop)

    def cut(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Return this rank's part of the parameter in a tensor whose element 0 is the unit's element
        `offset`."""
        return tensor[self.start - offset : self.stop - offset]

    def own_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole parameter."""
        return self.cut(full.flatten(), self.segment.start)

    def states(self) -> StateTensors:
        self.check_trainable()
        return self.core.states[self.unit.name]

    def checked_kind(self, kind: str) -> str:
        """Return the kind. Raises, as the public functions say, for one that the optimizer does not keep."""
        kinds = self.states().kinds
        if kind not in kinds:
            raise KeyError(
                f"the optimizer keeps no state {kind!r} of {self.segment.fqn!r}; it has {sorted(kinds)}"
            )
        return kind

    def state_part(self, kind: str) -> torch.Tensor:
        """Return a copy of this rank's part of a state, or of MASTER."""
        if kind != MASTER:
            self.checked_kind(kind)
        states = self.states()
        low = states.interval[0]
        return states.read(kind, self.start - low, self.stop - low).to(self.core.comm.device)

    def check_trainable(self) -> None:
        if not self.unit.layout.trainable:
            raise ValueError(
                f"parameter {self.segment.fqn!r} is frozen: it has neither gradient nor optimizer states; "
                "get_full_fp32 reads its value"
            )

    def own_grad(self, gradients: UnitGradients) -> torch.Tensor:
        """Return this rank's part of the ranks' mean, fp32 on the device: a copy or the memory itself."""
        return self.cut(gradients.own_part, self.unit.start).to(self.core.comm.device, torch.float32)

    def is_summed(self, gradients: UnitGradients) -> bool:
        """Return whether the owners already hold the mean over the ranks."""
        return self.unit.placement.grads_sharded or gradients.is_reduced

    def gradients(self) -> UnitGradients:
        """Return the unit's gradients. Raises as the public functions say."""
        self.check_trainable()
        if not self.core.has_gradients:
            raise RuntimeError(
                f"there is no gradient of {self.segment.fqn!r}: step() clears gradients; "
                "read it between backward() and step()"
            )
        gradients = self.core.gradients[self.unit.name]
        gradients.settle()
        return gradients

    def settle_writes(self) -> None:
        """Keep or refuse what ranks wrote into the unit's whole weights. Collective."""
        core, unit = self.core, self.unit
        if unit.placement.params_sharded:
            return
        rows = core.comm.gather_record([float(core.writes.found([unit]))], label=self.segment.fqn)
        if any(row[0] for row in rows):
            core.updates.settle_all()
            core.writes.settle()

    def master_part(self) -> torch.Tensor:
        """Return a copy of this rank's part of the master, or of the weight of a frozen parameter, on the
        device."""
        if self.unit.layout.trainable:
            return self.state_part(MASTER)
        start = self.unit.start
        part = self.unit.read_weights(self.start - start, self.stop - start)
        return part.to(self.core.comm.device, copy=True)

    @torch.no_grad()
    def write_master(self, own: torch.Tensor) -> None:
        """Replace this rank's part of master and weight, then the replicas on all ranks."""
        unit = self.unit
        self.settle_writes()
        unit.before_write()
        if unit.layout.trainable:
            self.write_state(MASTER, own)
        else:
            unit.write_weights(self.start - unit.start, own)
        unit.publish().wait()
        if not unit.placement.states_sharded and self.core.comm.world_size > 1:
            self._exchange_parts(unit.full.tensor[self.segment.start : self.segment.stop])

    @torch.no_grad()
    def write_state(self, kind: str, own: torch.Tensor) -> None:
        """Replace this rank's part of a state or of MASTER; if states are replicated, that of all ranks."""
        states = self.states()
        if self.unit.placement.states_sharded:
            states.write(kind, self.start - self.unit.start, own)
        else:
            states.write(kind, self.segment.start, self.gathered(own.float()).flatten())

    @torch.no_grad()
    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Gather the whole parameter, in its shape, from every rank's part of it."""
        full = torch.empty(self.segment.numel, dtype=own.dtype, device=own.device)
        self.own_of(full).copy_(own)
        self._exchange_parts(full)
        return full.view(self.segment.shape)

    def _exchange_parts(self, flat: torch.Tensor) -> None:
        """Broadcast each owner's part of the flattened parameter to all ranks."""
        for rank in range(self.core.comm.world_size):
            start, stop = _overlap(self.segment, *self.core.layout.shard_range(self.unit.layout, rank))
            if start < stop:
                part = flat[start - self.segment.start : stop - self.segment.start]
                # One label per parameter, so that ranks which request different ones of a unit get an error.
                self.core.comm.broadcast(part, label=self.segment.fqn, source=rank)


def _overlap(segment: Segment, low: int, high: int) -> tuple[int, int]:
    start = min(max(low, segment.start), segment.stop)
    return start, max(start, min(high, segment.stop))


def _checked(value: torch.Tensor, shape: torch.Size, place: _Place) -> torch.Tensor:
    if value.shape != shape:
        raise ValueError(
            f"the value for {place.segment.fqn!r} must have shape {tuple(shape)}; got {tuple(value.shape)}"
        )
    return value.detach().to(place.core.comm.device)
