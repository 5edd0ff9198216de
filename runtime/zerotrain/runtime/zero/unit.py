"""One unit at run time: its weights (whole or as a shard), its gradients, and its state.

Stages 0 to 3 are one code path; `Placement` (zero/shards.py) holds the three booleans that distinguish them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from mmap import mmap
from typing import Protocol

import torch
from torch import nn

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.zero.buffer import FlatBuffer, flat_copy
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.layout import ModelLayout, UnitLayout
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.placeholder import ParameterViews
from zerotrain.runtime.zero.rounding import round_half_up
from zerotrain.runtime.zero.shards import HasShard, ParamTier, Placement, ResidentShard
from zerotrain.runtime.zero.zeropp import WeightTraffic


class InitialValues(Protocol):
    """Source of the units' initial values."""

    def interval(
        self, layout: UnitLayout, parameters: Sequence[nn.Parameter], own: tuple[int, int], *, whole: bool
    ) -> torch.Tensor:
        """Return a new tensor with elements `own` (this rank's shard) of the unit, or all; trainable ones in
        fp32. Collective."""
        ...


class UnitState(Enum):
    """State of a unit's weights: where they are and what they are needed for."""

    SHARDED = auto()  # only this rank's shard is resident; parameters refuse reads
    GATHERING = auto()  # the all-gather is in flight
    FORWARD = auto()  # whole; the end of its module's forward frees it
    BACKWARD = auto()  # whole; forward hooks (recomputation) keep it, the end of its backward frees it
    HELD = auto()  # whole for `full_parameters`; hooks do not change it
    LENT = auto()  # whole for uses outside of its module; each use calls uses.py


_NEXT = {
    UnitState.SHARDED: {UnitState.GATHERING},
    UnitState.GATHERING: {
        UnitState.FORWARD,
        UnitState.BACKWARD,
        UnitState.HELD,
        UnitState.LENT,
        UnitState.SHARDED,
    },
    UnitState.LENT: {UnitState.FORWARD, UnitState.BACKWARD, UnitState.HELD, UnitState.SHARDED},
    UnitState.FORWARD: {UnitState.BACKWARD, UnitState.HELD, UnitState.SHARDED},
    UnitState.BACKWARD: {UnitState.SHARDED},
    UnitState.HELD: {UnitState.SHARDED},
}


