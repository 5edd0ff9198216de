"""Where a unit's shard lives between its uses: on the device, or in a tier that `offload` supplies.

Called by `Unit`, which asks for the shard to be sent to a gather, for a place to write new weights to, and
for parts of it. A tier is made by `setup` and handed to `Core` in its options.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.zero.buffer import FlatBuffer
from zerotrain.runtime.zero.layout import ModelLayout, UnitLayout
from zerotrain.runtime.zero.ledger import Kind, MemoryLedger
from zerotrain.runtime.zero.secondary import WeightTraffic
from zerotrain.runtime.zero.state import StateStream, TensorStream

if TYPE_CHECKING:
    from zerotrain.runtime.zero.unit import Placement

StartGather = Callable[[torch.Tensor], Pending]
"""Starts the gather of a unit from this rank's part of it."""


class StoredShard(Protocol):
    """One unit's shard, 1-D in compute precision, wherever it is."""

    @property
    def tensor(self) -> torch.Tensor | None:
        """The shard itself where it is in the device's memory; None = in a tier."""
        ...

    @property
    def is_spilled(self) -> bool:
        """Whether it is on a disk."""
        ...

    def send(self, part: torch.Tensor, start: StartGather) -> Pending:
        """Start the gather: from the shard itself, or from `part`, its place in the whole weights, once it is
        there."""
        ...

    def read_ahead(self) -> bool:
        """Begin to bring it close for the next `send`, without waiting; False where there is no room."""
        ...

    def to_update(self, *, reads: bool, device: torch.device) -> AbstractContextManager[torch.Tensor]:
        """A tensor on `device` whose contents become the shard when the block ends without an error; it holds
        the shard if `reads`. Of another thread than the caller of the rest, too."""
        ...

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)`, a copy or the memory itself."""
        ...

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace the elements from `start` on."""
        ...

    def drop(self) -> None:
        """Give its memory and its place back."""
        ...


class ParamTier(Protocol):
    """Keeps shards of units beside the device; one for all units of an engine."""

    def prepare(self, plan: ModelLayout, ledger: MemoryLedger) -> None:
        """These are all units from now on. Called before new ones are made."""
        ...

    @property
    def kind(self) -> Kind:
        """What memory of shards counts as."""
        ...

    def is_resident(self, layout: UnitLayout) -> bool:
        """Whether its shard is device memory all the same."""
        ...

    def keep(self, layout: UnitLayout, values: torch.Tensor) -> StoredShard:
        """Take over this rank's shard of a unit that `prepare` knows and that is not resident."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ResidentShard:
    """A shard in the device's memory."""

    tensor: torch.Tensor
    is_spilled: bool = False

    def send(self, part: torch.Tensor, start: StartGather) -> Pending:
        return start(self.tensor)

    def read_ahead(self) -> bool:
        return True

    def to_update(self, *, reads: bool, device: torch.device) -> AbstractContextManager[torch.Tensor]:
        if device.type == self.tensor.device.type:
            return nullcontext(self.tensor)
        return CopiedBack(self.tensor, reads=reads, device=device)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    @torch.no_grad()
    def write(self, start: int, values: torch.Tensor) -> None:
        self.tensor[start : start + values.numel()].copy_(values)

    def drop(self) -> None:
        """Nothing: its memory goes with the unit."""


class CopiedBack(AbstractContextManager[torch.Tensor]):
    """A copy of a tensor on another device, which is copied back when the block ends without an error."""

    def __init__(self, tensor: torch.Tensor, *, reads: bool, device: torch.device) -> None:
        self._tensor = tensor
        with torch.no_grad():
            self._copy = tensor.to(device) if reads else torch.empty_like(tensor, device=device)

    def __enter__(self) -> torch.Tensor:
        return self._copy

    @torch.no_grad()
    def __exit__(self, error: object, *_details: object) -> None:
        if error is None:
            self._tensor.copy_(self._copy)


@dataclass(frozen=True, slots=True, eq=False)
class ShardStream:
    """A `StateStream` over a shard that is in a tier."""

    stored: StoredShard
    numel: int
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.stored.read(start, stop)

    def write(self, start: int, values: torch.Tensor) -> None:
        self.stored.write(start, values)


class Staging(Protocol):
    """Host memory in which an update computes weights that are on an accelerator."""

    def lend(
        self, weights: torch.Tensor, *, reads: bool, ledger: MemoryLedger
    ) -> AbstractContextManager[torch.Tensor]:
        """A tensor like `weights`, with their contents if `reads`, that is copied into them when the block
        ends without an error."""
        ...

    def close(self) -> None:
        """Give the memory back, when nothing is copied any more."""
        ...


class HasShard:
    """What a unit offers of its shard, wherever that is; `Unit` supplies the rest."""

    staging: Staging | None = None
    """Where weights of an accelerator are updated by rules that run on the host; None = it is the host."""
    stored: StoredShard
    full: FlatBuffer
    placement: Placement
    weights: WeightTraffic | None
    start: int
    stop: int
    _ledger: MemoryLedger
    _is_exact: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.full.tensor.dtype

    @property
    def shard(self) -> torch.Tensor:
        """This rank's interval, 1-D, where the device keeps it. Raises RuntimeError where a tier does."""
        if (shard := self.stored.tensor) is None:
            raise RuntimeError("the shard is offloaded; read it with `read_weights`")
        return shard

    @property
    def keeps_shard(self) -> bool:
        """Whether the shard is in the device's memory."""
        return self.stored.tensor is not None

    @property
    def weight_stream(self) -> StateStream:
        """This rank's interval, wherever it is. Whoever writes calls `before_write` first."""
        if (shard := self.stored.tensor) is not None:
            return TensorStream(shard)
        return ShardStream(self.stored, self.stop - self.start, self.dtype)

    def weights_to_update(self, *, reads: bool, device: torch.device) -> AbstractContextManager[torch.Tensor]:
        """For a block that computes new weights of what this rank updates (its shard, or all where states
        are replicated), on the device that the rule runs on: a tensor that holds the present ones only if
        `reads`. What it holds when the block ends without an error are the weights from then on."""
        is_own = self.placement.states_sharded
        weights = self.stored.tensor if is_own else self.full.tensor
        if weights is not None and self.staging is not None and device.type == "cpu":
            return self.staging.lend(weights, reads=reads, ledger=self._ledger)
        stored = self.stored if is_own else ResidentShard(self.full.tensor)
        return stored.to_update(reads=reads, device=device)

    def read_weights(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the shard: a copy or the memory itself."""
        return self.stored.read(start, stop)

    def write_weights(self, start: int, values: torch.Tensor) -> None:
        """Replace elements of the shard, without publishing them."""
        self.stored.write(start, values)

    def read_ahead(self) -> bool:
        """Begin to bring the shard close for the next gather, without waiting; False where there is no
        room."""
        return self._is_near or self.stored.read_ahead()

    @property
    def is_exact(self) -> bool:
        """Whether the whole weights are no decoded codes."""
        return self._is_exact

    @property
    def _is_near(self) -> bool:
        """Whether the next gather does not read the shard."""
        return self.weights is not None and self.weights.is_near(self.dtype, is_exact=self._is_exact)
