"""Hierarchical reduction of gradients, optionally quantised (ZeRO++ qgZ, https://arxiv.org/abs/2306.10209).

A plain all-to-all sends every rank's gradients across node boundaries. Here the ranks of a node sum theirs
first, and only that sum crosses: the bytes are divided by the number of ranks per node. If quantised, both
hops carry int4 codes, decoded and summed in fp32 in between, so errors do not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.memory import unfilled
from zerotrain.runtime.comm.subgroup import SubGroup
from zerotrain.runtime.comm.sums import accumulate_
from zerotrain.runtime.comm.timing import Exchange, Pending
from zerotrain.runtime.zero.buffer import flat_zeros
from zerotrain.runtime.zero.quantize import INT4, Quantizer


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

    def __init__(self, comm: Comm, *, quantizer: Quantizer | None = INT4) -> None:
        """Make the groups. `quantizer` None sends without quantisation. Collective."""
        self._hops = NodeHops(comm)
        self._quantizer = quantizer

    def start(self, sent: torch.Tensor, *, label: str) -> Exchange:
        """Start an exchange like `Comm.start_exchange`; `label` identifies the unit."""
        within, across = self._hops.within, self._hops.across
        # Part (node, place) of the flat buffer is sent to that place first, then to that node.
        by_place = sent.view(across.world_size, within.world_size, -1).transpose(0, 1)
        packer = self._quantizer
        buffers: _HopBuffers = _PlainBuffers(by_place) if packer is None else _PackedBuffers(by_place, packer)
        first = within.all_to_all(buffers.received_first, buffers.sent_first, label=label)
        second: list[Pending] = []

        @torch.no_grad()
        def start_second() -> None:
            first.wait()
            buffers.prepare_second_hop()
            if across.world_size > 1:
                second.append(across.all_to_all(buffers.received_second, buffers.sent_second, label=label))

        started = Pending(start_second)

        def wait() -> None:
            started.wait()
            for pending in second:
                pending.wait()

        return Exchange(Pending(wait), parts=buffers.parts, extra_bytes=buffers.num_bytes, first=started)

    def close(self) -> None:
        """Leave the groups."""
        self._hops.within.close()
        self._hops.across.close()


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
        self.sent_first = unfilled(numel, dtype, device)
        self.sent_first.view(by_place.shape).copy_(by_place)
        self.received_first = unfilled(numel, dtype, device)
        self._sum = unfilled(numel // places, torch.float32, device)
        second = numel // places if self._nodes > 1 else 0
        self.sent_second = unfilled(second, dtype, device)
        self.received_second = unfilled(second, dtype, device)
        self.num_bytes = _bytes_of(self, self._sum)

    def prepare_second_hop(self) -> None:
        accumulate_(self._sum, list(self.received_first.view(self._places, -1)), 1.0, overwrite=True)
        if self._nodes > 1:
            self.sent_second.copy_(self._sum)

    def parts(self) -> Sequence[torch.Tensor]:
        return list(self.received_second.view(self._nodes, -1)) if self._nodes > 1 else [self._sum]


class _PackedBuffers:
    """Buffers of quantised codes."""

    def __init__(self, by_place: torch.Tensor, quantizer: Quantizer) -> None:
        self._places, self._nodes, self._numel = by_place.shape
        self._quantizer = quantizer
        device, chunk = by_place.device, self._nodes * self._numel
        first = self._places * quantizer.packed_bytes(chunk)
        second = self._nodes * quantizer.packed_bytes(self._numel) if self._nodes > 1 else 0
        self.sent_first = flat_zeros(first, dtype=torch.uint8, device=device)
        self.received_first = unfilled(first, torch.uint8, device)
        self.sent_second = flat_zeros(second, dtype=torch.uint8, device=device)
        self.received_second = unfilled(second, torch.uint8, device)
        self._sum = unfilled(chunk, torch.float32, device)
        self._decoded = unfilled(chunk, torch.float32, device)
        self.num_bytes = _bytes_of(self, self._sum, self._decoded)
        quantizer.pack(by_place, self.sent_first)

    def prepare_second_hop(self) -> None:
        self._quantizer.unpack_sum(self.received_first.view(self._places, -1), self._sum, self._decoded)
        if self._nodes > 1:
            self._quantizer.pack(self._sum.view(self._nodes, -1), self.sent_second)

    def parts(self) -> Sequence[torch.Tensor]:
        if self._nodes == 1:
            return [self._sum]
        parts = self._decoded.view(self._nodes, -1)
        self._quantizer.unpack(self.received_second, parts)
        return list(parts)


def _bytes_of(buffers: _HopBuffers, *more: torch.Tensor) -> int:
    hops = (buffers.sent_first, buffers.received_first, buffers.sent_second, buffers.received_second)
    return sum(buffer.nbytes for buffer in (*hops, *more))