class Unit(HasShard):
    """Weights of one flat buffer. `full` is the whole buffer, `stored` this rank's interval of it in compute
    precision."""

    num_writes = 0
    """Number of writes by the engine."""
    seen_versions: list[int]
    """Versions of the parameters at the last `accept_writes`."""

    def __init__(
        self,
        layout: UnitLayout,
        parameters: Sequence[nn.Parameter],
        *,
        plan: ModelLayout,
        placement: Placement,
        comm: Comm,
        ledger: MemoryLedger,
        values: InitialValues,
        tier: ParamTier | None = None,
    ) -> None:
        """Take the initial values and make the parameters views of them. Collective.

        `tier` keeps the shard; None = the device does.
        """
        self.layout = layout
        self.placement = placement
        self.comm = comm
        self.parameters = tuple(parameters)
        self.start, self.stop = plan.shard_range(layout, comm.rank)
        self.state = UnitState.SHARDED if placement.params_sharded else UnitState.FORWARD
        self.is_wide = False
        """Whether the unit is used outside of its own module: it is then whole from the root's forward to its
        end, and likewise in backward."""
        self.weights: WeightTraffic | None = None
        """Gather of the weights under ZeRO++; None = directly through `comm`."""
        self.pending: Callable[[], None] | None = None
        """Waits for the update that runs in the background and makes its result the weights
        (zero/pending.py); None = there is no such update."""
        self.is_exact = True
        self._pending = Pending.done()
        dtype = TORCH_DTYPES[layout.dtype]
        kept_as = MemoryKind.PARAMS if layout.trainable else MemoryKind.FROZEN
        kept_as = kept_as if tier is None else tier.kind
        kept, pages = _shared_shard(self, dtype)
        self._ledger, self._kept_as, self._is_kept = ledger, kept_as, kept is not None
        self.full = FlatBuffer(
            layout.padded_numel,
            dtype=dtype,
            device=comm.device,
            ledger=ledger,
            kind=MemoryKind.GATHERED if placement.params_sharded else kept_as,
            pages=pages,
        )
        self.views = ParameterViews(self.parameters, self.full.views(self.views_of))
        own = (self.start, self.stop)
        initial = values.interval(layout, parameters, own, whole=not placement.params_sharded)
        weights = initial
        if layout.trainable and placement.splits_masters and dtype is torch.bfloat16:
            weights = flat_copy(round_half_up(initial), dtype)
        _store(self, weights, kept, tier, partial(ledger.count, kept_as))
        self.initial_master = _initial_master(self, initial)
        self.views.hide_all() if placement.params_sharded else self.views.show_all()
        accept_writes(self)

    def __repr__(self) -> str:
        return f"Unit({self.layout.name!r}, {self.state.name})"

    @property
    def name(self) -> str:
        """Name in the layout."""
        return self.layout.name

    @property
    def is_gathered(self) -> bool:
        """Whether sharded weights currently take the memory of whole ones."""
        return self.placement.params_sharded and self.state is not UnitState.SHARDED

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return one view per parameter, in parameter shape, of a flat tensor with the unit's layout."""
        return [flat[part.start : part.stop].view(part.shape) for part in self.layout.segments]

    def start_gather(self, *, is_exact: bool = False) -> None:
        """Start to gather the weights, without waiting. Does nothing unless they are sharded.

        `is_exact`: without quantisation, because the user will read them.
        """
        if self.pending is not None:
            self.pending()
        if self.state is UnitState.SHARDED:
            self.full.allocate()
            self.is_exact = is_exact or self.weights is None or not self.weights.rounds(self.dtype)
            own = self.full.tensor[self.start : self.stop]
            if self._is_near:
                self._pending = _gather(self, own)  # from the neighbours' copy: the shard is not read
            else:
                self._pending = self.stored.send(own, partial(_gather, self))
            self._become(UnitState.GATHERING)

    def require(self, purpose: UnitState) -> None:
        """Make the weights whole for FORWARD, BACKWARD or HELD; one that is in backward or held stays so."""
        if self.pending is not None:
            self.pending()
        if not self.placement.params_sharded or self.state in (UnitState.BACKWARD, UnitState.HELD):
            return
        if purpose is UnitState.HELD and not self.is_exact:
            self.free()  # kept from a forward pass, or prefetched for the next
        if self.state is not UnitState.FORWARD:
            self.start_gather(is_exact=purpose is UnitState.HELD)
            self._pending.wait()
            self.views.show_all()
        self.full.use()
        if self.state is not purpose:
            self._become(purpose)

    def lend(self) -> None:
        """Make the weights whole, unless they are, without showing the parameters; `views.show` shows one."""
        if self.state in (UnitState.SHARDED, UnitState.GATHERING):
            self.start_gather()
            self._pending.wait()
            self._become(UnitState.LENT)
        self.full.use()

    def free(self) -> None:
        """Keep only the shard; the contents of `full` are lost. Does nothing for replicated weights."""
        if not self.placement.params_sharded or self.state is UnitState.SHARDED:
            return
        self._pending.wait()  # a prefetch that was not used still writes into the buffer
        if self.state not in (UnitState.GATHERING, UnitState.LENT):
            self.views.hide_all()
        self.full.release()
        self._become(UnitState.SHARDED)

    def publish(self) -> Pending:
        """Update the replicas after an update of `shard`; sharded weights are gathered when used."""
        self.invalidate()
        if self.placement.params_sharded or not self.placement.states_sharded:
            return Pending.done()
        return self.comm.all_gather(self.full.tensor, self.shard, label=self.name)

    def invalidate(self) -> None:
        """Mark copies of the weights as out of date, because the shard was written or will be."""
        self.num_writes += 1
        if self.weights is not None:
            self.weights.invalidate()

    def before_write(self) -> None:
        """Prepare for a write into the shard outside of a step, as other ranks may read it in place.
        Collective."""
        self.invalidate()
        if self.comm.shares_memory:
            self.comm.gather_record([0.0])

    def keep_written(self) -> None:
        """Store what was written into the whole weights, the same on every rank, as the shard."""
        self.invalidate()
        part, shard = self.full.tensor[self.start : self.stop], self.stored.tensor
        if shard is None or part.data_ptr() != shard.data_ptr():
            self.write_weights(0, part)

    @torch.no_grad()
    def dispose(self) -> None:
        """Free all memory; the parameters, whole now (HELD or replicated), get tensors of their own.

        No rank may use the shards any more.
        """
        self.views.release()
        if self.keeps_shard and (self.placement.params_sharded or self._is_kept):
            self._ledger.add(self._kept_as, -self.shard.nbytes)
        if self._is_kept:
            self.comm.memory.drop(self.shard)
        self.stored.drop()
        self.full.release()
        if self.weights is not None:
            self.weights.drop()

    def _become(self, state: UnitState) -> None:
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"unit {self.name!r} cannot go from {self.state.name} to {state.name}")
        self.state = state


