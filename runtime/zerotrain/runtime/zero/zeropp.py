"""ZeRO++ (https://arxiv.org/abs/2306.10209): replaces some of the traffic that otherwise goes directly
through `Comm`. `Traffic` is one engine's, made by `ShardedModel`; `WeightTraffic` is one unit's.

hpZ: after the first gather of a step, a group of neighbouring ranks (a node) keeps a second, partitioned copy
of the unit. Later gathers, mostly backward's, stay within the group until the weights are updated. The values
are the same bits. qwZ: gathers that cross nodes carry int8 codes. Both forward and backward then use the
decoded values; masters stay exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.streams import keep_for_current
from zerotrain.runtime.comm.subgroup import SubGroup
from zerotrain.runtime.comm.timing import Exchange, Pending
from zerotrain.runtime.zero.buffer import flat_zeros
from zerotrain.runtime.zero.hierarchy import HierarchicalReduction
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.quantize import INT4, INT8, Quantizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroPlusPlus:
    """Options of ZeRO++; all off by default."""

    hpz_ranks: int = 1
    """Number of neighbouring ranks that share a copy of a unit between its first gather and its update; 1 =
    off."""
    quantized_weights: bool = False
    quantized_gradients: bool = False

    @property
    def changes_weights(self) -> bool:
        """Whether gathered weights are in this rank's own memory, even if the ranks share memory."""
        return self.hpz_ranks > 1 or self.quantized_weights


class Traffic:
    """Traffic of one engine: how its gradients and weights are sent."""

    def __init__(self, comm: Comm, ledger: MemoryLedger, plus: ZeroPlusPlus) -> None:
        """Make the groups. Collective."""
        self._comm = comm
        self._ledger = ledger
        self._plus = plus
        self._neighbours: SubGroup | None = None
        if plus.hpz_ranks > 1:
            ranks, size = range(comm.world_size), plus.hpz_ranks
            self._neighbours = SubGroup(comm, [ranks[first : first + size] for first in ranks[::size]])
        self._reduction: HierarchicalReduction | None = None
        several = comm.nodes.num_nodes > 1 and comm.nodes.ranks_per_node > 1
        if comm.world_size > 1 and (several or plus.quantized_gradients):
            self._reduction = HierarchicalReduction(
                comm, quantizer=INT4 if plus.quantized_gradients else None
            )

    @property
    def start_exchange(self) -> Callable[..., Exchange]:
        """`Comm.start_exchange` or its replacement."""
        return self._comm.start_exchange if self._reduction is None else self._reduction.start

    def of_weights(self) -> WeightTraffic | None:
        """Return the traffic of one unit's weights; None = directly through `Comm`."""
        if not self._plus.changes_weights:
            return None
        quantizer = INT8 if self._plus.quantized_weights else None
        return WeightTraffic(self._comm, self._ledger, neighbours=self._neighbours, quantizer=quantizer)

    def close(self) -> None:
        """Leave the groups."""
        if self._neighbours is not None:
            self._neighbours.close()
        if self._reduction is not None:
            self._reduction.close()


class WeightTraffic:
    """Gathers of one unit with sharded weights. All ranks call every method in the same order."""

    def __init__(
        self, comm: Comm, ledger: MemoryLedger, *, neighbours: SubGroup | None, quantizer: Quantizer | None
    ) -> None:
        """`neighbours` None = no hpZ, `quantizer` None = no qwZ."""
        self._comm = comm
        self._ledger = ledger
        self._neighbours = neighbours
        self._quantizer = quantizer
        self._secondary: torch.Tensor | None = None
        self._is_valid = False

    def gather(
        self, full: torch.Tensor, shard: torch.Tensor, *, label: str, is_exact: bool = False
    ) -> Pending:
        """Start a gather like `Comm.all_gather`; with `is_exact`, for weights that users read or save, never
        rounded."""
        quantizer = self._quantizer if self.rounds(shard.dtype) else None
        if quantizer is not None and is_exact:
            return self._comm.all_gather(full, shard, label=label)
        if (near := self._nearby(shard.dtype, is_exact)) is not None:
            neighbours, copy = near
            return neighbours.all_gather(full, copy, label=label)
        pending = (
            self._comm.all_gather(full, shard, label=label)
            if quantizer is None
            else self._gather_packed(full, shard, quantizer, label)
        )
        return self._then(pending, lambda: self._keep(full))

    def is_near(self, dtype: torch.dtype, *, is_exact: bool) -> bool:
        """Return whether the next gather uses the neighbours' copy, so that the shard is not read."""
        return self._nearby(dtype, is_exact) is not None

    def rounds(self, dtype: torch.dtype) -> bool:
        """Return whether gathers without `is_exact` are quantised."""
        return self._quantizer is not None and dtype.is_floating_point and dtype.itemsize > 1

    def invalidate(self) -> None:
        """Mark the neighbours' copy as stale, because the weights changed or will."""
        self._is_valid = False

    def drop(self) -> None:
        """Free the memory of the second copy."""
        self.invalidate()
        if self._secondary is not None:
            self._ledger.add(MemoryKind.SECONDARY, -self._secondary.nbytes)
            self._secondary = None

    def _nearby(self, dtype: torch.dtype, is_exact: bool) -> tuple[SubGroup, torch.Tensor] | None:
        if not self._is_valid or self._neighbours is None or self._secondary is None:
            return None
        return None if is_exact and self.rounds(dtype) else (self._neighbours, self._secondary)

    def _gather_packed(
        self, full: torch.Tensor, shard: torch.Tensor, quantizer: Quantizer, label: str
    ) -> Pending:
        part_bytes = quantizer.packed_bytes(shard.numel())
        packed = flat_zeros(self._comm.world_size * part_bytes, dtype=torch.uint8, device=full.device)
        self._ledger.add(MemoryKind.GATHERED, packed.nbytes)
        own = packed.view(self._comm.world_size, -1)[self._comm.rank]
        quantizer.pack(shard, own)

        def unpack() -> None:
            keep_for_current(packed)  # a module on another stream than that of its gather reads it there
            # Also this rank's own part, so that all ranks compute with the same weights.
            quantizer.unpack(packed, full.view(self._comm.world_size, -1))
            self._ledger.add(MemoryKind.GATHERED, -packed.nbytes)

        return self._then(self._comm.all_gather(packed, own, label=label), unpack)

    def _keep(self, full: torch.Tensor) -> None:
        if self._neighbours is None:
            return
        numel = full.numel() // self._neighbours.world_size
        if self._secondary is None:
            made = flat_zeros(numel, dtype=full.dtype, device=full.device)
            self._secondary = self._ledger.count(MemoryKind.SECONDARY, made)
        first = self._neighbours.rank * numel
        self._secondary.copy_(full[first : first + numel])
        self._is_valid = True

    @staticmethod
    def _then(pending: Pending, action: Callable[[], None]) -> Pending:
        @torch.no_grad()
        def wait() -> None:
            pending.wait()
            action()

        return Pending(wait)
