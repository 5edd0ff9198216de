"""ZeRO++ of one engine: replaces some of the traffic that otherwise goes directly through `Comm`; made by
`ShardedModel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.subgroup import SubGroup
from zerotrain.runtime.comm.timing import Exchange
from zerotrain.runtime.zero.hierarchy import HierarchicalReduction
from zerotrain.runtime.zero.hpz import WeightTraffic
from zerotrain.runtime.zero.ledger import MemoryLedger
from zerotrain.runtime.zero.quantize import INT4, INT8


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