def versions_of(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return how often each parameter was written in place. Replacing its memory, as `show` does, is no
    write."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_VERSION, parameters))


def accept_writes(unit: Unit) -> None:
    """Record that all writes into the parameters so far are known; see writes.py."""
    unit.seen_versions = versions_of(unit.parameters)


_VERSION = vars(torch._C.TensorBase)["_version"].__get__


def _store(
    unit: Unit,
    weights: torch.Tensor,
    kept: torch.Tensor | None,
    tier: ParamTier | None,
    count: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Store the first weights: this rank's interval or, if they are not sharded, all of them. `count` adds a
    tensor to the ledger."""
    sharded = unit.placement.params_sharded
    if kept is not None:
        part = weights if sharded else weights[unit.start : unit.stop]
        unit.stored = ResidentShard(count(kept.copy_(part)))
        if not sharded:
            unit.full.allocate()
            unit.comm.all_gather(unit.full.tensor, unit.shard, label=unit.name).wait()
    elif tier is not None and not tier.is_resident(unit.layout):
        unit.stored = tier.keep(unit.layout, weights)
    elif sharded:
        # A trained master needs its own tensor unless it is the weight.
        own = weights if weights.dtype == unit.dtype else flat_copy(weights, unit.dtype)
        unit.stored = ResidentShard(count(own))
    else:
        unit.full.allocate()
        unit.full.tensor.copy_(weights)
        unit.stored = ResidentShard(unit.full.tensor[unit.start : unit.stop])


def _gather(unit: Unit, own: torch.Tensor) -> Pending:
    """Start the gather of the whole weights from this rank's part, wherever that is."""
    full, traffic = unit.full.tensor, unit.weights
    if traffic is None:
        return unit.comm.all_gather(full, own, label=unit.name)
    return traffic.gather(full, own, label=unit.name, is_exact=unit.is_exact)


def _shared_shard(unit: Unit, dtype: torch.dtype) -> tuple[torch.Tensor | None, mmap | None]:
    """Return a shard that the other ranks of the host read in place, and the mapping of all ranks' shards.

    Both are None if the ranks do not share memory or each have whole weights of their own.
    """
    placement = unit.placement
    if not (unit.comm.shares_memory and placement.states_sharded and placement.may_share):
        return None, None
    kept = unit.comm.memory.keep(unit.stop - unit.start, dtype)
    pages = unit.comm.memory.map_shards(kept)
    if pages is None:  # shards are not whole pages
        unit.comm.memory.drop(kept)
        return None, None
    return kept, pages


def _initial_master(unit: Unit, initial: torch.Tensor) -> torch.Tensor | None:
    """Return the first values of what this rank updates, in fp32, or the weights themselves if they are the
    masters; None if frozen."""
    if not unit.layout.trainable:
        return None
    is_master = unit.layout.dtype == "fp32" or unit.placement.bf16_masters
    if is_master and unit.keeps_shard:
        return unit.shard if unit.placement.states_sharded else unit.full.tensor
    if unit.placement.params_sharded or not unit.placement.states_sharded:
        return initial
    return flat_copy(initial[unit.start : unit.stop], torch.float32)
