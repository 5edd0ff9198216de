"""States that the optimizer keeps of one unit, however they are encoded and wherever they are stored.

There are three encodings of the master weight, chosen by the configuration and never by the tier, so that
every tier computes the same bits. The master is fp32, unless the bf16 weight is its own master. Three tiers
store what the encoding leaves to be stored (`resident.py` on the device or the host, `spilled.py` in the
spill store), and the update takes it from all of them as `Block`s. Made by `tiers.StateTiers`; used by the
optimizer, checkpoints and state access.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum

import torch

from zerotrain.runtime.zero.rounding import join, split
from zerotrain.runtime.zero.state import MASTER
from zerotrain.runtime.zero.unit import Unit

REMAINDER = "remainder"
"""Name of the array stored for a master whose upper half is the weight; not a kind outside of the package."""

CPU = torch.device("cpu")

_PIECE_NUMEL = 1 << 20
"""Number of elements that are converted at a time."""


class Encoding(Enum):
    """Storage of the bits of a master weight."""

    WEIGHT = "weight"  # the weight is its own master: in fp32, or in bf16 where the configuration says so
    FULL = "full"  # fp32 beside the weight, which is rounded from it to nearest, ties to even
    SPLIT = "split"  # the bf16 weight is the upper half, rounded half up; an int16 remainder is the rest

    @classmethod
    def of(cls, unit: Unit) -> Encoding:
        """Return the encoding for the way in which the unit's weights are kept."""
        if unit.placement.bf16_masters:
            return cls.WEIGHT
        if unit.dtype is torch.float32:
            return cls.WEIGHT if unit.keeps_shard else cls.FULL
        return cls.SPLIT if unit.placement.splits_masters and unit.dtype is torch.bfloat16 else cls.FULL

    @property
    def stored(self) -> str | None:
        """Name of the array that a tier stores of the master, if any."""
        return {Encoding.WEIGHT: None, Encoding.FULL: MASTER, Encoding.SPLIT: REMAINDER}[self]


def stored_names(kinds: tuple[str, ...], encoding: Encoding) -> tuple[str, ...]:
    """Return the names of the arrays that a tier stores, in the order of a record."""
    first = encoding.stored
    return kinds if first is None else (first, *kinds)


