"""Hierarchical reduction of gradients, optionally quantised (ZeRO++ qgZ, https://arxiv.org/abs/2306.10209).

A plain all-to-all sends every rank's gradients across node boundaries. Here the ranks of a node sum theirs
first, and only that sum crosses: the bytes are divided by the number of ranks per node. If quantised, both
hops carry int4 codes, decoded and summed in fp32 in between, so errors do not grow with the number of ranks.

With error feedback (LoCo, https://arxiv.org/abs/2407.04480) the rounding error of a hop is kept and added to
what the next reduction of the unit sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zerotrain.contract.config import ConfigError
from zerotrain.runtime.comm.exchange import Exchange
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.subgroup import SubGroup
from zerotrain.runtime.comm.sums import accumulate_
from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.zero.buffer import flat_zeros
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.quantize import INT4, Quantizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorFeedback:
    """Settings of `zeropp_loco_param`."""

    err_beta: float = 0.8
    """Fraction of the old error that is kept."""
    reset_every: int = 1024
    """Number of reductions of a unit after which its errors are reset to zero."""

    @classmethod
    def read(cls, values: Mapping[str, float]) -> ErrorFeedback:
        """Read the configuration's object. Raises ConfigError for an unknown entry or one that is out of
        range."""
        path = "zero_optimization.zeropp_loco_param"
        known = {"err_beta": 0.8, "reset_T": 1024}
        for name in values.keys() - known.keys():
            raise ConfigError(f"{path}.{name}", "is not known", values[name], "Use err_beta and reset_T.")
        beta, reset = (float({**known, **values}[name]) for name in known)
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"{path}.err_beta", "must be within 0 and 1", beta, "DeepSpeed takes 0.8.")
        return cls(err_beta=beta, reset_every=int(reset))


class NodeHops:
    """Groups of the two hops: the ranks of this node, and the ranks with this one's position on each node."""

    def __init__(self, comm: Comm) -> None:
        """Make the groups. Collective."""
        ranks, size = range(comm.world_size), comm.nodes.ranks_per_node
        if size == 1:  # no ranks of one node to sum first
            size = comm.world_size
        self.within = SubGroup(comm, [ranks[first : first + size] for first in ranks[::size]])
        self.across = SubGroup(comm, [ranks[place::size] for place in range(size)])


