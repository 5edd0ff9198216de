"""Sums gradients over the ranks, in one canonical order of units that is the same on every rank.

[Note: canonical order] Ranks may finish units in different orders, or not use some at all (an expert without
tokens, a branch not taken). Collectives must match, so within a backward pass every trainable unit is reduced
exactly once and in an agreed order: a unit that is ready early waits for those before it, and at the end of
backward the rest follow, with zeros if there was no gradient. The order is the reverse of the layout until
all ranks have seen the same other order in one whole backward pass (according to the step record).

[Note: late gradients] A gradient that arrives after its unit was sent (a parameter used outside of its
module, a second backward pass of a step that was reduced already) stays in the unit's buffer. It is sent with
the unit's next reduction. If there is none before the step boundary, the step record shows all ranks that one
of them has such gradients, and all units are sent once more.

[Note: reductions beside backward] On a GPU, exchanges are started, waited for and summed on a stream of their
own, and the second hop of a hierarchical exchange follows the first there: none of it holds up backward,
which waits for all of it once, at the end of the pass. It waits earlier only to free what a unit sent, when
the exchanges in flight exceed the bucket. A CPU has no such stream, and waits for an exchange where it sums.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.streams import SideStream
from zerotrain.runtime.comm.timing import Exchange, Pending
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.options import CoreOptions


@dataclass(slots=True)
class _Exchange:
    gradients: UnitGradients
    local: torch.Tensor
    wire: torch.Tensor
    """Gradients as they are sent: `local` or its cast; both stay alive until the exchange is over."""
    exchange: Exchange
    is_whole: bool
    """Whether `local` is the replicated accumulator itself."""
    sent: Any = None
    """Event of the stream of reductions after which `local` and `wire` may be freed."""


class Reducer:
    """All gradient traffic of one engine."""

    def __init__(
        self,
        comm: Comm,
        ledger: MemoryLedger,
        options: CoreOptions,
        *,
        start_exchange: Callable[..., Exchange],
        keeps_local: Callable[[], bool],
    ) -> None:
        """`start_exchange` starts an exchange of gradients, as `Comm.start_exchange`; `keeps_local`: see
        `EngineCallbacks`. Gradients are divided by `options.predivision` before they are sent and by the rest
        after the sum.

        With `options.overlap`, finished units of up to `options.reduce_bucket_numel` elements together (but
        not more than the largest unit has, and at least one unit) are in flight while backward runs.
        """
        self._comm = comm
        self._ledger = ledger
        self._wire_dtype = TORCH_DTYPES[options.wire_dtype] if options.wire_dtype else None
        self._overlap = options.overlap
        self._bucket_limit = options.reduce_bucket_numel
        self._before = 1.0 / options.predivision
        self._after = options.predivision / (comm.world_size if options.averages else 1)
        self.start_exchange, self.keeps_local = start_exchange, keeps_local
        self.side = SideStream(comm.device, comm.stopwatch, is_needed=comm.world_size > 1)
        """Stream of the reductions; see [Note: reductions beside backward]."""
        self._flying: deque[_Exchange] = deque()
        self._gathers: list[Pending] = []
        self._seen: dict[UnitGradients, None] = {}  # ordered set: the order in which units became ready
        self._next = 0
        self.replace([])

    def replace(self, gradients: list[UnitGradients]) -> None:
        """Use these gradients, in layout order, from now on. Not during a pass."""
        self.order = list(reversed(gradients))
        """Order in which units are sent; the same on every rank."""
        self._seen.clear()
        self._is_sharded = any(part.unit.placement.grads_sharded for part in gradients)
        self._sums_own_part = any(part.unit.placement.sums_own_part for part in gradients)
        for part in gradients:
            part.fence = self.side.join
        layouts = [part.unit.layout for part in gradients]
        largest = max((layout.padded_numel for layout in layouts if layout.module), default=0)
        self._bucket_numel = min(self._bucket_limit, largest)
        self._sends = self._is_sharded
        """Whether units are sent during the current pass; otherwise stages 0 and 1 only accumulate."""

    @property
    def reduces_early(self) -> bool:
        """Whether units of stages 0 and 1 are sent as soon as they are complete."""
        is_wanted = self._overlap or self._sums_own_part
        return is_wanted and self._comm.world_size > 1 and not self.keeps_local()

    def begin(self, *, at_boundary: bool) -> None:
        """Begin a backward pass; `at_boundary`: no other micro-batch follows before the step."""
        self._seen.clear()
        self._next = 0
        self._sends = self._is_sharded or (at_boundary and self.reduces_early)

    def ready(self, gradients: UnitGradients) -> None:
        """Record that this unit's gradients of the pass are complete, and send what the order allows."""
        if not self._sends:
            gradients.fold()
            return
        # A second use after it was sent changes nothing here; see [Note: late gradients].
        self._seen.setdefault(gradients)
        while self._next < len(self.order) and self.order[self._next] in self._seen:
            self._launch(self.order[self._next])
            self._next += 1

    def finish(self) -> None:
        """End the pass: send the remaining units and wait for all exchanges."""
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
            self.side.join()

    def reduce_replicated(self) -> None:
        """Sum and average, at the step boundary, what stages 0 and 1 accumulated locally."""
        if not self._is_sharded and self._comm.world_size > 1 and not self.keeps_local():
            for gradients in self.order:
                if not gradients.is_reduced:
                    self._launch(gradients)
                    self._drain(everything=True)
            self.side.join()

    @property
    def has_late(self) -> bool:
        """Whether this rank holds gradients that were not sent; see [Note: late gradients]."""
        return any(gradients.is_open for gradients in self.order)

    def reduce_late(self) -> None:
        """Send every unit once more. All ranks call it if one of them `has_late`."""
        for gradients in self.order:
            self._launch(gradients)
        self._drain(everything=True)
        self.side.join()

    @property
    def seen_order_hash(self) -> float:
        """Hash of the order in which units became ready in the last pass, for the step record."""
        return float(zlib.crc32("|".join(gradients.unit.name for gradients in self._seen).encode()))

    def adopt_seen_order(self) -> None:
        """Use the order of the last pass from now on; call it only if all ranks saw the same."""
        unseen = [gradients for gradients in self.order if gradients not in self._seen]
        self.order = [*self._seen, *unseen]

    def _launch(self, gradients: UnitGradients) -> None:
        is_whole = not gradients.unit.placement.grads_sharded and not gradients.is_reduced
        local = gradients.take_whole() if is_whole else gradients.take()
        self._flying.append(self._exchange(gradients, local, is_whole=is_whole))
        self._drain(everything=not self._overlap)
        if self._flying and self.side.is_apart:
            # After the second hop of the unit before, as that arrives first.
            self._advance(self._flying[-1])

    def _exchange(self, gradients: UnitGradients, local: torch.Tensor, *, is_whole: bool) -> _Exchange:
        wire = local if self._before == 1.0 else local * self._before
        wire = wire if self._wire_dtype is None else wire.to(self._wire_dtype)
        gradients.sum.prepare()
        with self.side.running(after=self.side.mark()):
            exchange = self.start_exchange(wire, label=gradients.unit.name)
        self._ledger.add(MemoryKind.REDUCE, exchange.extra_bytes)
        return _Exchange(gradients=gradients, local=local, wire=wire, exchange=exchange, is_whole=is_whole)

    @torch.no_grad()
    def _advance(self, exchange: _Exchange) -> None:
        """Let the stream of reductions go on to the exchange's last hop."""
        with self.side.running():
            exchange.exchange.advance()
            exchange.sent = self.side.mark()

    def _drain(self, *, everything: bool) -> None:
        """Finish the oldest exchanges until the rest fits the bucket.

        The choice depends only on the units' order and sizes, so that gathers that follow (stage 0) have one
        order on all ranks.
        """
        numel = sum(exchange.local.numel() for exchange in self._flying)
        while self._flying and (everything or (numel > self._bucket_numel and len(self._flying) > 1)):
            exchange = self._flying.popleft()
            numel -= exchange.local.numel()
            self._take_in(exchange)
        if everything:
            with self.side.running():
                for pending in self._gathers:
                    pending.wait()
            self._gathers.clear()

    @torch.no_grad()
    def _take_in(self, exchange: _Exchange) -> None:
        """Compute `own += mean (or sum) over ranks`, added in rank order in fp32, so that its bits do not
        depend on timing."""
        gradients, handle = exchange.gradients, exchange.exchange
        if exchange.sent is None:
            self._advance(exchange)
        with self.side.running():
            handle.wait()
            gradients.add_parts(handle.parts(), self._after, overwrite=exchange.is_whole)
            handle.finish()
            if not gradients.unit.placement.states_sharded:
                whole, own, label = gradients.accumulator, gradients.own_part, gradients.unit.name
                self._gathers.append(self._comm.all_gather(whole, own, label=label))
        self.side.wait_for(exchange.sent)
        self._ledger.add(MemoryKind.REDUCE, -handle.extra_bytes)
        gradients.release(exchange.local)

    @torch.no_grad()
    def copy_reduced(self, local: torch.Tensor, *, label: str) -> torch.Tensor:
        """Return what the step will compute from a slice of replicated accumulators.

        The additions and their order are the same on one node; with several nodes the step adds node by node,
        and the last bits may differ. Collective. Called to show a gradient that is not reduced yet.
        """
        comm = self._comm
        if comm.world_size == 1:
            return local.clone()
        wire = local * self._before
        wire = wire if self._wire_dtype is None else wire.to(self._wire_dtype)
        total, received = torch.zeros_like(local, dtype=torch.float32), torch.empty_like(wire)
        for rank in range(comm.world_size):
            received.copy_(wire)
            comm.broadcast(received, label=label, source=rank)
            total.add_(received, alpha=self._after)
        return total.to(local.dtype)