def stored_dtype(unit: Unit, name: str) -> torch.dtype:
    """Return the dtype in which a tier stores an array of a unit."""
    return {REMAINDER: torch.int16, MASTER: torch.float32}.get(name, unit.placement.state_dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Elements `[start, stop)` of a unit's states, to be updated in place: 1-D tensors on one device."""

    start: int
    stop: int
    master: torch.Tensor | None
    """The master; the weight itself under WEIGHT, None under SPLIT."""
    remainder: torch.Tensor | None
    """The int16 remainder; only under SPLIT."""
    by_kind: Mapping[str, torch.Tensor]
    """The rule's states."""
    weight: torch.Tensor | None
    """Weights in compute precision that the update writes (SPLIT: reads, too); None under WEIGHT."""

    def cut(self, part: slice) -> Block:
        """Return a part of the block, by positions within it."""

        def of(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[part]

        return Block(
            start=self.start + part.start,
            stop=self.start + part.stop,
            master=of(self.master),
            remainder=of(self.remainder),
            by_kind={kind: state[part] for kind, state in self.by_kind.items()},
            weight=of(self.weight),
        )


class UnitStates(ABC):
    """Master and states of one unit's elements that this rank updates; `start` counts elements of
    `interval`.

    Attributes:
        interval: elements of the unit that these states cover.
        numel: number of these elements.
        device: device on which the update runs.
    """

    is_spilled = False
    """Whether the states are on a disk, because memory does not hold them."""

    def __init__(
        self, unit: Unit, kinds: tuple[str, ...], encoding: Encoding, *, device: torch.device = CPU
    ) -> None:
        assert unit.layout.trainable
        self.unit, self.kinds, self.encoding, self.device = unit, kinds, encoding, device
        is_sharded = unit.placement.states_sharded
        self.interval = (unit.start, unit.stop) if is_sharded else (0, unit.layout.padded_numel)
        self.numel = self.interval[1] - self.interval[0]

    def weights_to_update(self) -> AbstractContextManager[torch.Tensor]:
        """Yield the weights of the interval on the device, as they are now unless the encoding overwrites
        them all. The contents of the tensor at the end become the weights."""
        return self.unit.weights_to_update(reads=self.encoding is not Encoding.FULL, device=self.device)

    def read_weights(self, start: int, stop: int) -> torch.Tensor:
        """Return elements of the weights in compute precision: a copy or the memory itself."""
        if self.unit.placement.states_sharded:
            return self.unit.read_weights(start, stop)
        return self.unit.full.tensor[start:stop]

    def write_weights(self, start: int, values: torch.Tensor) -> None:
        """Replace elements of the weights that this rank holds."""
        if self.unit.placement.states_sharded:
            self.unit.write_weights(start, values)
        else:
            self.unit.full.tensor[start : start + values.numel()].copy_(values)

    @abstractmethod
    def load(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements of a stored array: a copy, or the memory itself."""

    @abstractmethod
    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        """Replace elements of a stored array."""

    @torch.no_grad()
    def read(self, kind: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return an fp32 copy of elements of MASTER or of a kind, on the device of the tier. Raises KeyError
        for a kind that is not there."""
        found = self.peek(kind, start, self.numel if stop is None else stop)
        return found.to(torch.float32, copy=True)

    def peek(self, kind: str, start: int, stop: int) -> torch.Tensor:
        """Return the elements that `read` returns, in the dtype of their stream, possibly as the memory
        itself."""
        if kind != MASTER:
            self._check(kind)
            return self.load(kind, start, stop)
        if self.encoding is Encoding.FULL:
            return self.load(MASTER, start, stop)
        weights = self.read_weights(start, stop)
        if self.encoding is Encoding.WEIGHT:
            return weights
        remainder = self.load(REMAINDER, start, stop)
        return join(weights.to(remainder.device), remainder)

    @torch.no_grad()
    def write(self, kind: str, start: int, values: torch.Tensor) -> None:
        """Replace elements from `start` on by values of any floating dtype; for MASTER also the weights."""
        values = values.detach().reshape(-1)
        if kind != MASTER:
            self._check(kind)
            self.store(kind, start, values)
            return
        values = values.float()
        if self.encoding is Encoding.SPLIT:
            high, remainder = split(values)
            self.write_weights(start, high)
            self.store(REMAINDER, start, remainder)
            return
        self.write_weights(start, values)
        if self.encoding is Encoding.FULL:
            self.store(MASTER, start, values)

    @torch.no_grad()
    def take_weights(self, written: torch.Tensor) -> None:
        """Adapt the masters to `written`, which is about to replace the weights of the interval: weights that
        it changes become the masters, and masters of unchanged weights keep every digit.

        Under SPLIT a changed weight drops its remainder. Where weights were overwritten in place already
        (replicated ones), no change can be seen, and the old remainder stays: it is at most half a unit in
        the last place of bf16, and the weight stays what was written. (A remainder below zero would turn a
        weight of zero into NaN, so it is dropped.)
        """
        if self.encoding is Encoding.WEIGHT:
            return
        for start in range(0, self.numel, _PIECE_NUMEL):
            stop = min(start + _PIECE_NUMEL, self.numel)
            new, name = written[start:stop], self.encoding.stored
            assert name is not None
            old = self.load(name, start, stop)
            if self.encoding is Encoding.FULL:
                new = new.to(old.device)
                kept, value = old.to(new.dtype) == new, new.float()
            else:
                new = new.to(old.device)
                kept = self.read_weights(start, stop).to(old.device) == new
                kept &= ~join(new, old).isnan()
                value = torch.zeros_like(old)
            if not kept.all():
                self.store(name, start, torch.where(kept, old, value))

    @torch.no_grad()
    def take_initial(self, initial: torch.Tensor) -> None:
        """Store the part of the unit's first values (fp32, of the interval) that the encoding stores. The
        weights were rounded from them already."""
        if self.encoding is Encoding.FULL:
            self.store(MASTER, 0, initial)
        elif self.encoding is Encoding.SPLIT:
            for start in range(0, self.numel, _PIECE_NUMEL):
                self.store(REMAINDER, start, split(initial[start : start + _PIECE_NUMEL])[1])

    def stream(self, kind: str) -> OwnStream:
        """Return a stream over this rank's interval of the layout, for checkpoints."""
        if kind != MASTER:
            self._check(kind)
        return OwnStream(self, kind)

    @torch.no_grad()
    def replicate(self) -> None:
        """Copy replicated states from their owners to every rank; sharded states stay as they are.
        Collective."""
        unit = self.unit
        if unit.placement.states_sharded or unit.comm.world_size == 1:
            return
        shard, ranks = unit.stop - unit.start, unit.comm.world_size
        for kind in (MASTER, *self.kinds):
            for low in range(0, shard, _PIECE_NUMEL):
                own = self.read(kind, unit.start + low, unit.start + min(low + _PIECE_NUMEL, shard))
                own = own.to(unit.comm.device)
                everybody = torch.empty(ranks * own.numel(), dtype=own.dtype, device=own.device)
                unit.comm.all_gather(everybody, own, label=unit.name).wait()
                for rank, part in enumerate(everybody.view(ranks, -1)):
                    self.write(kind, rank * shard + low, part)

    def _check(self, kind: str) -> None:
        if kind not in self.kinds:
            raise KeyError(f"the optimizer keeps no state {kind!r}; it has {sorted(self.kinds)}")


def block_of(
    states: UnitStates, arrays: Mapping[str, torch.Tensor], weights: torch.Tensor, *, start: int
) -> Block:
    """Return a block of stored arrays and of the weights of the same elements, from `start` on."""
    is_master = states.encoding is Encoding.WEIGHT
    return Block(
        start=start,
        stop=start + weights.numel(),
        master=weights if is_master else arrays.get(MASTER),
        remainder=arrays.get(REMAINDER),
        by_kind={kind: arrays[kind] for kind in states.kinds},
        weight=None if is_master else weights,
    )


@dataclass(frozen=True, slots=True, eq=False)
class OwnStream:
    """The `StateStream` of one kind of one unit."""

    states: UnitStates
    kind: str

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements: fp32, or bf16 where they are kept so."""
        unit = self.states.unit
        if self.kind == MASTER and self.states.encoding is Encoding.WEIGHT:
            return unit.dtype
        return stored_dtype(unit, self.kind)

    @property
    def numel(self) -> int:
        """Number of elements of the shard."""
        return self.states.unit.stop - self.states.unit.start

    @property
    def own_start(self) -> int:
        """First element of this rank's interval of the layout; also for replicated states."""
        return self.states.unit.start - self.states.interval[0]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements: a copy or the memory itself."""
        offset = self.own_start
        return self.states.peek(self.kind, offset + start, offset + stop)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace elements; for MASTER also this rank's weights."""
        self.states.write(self.kind, self.own_start + start, values)
