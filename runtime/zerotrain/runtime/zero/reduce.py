"""Sums gradients over the ranks, in one canonical order of units that is the same on every rank.

[Note: canonical order] Ranks may finish units in different orders, or not touch some at all (an expert
without tokens, a branch not taken). Collectives must match, so within a backward pass every trainable unit is
reduced exactly once and in an agreed order: a unit that is ready early waits for its turn, and at the end of
backward the rest follow, with zeros where there was no gradient. The order is the reverse of the layout until
all ranks have seen the same other order in one whole backward pass (the step record says so).

[Note: late gradients] A gradient that arrives after its unit was sent (a parameter used outside of its
module, a second backward pass of a step that was reduced already) stays in the unit's buffer. It goes with
the unit's next turn, and where no turn comes before the step boundary, the step record tells all ranks that
somebody has such gradients: then all units are sent once more.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerotrain.runtime.comm.exchange import Exchange
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.sums import accumulate_
from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.zero.gradients import UnitGradients, own_part_to_write
from zerotrain.runtime.zero.ledger import Kind, MemoryLedger


@dataclass(slots=True)
class _Exchange:
    gradients: UnitGradients
    local: torch.Tensor
    wire: torch.Tensor
    """`local` or its cast; both stay alive until the exchange is over."""
    exchange: Exchange
    is_whole: bool
    """`local` is the replicated accumulator itself."""


class Reducer:
    """All gradient traffic of one engine."""

    def __init__(
        self,
        *,
        comm: Comm,
        ledger: MemoryLedger,
        wire_dtype: torch.dtype | None,
        overlap: bool,
        bucket_numel: int,
        predivision: float = 1.0,
        averages: bool = True,
    ) -> None:
        """`wire_dtype` None sends as autograd made them; gradients are divided by `predivision` before they
        travel and by the rest after the sum.

        With `overlap`, finished units up to `bucket_numel` elements together (but not more than the largest
        unit has, and at least one unit) are on the wire while backward goes on.
        """
        self._comm = comm
        self._ledger = ledger
        self._wire_dtype = wire_dtype
        self._overlap = overlap
        self._bucket_limit = bucket_numel
        self._before = 1.0 / predivision
        self._after = predivision / (comm.world_size if averages else 1)
        self.start_exchange = comm.start_exchange
        """How gradients travel; ZeRO++ has its own way."""
        self._flying: deque[_Exchange] = deque()
        self._gathers: list[Pending] = []
        self._seen: dict[UnitGradients, None] = {}  # ordered set: the order in which units became ready
        self._next = 0
        self.keeps_local: Callable[[], bool] = lambda: False
        """Whether stages 0 and 1 send nothing now: the optimizer wants each rank's own sums."""
        self.replace([])

    def replace(self, gradients: list[UnitGradients]) -> None:
        """These, in layout order, are the model's gradients from now on. Not during a pass."""
        self.order = list(reversed(gradients))
        """In which units are sent; the same on every rank."""
        self._seen.clear()
        self._is_sharded = any(part.unit.placement.grads_sharded for part in gradients)
        layouts = [part.unit.layout for part in gradients]
        largest = max((layout.padded_numel for layout in layouts if layout.module), default=0)
        self._bucket_numel = min(self._bucket_limit, largest)
        self._sends = self._is_sharded
        """Units are sent during the pass that runs; otherwise stages 0 and 1 only add up."""

    @property
    def reduces_early(self) -> bool:
        """Whether units of stages 0 and 1 are sent as soon as they are complete."""
        return self._overlap and self._comm.world_size > 1 and not self.keeps_local()

    def begin(self, *, at_boundary: bool) -> None:
        """A backward pass starts; `at_boundary`: no other micro-batch follows before the step."""
        self._seen.clear()
        self._next = 0
        self._sends = self._is_sharded or (at_boundary and self.reduces_early)

    def ready(self, gradients: UnitGradients) -> None:
        """This unit's gradients of the pass are complete."""
        if not self._sends:
            gradients.fold()
            return
        # A second use after its turn changes nothing here; see [Note: late gradients].
        self._seen.setdefault(gradients)
        while self._next < len(self.order) and self.order[self._next] in self._seen:
            self._launch(self.order[self._next])
            self._next += 1

    def finish(self) -> None:
        """The pass is over: send what is left and wait for everything."""
        if self._sends:
            for gradients in self.order[self._next :]:
                self._launch(gradients)
            self._next = len(self.order)
        try:
            for gradients in self.order:
                if gradients.is_open:
                    gradients.attach()
                    if not self._is_sharded:
                        gradients.fold()
        finally:
            self._drain(everything=True)

    def reduce_replicated(self) -> None:
        """At the step boundary: sum and average what stages 0 and 1 accumulated locally."""
        if not self._is_sharded and self._comm.world_size > 1 and not self.keeps_local():
            for gradients in self.order:
                if not gradients.is_reduced:
                    self._launch(gradients)
                    self._drain(everything=True)

    @property
    def has_late(self) -> bool:
        """Whether this rank holds gradients that were not sent; see [Note: late gradients]."""
        return any(gradients.is_open for gradients in self.order)

    def reduce_late(self) -> None:
        """Send every unit once more. All ranks call it when one of them `has_late`."""
        for gradients in self.order:
            self._launch(gradients)
        self._drain(everything=True)

    @property
    def seen_order_hash(self) -> float:
        """Identifies the order in which units became ready in the last pass, for the step record."""
        return float(zlib.crc32("|".join(gradients.unit.name for gradients in self._seen).encode()))

    def adopt_seen_order(self) -> None:
        """Use the order of the last pass from now on; call it only when all ranks saw the same."""
        unseen = [gradients for gradients in self.order if gradients not in self._seen]
        self.order = [*self._seen, *unseen]

    def _launch(self, gradients: UnitGradients) -> None:
        is_whole = not gradients.unit.placement.grads_sharded and not gradients.is_reduced
        local = gradients.take_whole() if is_whole else gradients.take()
        self._flying.append(self._exchange(gradients, local, is_whole=is_whole))
        self._drain(everything=not self._overlap)

    def _exchange(self, gradients: UnitGradients, local: torch.Tensor, *, is_whole: bool) -> _Exchange:
        wire = local if self._before == 1.0 else local * self._before
        wire = wire if self._wire_dtype is None else wire.to(self._wire_dtype)
        exchange = self.start_exchange(wire, label=gradients.unit.name)
        self._ledger.add(Kind.REDUCE, exchange.extra_bytes)
        return _Exchange(gradients=gradients, local=local, wire=wire, exchange=exchange, is_whole=is_whole)

    def _drain(self, *, everything: bool) -> None:
        """Take in the oldest exchanges until the rest fits the bucket. Which ones depends on the units'
        order and sizes alone, so that gathers that follow (stage 0) have one order on all ranks."""
        numel = sum(exchange.local.numel() for exchange in self._flying)
        while self._flying and (everything or (numel > self._bucket_numel and len(self._flying) > 1)):
            exchange = self._flying.popleft()
            numel -= exchange.local.numel()
            self._take_in(exchange)
        if everything:
            for pending in self._gathers:
                pending.wait()
            self._gathers.clear()

    @torch.no_grad()
    def _take_in(self, exchange: _Exchange) -> None:
        """`own += mean (or sum) over ranks`, added in rank order in fp32, so that its bits do not depend on
        timing."""
        gradients = exchange.gradients
        exchange.exchange.wait()
        own, starts = own_part_to_write(gradients)
        accumulate_(own, exchange.exchange.parts(), self._after, overwrite=starts or exchange.is_whole)
        exchange.exchange.finish()
        self._ledger.add(Kind.REDUCE, -exchange.exchange.extra_bytes)
        gradients.release(exchange.local)
        if not gradients.unit.placement.states_sharded:
            label = gradients.unit.name
            self._gathers.append(self._comm.all_gather(gradients.accumulator, own, label=label))


@torch.no_grad()
def reduced_copy(reducer: Reducer, local: torch.Tensor, *, label: str) -> torch.Tensor:
    """What the step will make of a slice of replicated accumulators: the same additions in the same order
    on one node; on several the step adds node by node, and the last bits may differ.

    Collective. Called to show a gradient that is not reduced yet.
    """
    comm = reducer._comm
    if comm.world_size == 1:
        return local.clone()
    wire = local * reducer._before
    wire = wire if reducer._wire_dtype is None else wire.to(reducer._wire_dtype)
    total, received = torch.zeros_like(local), torch.empty_like(wire)
    for rank in range(comm.world_size):
        received.copy_(wire)
        comm.broadcast(received, label=label, source=rank)
        total.add_(received, alpha=reducer._after)
    return total
