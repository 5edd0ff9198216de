"""Storage of a unit's shard between its uses: on the device, or in a tier that `offload` supplies.

`Unit` uses it to send the shard to a gather, to write new weights, and to read parts of the shard. `setup`
makes the tier and passes it to `ShardedModel` in its options.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.zero.buffer import FlatBuffer
from zerotrain.runtime.zero.layout import ModelLayout, UnitLayout
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.state import StateStream, TensorStream
from zerotrain.runtime.zero.zeropp import WeightTraffic


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Parts of a unit that are kept as a shard between uses (parameters at stage 3, gradients at 2, states at
    1)."""

    params_sharded: bool
    grads_sharded: bool
    states_sharded: bool
    sums_own_part: bool = False
    """Whether whole gradients are sent as backward computes them and a rank keeps its own part of their sum
    alone (stage 1 with one micro-batch per step). If a script adds more, the accumulator becomes whole."""
    may_share: bool = True
    """Whether ranks of one host may read each other's weights in place."""
    splits_masters: bool = False
    """Whether bf16 weights are the upper halves of their masters (zero/rounding.py), and so are rounded half
    up."""
    bf16_masters: bool = False
    """Whether bf16 weights are their own masters, and gradients are summed in bf16."""
    bf16_states: bool = False
    """Whether optimizer states are kept in bf16; only with `bf16_masters`."""

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of the sums of gradients."""
        return torch.bfloat16 if self.bf16_masters else torch.float32

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype in which the optimizer's states are kept."""
        return torch.bfloat16 if self.bf16_states else torch.float32

    @classmethod
    def of_stage(cls, stage: int, *, world_size: int, has_tier: bool = False) -> Placement:
        """Return the placement of a ZeRO stage. One rank shards nothing, unless its shards are kept in a
        tier."""
        stage = stage if world_size > 1 or has_tier else 0
        return cls(params_sharded=stage >= 3, grads_sharded=stage >= 2, states_sharded=stage >= 1)


StartGather = Callable[[torch.Tensor], Pending]
"""Function that starts the gather of a unit from this rank's part of it."""


class StoredShard(Protocol):
    """Shard of one unit, 1-D in compute precision, independent of where it is stored."""

    @property
    def tensor(self) -> torch.Tensor | None:
        """The shard itself if it is in the device's memory; None = in a tier."""
        ...

    @property
    def is_spilled(self) -> bool:
        """Whether the shard is on a disk."""
        ...

    def send(self, part: torch.Tensor, start: StartGather) -> Pending:
        """Start the gather: from the shard itself, or from `part`, its position in the whole weights, once it
        is copied there."""
        ...

    def read_ahead(self) -> bool:
        """Start to load the shard for the next `send`, without waiting; return False if there is no free
        memory."""
        ...

    def to_update(self, *, reads: bool, device: torch.device) -> AbstractContextManager[torch.Tensor]:
        """Return a context with a tensor on `device` whose contents become the shard when the block ends
        without error.

        The tensor holds the shard if `reads`. May be called from another thread than the other methods.
        """
        ...

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)`, a copy or the memory itself."""
        ...

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace the elements from `start` on."""
        ...

    def drop(self) -> None:
        """Free its memory and its slot in the tier."""
        ...


class ParamTier(Protocol):
    """Storage of units' shards outside of the device; one for all units of an engine."""

    def prepare(self, plan: ModelLayout, ledger: MemoryLedger) -> None:
        """Prepare for these units, which are all units from now on. Called before new ones are made."""
        ...

    @property
    def kind(self) -> MemoryKind:
        """Kind under which the ledger counts the memory of shards."""
        ...

    def is_resident(self, layout: UnitLayout) -> bool:
        """Return whether the unit's shard is kept in device memory nevertheless."""
        ...

    def keep(self, layout: UnitLayout, values: torch.Tensor) -> StoredShard:
        """Take over this rank's shard of a unit that `prepare` was given and that is not resident."""
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
        """Do nothing: the memory is freed with the unit."""


class CopiedBack(AbstractContextManager[torch.Tensor]):
    """Copy of a tensor on another device, which is copied back when the block ends without an error."""

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
    """A `StateStream` over a shard in a tier."""

    stored: StoredShard
    numel: int
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.stored.read(start, stop)

    def write(self, start: int, values: torch.Tensor) -> None:
        self.stored.write(start, values)


class Staging(Protocol):
    """Host memory in which an update computes the weights of an accelerator."""

    def lend(
        self, weights: torch.Tensor, *, reads: bool, ledger: MemoryLedger
    ) -> AbstractContextManager[torch.Tensor]:
        """Return a context with a tensor like `weights`, with their contents if `reads`; it is copied into
        them when the block ends without an error."""
        ...

    def close(self) -> None:
        """Free the memory, once no copy is running."""
        ...


class HasShard:
    """Shard of a unit, independent of where it is stored; `Unit` supplies the rest."""

    staging: Staging | None = None
    """Host memory for updates of an accelerator's weights by rules that run on the host; None if the device
    is the host."""
    stored: StoredShard
    full: FlatBuffer
    placement: Placement
    weights: WeightTraffic | None
    start: int
    stop: int
    is_exact: bool
    """Whether the last gather brought exact weights rather than decoded codes."""
    _ledger: MemoryLedger

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.full.tensor.dtype

    @property
    def shard(self) -> torch.Tensor:
        """Interval of this rank, 1-D, if the device keeps it. Raises RuntimeError if a tier does."""
        if (shard := self.stored.tensor) is None:
            raise RuntimeError("the shard is offloaded; read it with `read_weights`")
        return shard

    @property
    def keeps_shard(self) -> bool:
        """Whether the shard is in the device's memory."""
        return self.stored.tensor is not None

    @property
    def weight_stream(self) -> StateStream:
        """Stream over this rank's interval, wherever it is. Call `before_write` before writing."""
        if (shard := self.stored.tensor) is not None:
            return TensorStream(shard)
        return ShardStream(self.stored, self.stop - self.start, self.dtype)

    def weights_to_update(self, *, reads: bool, device: torch.device) -> AbstractContextManager[torch.Tensor]:
        """Return a context that computes new weights of what this rank updates, on the device that the rule
        runs on.

        This rank updates its shard, or all weights if states are replicated. The context's tensor holds the
        present weights only if `reads`. Its contents become the weights when the block ends without an error.
        """
        is_own = self.placement.states_sharded
        weights = self.stored.tensor if is_own else self.full.tensor
        if weights is not None and self.staging is not None and device.type == "cpu":
            return self.staging.lend(weights, reads=reads, ledger=self._ledger)
        stored = self.stored if is_own else ResidentShard(self.full.tensor)
        return stored.to_update(reads=reads, device=device)

    def read_weights(self, start: int, stop: int) -> torch.Tensor:
        """Return elements of the shard: a copy or the memory itself."""
        return self.stored.read(start, stop)

    def write_weights(self, start: int, values: torch.Tensor) -> None:
        """Replace elements of the shard, without publishing them."""
        self.stored.write(start, values)

    def read_ahead(self) -> bool:
        """Start to load the shard for the next gather, without waiting; return False if there is no free
        memory."""
        return self._is_near or self.stored.read_ahead()

    @property
    def _is_near(self) -> bool:
        """Whether the next gather does not read the shard."""
        return self.weights is not None and self.weights.is_near(self.dtype, is_exact=self.is_exact)