class HierarchicalReduction:
    """Starts exchanges in place of `Comm.start_exchange`; parts are one per node instead of one per rank."""

    def __init__(
        self,
        comm: Comm,
        ledger: MemoryLedger,
        *,
        quantizer: Quantizer | None = INT4,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        """Make the groups. `quantizer` None sends without quantisation. Collective."""
        self._hops = NodeHops(comm)
        self._ledger = ledger
        self._quantizer = quantizer
        self._feedback = feedback
        self._errors: dict[str, _Errors] = {}

    def start(self, sent: torch.Tensor, *, label: str) -> Exchange:
        """Start an exchange like `Comm.start_exchange`; `label` identifies the unit."""
        within, across = self._hops.within, self._hops.across
        # Part (node, place) of the flat buffer is sent to that place first, then to that node.
        by_place = sent.view(across.world_size, within.world_size, -1).transpose(0, 1)
        errors = self._errors_of(label, by_place)
        packer = self._quantizer
        buffers: _HopBuffers = (
            _PlainBuffers(by_place) if packer is None else _PackedBuffers(by_place, packer, errors)
        )
        first = within.all_to_all(buffers.received_first, buffers.sent_first, label=label)

        def wait() -> None:
            first.wait()
            buffers.prepare_second_hop()
            if across.world_size > 1:
                across.all_to_all(buffers.received_second, buffers.sent_second, label=label).wait()

        return Exchange(Pending(wait), parts=buffers.parts, finish=_nothing, extra_bytes=buffers.num_bytes)

    def close(self) -> None:
        """Leave the groups."""
        self._hops.within.close()
        self._hops.across.close()

    def _errors_of(self, label: str, by_place: torch.Tensor) -> _Errors | None:
        if self._feedback is None:
            return None
        found = self._errors.get(label)
        if found is None or found.first.numel() != by_place.numel():
            if found is not None:  # the unit has a new layout
                self._ledger.add(MemoryKind.GRADS, -found.first.nbytes - found.second.nbytes)
            found = self._errors[label] = _Errors(by_place, self._feedback, self._ledger)
        found.count()
        return found


class _Errors:
    """Rounding errors of one unit's gradients so far, per hop; fp32."""

    def __init__(self, by_place: torch.Tensor, feedback: ErrorFeedback, ledger: MemoryLedger) -> None:
        numel, device = by_place.numel(), by_place.device
        self.first = flat_zeros(numel, dtype=torch.float32, device=device)
        self.second = flat_zeros(numel // len(by_place), dtype=torch.float32, device=device)
        ledger.count(MemoryKind.GRADS, self.first)
        ledger.count(MemoryKind.GRADS, self.second)
        self.beta = feedback.err_beta
        self._reset_every = feedback.reset_every
        self._num_reductions = 0

    def count(self) -> None:
        """Count a reduction of the unit that begins, and reset the errors when due."""
        if self._reset_every and self._num_reductions and self._num_reductions % self._reset_every == 0:
            self.first.zero_()
            self.second.zero_()
        self._num_reductions += 1


class _HopBuffers(Protocol):
    """Buffers of one reduction. `prepare_second_hop` sums what the first hop received and
    fills the second hop's buffer."""

    sent_first: torch.Tensor
    received_first: torch.Tensor
    sent_second: torch.Tensor
    received_second: torch.Tensor
    num_bytes: int

    def prepare_second_hop(self) -> None: ...

    def parts(self) -> Sequence[torch.Tensor]:
        """Return the parts after both hops, one per node."""
        ...


class _PlainBuffers:
    """Buffers in the gradients' own dtype; the sum of a node is rounded to it once."""

    def __init__(self, by_place: torch.Tensor) -> None:
        places, self._nodes, _ = by_place.shape
        numel, dtype, device = by_place.numel(), by_place.dtype, by_place.device
        self._places = places
        self.sent_first = flat_zeros(numel, dtype=dtype, device=device)
        self.sent_first.view(by_place.shape).copy_(by_place)
        self.received_first = flat_zeros(numel, dtype=dtype, device=device)
        self._sum = flat_zeros(numel // places, dtype=torch.float32, device=device)
        second = numel // places if self._nodes > 1 else 0
        self.sent_second = flat_zeros(second, dtype=dtype, device=device)
        self.received_second = flat_zeros(second, dtype=dtype, device=device)
        self.num_bytes = _bytes_of(self, self._sum)

    def prepare_second_hop(self) -> None:
        accumulate_(self._sum, list(self.received_first.view(self._places, -1)), 1.0, overwrite=True)
        if self._nodes > 1:
            self.sent_second.copy_(self._sum)

    def parts(self) -> Sequence[torch.Tensor]:
        return list(self.received_second.view(self._nodes, -1)) if self._nodes > 1 else [self._sum]


class _PackedBuffers:
    """Buffers of quantised codes."""

    def __init__(self, by_place: torch.Tensor, quantizer: Quantizer, errors: _Errors | None) -> None:
        self._places, self._nodes, self._numel = by_place.shape
        self._quantizer, self._errors = quantizer, errors
        device, chunk = by_place.device, self._nodes * self._numel
        first = self._places * quantizer.packed_bytes(chunk)
        second = self._nodes * quantizer.packed_bytes(self._numel) if self._nodes > 1 else 0
        self.sent_first = flat_zeros(first, dtype=torch.uint8, device=device)
        self.received_first = flat_zeros(first, dtype=torch.uint8, device=device)
        self.sent_second = flat_zeros(second, dtype=torch.uint8, device=device)
        self.received_second = flat_zeros(second, dtype=torch.uint8, device=device)
        self._sum = flat_zeros(chunk, dtype=torch.float32, device=device)
        self._decoded = flat_zeros(chunk, dtype=torch.float32, device=device)
        self.num_bytes = _bytes_of(self, self._sum, self._decoded)
        self._pack(by_place, self.sent_first, None if errors is None else errors.first)

    def prepare_second_hop(self) -> None:
        self._sum.zero_()
        for packed in self.received_first.view(self._places, -1):
            self._quantizer.unpack(packed, self._decoded)
            self._sum.add_(self._decoded)
        if self._nodes > 1:
            error = None if self._errors is None else self._errors.second
            self._pack(self._sum.view(self._nodes, -1), self.sent_second, error)

    def parts(self) -> Sequence[torch.Tensor]:
        if self._nodes == 1:
            return [self._sum]
        parts = list(self._decoded.view(self._nodes, -1))
        for packed, part in zip(self.received_second.view(self._nodes, -1), parts, strict=True):
            self._quantizer.unpack(packed, part)
        return parts

    def _pack(self, rows: torch.Tensor, into: torch.Tensor, error: torch.Tensor | None) -> None:
        """Quantise every row separately, as each goes to another rank."""
        beta = 0.0 if self._errors is None else self._errors.beta
        errors = [None] * len(rows) if error is None else error.view(len(rows), -1)
        for row, packed, one in zip(rows, into.view(len(rows), -1), errors, strict=True):
            self._quantizer.pack(row.reshape(-1), packed, error=one, beta=beta)


def _bytes_of(buffers: _HopBuffers, *more: torch.Tensor) -> int:
    hops = (buffers.sent_first, buffers.received_first, buffers.sent_second, buffers.received_second)
    return sum(buffer.nbytes for buffer in (*hops, *more))


def _nothing() -> None:
    pass
