"""What the optimizer keeps of one unit, however it is encoded and wherever it is stored.

Three encodings of the fp32 master weight, chosen by the configuration and never by the tier, so that every
tier computes the same bits. Three tiers store what the encoding leaves to be stored (`device.py`, `host.py`,
`vaulted.py`), and all of them hand it to the update as `Block`s. Made by `tiers.StateTiers`; used by the
optimizer, checkpoints and state access.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from zerotrain.runtime.zero.rounding import join, split
from zerotrain.runtime.zero.state import MASTER
from zerotrain.runtime.zero.unit import Unit

REMAINDER = "remainder"
"""What is stored of a master whose upper half is the weight; no kind of its own outside of this package."""

STORED_DTYPES = {REMAINDER: torch.int16}
"""Of stored arrays; all others are fp32."""

_PIECE_NUMEL = 1 << 20
"""Elements that are converted at a time."""


class Encoding(Enum):
    """Where the bits of a master weight are."""

    WEIGHT = "weight"  # fp32 compute: the weight is its own master
    FULL = "full"  # fp32 beside the weight, which is rounded from it to nearest, ties to even
    SPLIT = "split"  # the bf16 weight is the upper half, rounded half up; an int16 remainder is the rest

    @classmethod
    def of(cls, unit: Unit) -> Encoding:
        """As the unit's weights are kept."""
        if unit.dtype is torch.float32:
            return cls.WEIGHT if unit.keeps_shard else cls.FULL
        return cls.SPLIT if unit.placement.splits_masters and unit.dtype is torch.bfloat16 else cls.FULL

    @property
    def stored(self) -> str | None:
        """Name of what a tier stores of the master, if anything."""
        return {Encoding.WEIGHT: None, Encoding.FULL: MASTER, Encoding.SPLIT: REMAINDER}[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Elements `[start, stop)` of a unit's states, to be updated in place; 1-D tensors of that size on one
    device."""

    start: int
    stop: int
    master: torch.Tensor | None
    """fp32; the weight itself under WEIGHT, None under SPLIT."""
    remainder: torch.Tensor | None
    """int16; under SPLIT."""
    by_kind: Mapping[str, torch.Tensor]
    """fp32 states of the rule."""
    weight: torch.Tensor | None
    """Weights in compute precision that the update writes (SPLIT: reads, too); None under WEIGHT."""


class BlockUpdate(Protocol):
    """The update of one unit, once its weights are at hand."""

    @property
    def task(self) -> Any | None:
        """The same as a native task over all elements of the unit (`_native.UpdateTask`), where the rule has
        a kernel: a tile can then be opened, updated and sealed in one pass."""
        ...

    def __call__(self, block: Block) -> None:
        """Update a block in place."""
        ...


class UnitUpdate(Protocol):
    """The update of one unit, before."""

    def bind(self, weights: torch.Tensor, encoding: Encoding) -> BlockUpdate:
        """For weights of the states' interval, which decide the device."""
        ...


class UnitPlace:
    """Which elements of a unit this rank updates, and the weights there."""

    def __init__(self, unit: Unit, encoding: Encoding) -> None:
        assert unit.layout.trainable
        self.unit = unit
        self.encoding = encoding
        low, high = self.interval
        self.numel = high - low

    @property
    def interval(self) -> tuple[int, int]:
        """Elements of the unit that these states cover."""
        unit = self.unit
        return (unit.start, unit.stop) if unit.placement.states_sharded else (0, unit.layout.padded_numel)

    @property
    def own_start(self) -> int:
        """Where this rank's interval of the layout begins, also where states are replicated."""
        return self.unit.start - self.interval[0]

    def weights_to_update(self, device: torch.device) -> AbstractContextManager[torch.Tensor]:
        """The weights of the interval on a device, as they are now unless the encoding overwrites them all;
        what is in the tensor at the end becomes the weights."""
        return self.unit.weights_to_update(reads=self.encoding is not Encoding.FULL, device=device)

    def read_weights(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the weights in compute precision: a copy or the memory itself."""
        if self.unit.placement.states_sharded:
            return self.unit.read_weights(start, stop)
        return self.unit.full.tensor[start:stop]

    def write_weights(self, start: int, values: torch.Tensor) -> None:
        """Replace elements of the weights that this rank holds."""
        if self.unit.placement.states_sharded:
            self.unit.write_weights(start, values)
        else:
            self.unit.full.tensor[start : start + values.numel()].copy_(values)


class UnitStates(UnitPlace, ABC):
    """Master and states of what this rank updates of one unit; `start` counts elements of `interval`."""

    is_spilled = False
    """They lie on a disk because memory has no room for them."""

    def __init__(self, unit: Unit, kinds: tuple[str, ...], encoding: Encoding) -> None:
        super().__init__(unit, encoding)
        self.kinds = kinds

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the arrays that a tier stores, in the order of a record."""
        first = self.encoding.stored
        return self.kinds if first is None else (first, *self.kinds)

    @property
    def device(self) -> torch.device:
        """Where the update runs."""
        return torch.device("cpu")

    @abstractmethod
    def load(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements of a stored array: a copy, or the memory itself."""

    @abstractmethod
    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        """Replace elements of a stored array."""

    @torch.no_grad()
    def read(self, kind: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """An fp32 copy of elements of MASTER or of a kind, on the device of the tier. Raises KeyError for a
        kind that is not there."""
        return self.peek(kind, start, self.numel if stop is None else stop).clone()

    def peek(self, kind: str, start: int, stop: int) -> torch.Tensor:
        """As `read`, but maybe the memory itself."""
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
        """Replace elements from `start` on by values of any floating dtype; of MASTER also the weights."""
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
        """Somebody is about to replace the weights of the interval by `written`: what it changes becomes the
        master, what it leaves keeps every digit.

        Under SPLIT a changed weight drops its remainder. Where weights were overwritten in place already
        (replicated ones), no change can be seen, and the old remainder stays: it is at most half a unit in
        the last place of bf16, and the weight stays what was written. (A remainder below zero would make a
        zero no number, so it goes.)
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
        """Store what the unit's first values (fp32, of the interval) leave to be stored. The weights were
        rounded from them already."""
        if self.encoding is Encoding.FULL:
            self.store(MASTER, 0, initial)
        elif self.encoding is Encoding.SPLIT:
            for start in range(0, self.numel, _PIECE_NUMEL):
                self.store(REMAINDER, start, split(initial[start : start + _PIECE_NUMEL])[1])

    def stream(self, kind: str) -> OwnStream:
        """This rank's interval of the layout, for checkpoints."""
        if kind != MASTER:
            self._check(kind)
        return OwnStream(self, kind)

    @torch.no_grad()
    def replicate(self) -> None:
        """Where states are replicated: bring every rank's to what their owners hold. Collective."""
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


@dataclass(frozen=True, slots=True, eq=False)
class OwnStream:
    """The `StateStream` of one kind of one unit."""

    states: UnitStates
    kind: str
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return self.states.unit.stop - self.states.unit.start

    def read(self, start: int, stop: int) -> torch.Tensor:
        """fp32: a copy or the memory itself."""
        offset = self.states.own_start
        return self.states.peek(self.kind, offset + start, offset + stop)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Of MASTER also this rank's weights."""
        self.states.write(self.kind, self.states.own_start + start, values)
