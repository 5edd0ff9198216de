"""The all-to-all of parts whose sizes differ, which `orthogonal.py` needs: a matrix lies on few ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.timing import Pending

_OP = "reduce_scatter"
"""Name under which it is counted, as every all-to-all."""


def exchange_parts(
    comm: Comm,
    received: torch.Tensor,
    sent: torch.Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    *,
    label: str,
) -> Pending:
    """Start the all-to-all of 1-D tensors; the sizes are in elements, by rank. Ranks of one host send, too:
    they share no buffers of such sizes."""
    if comm.world_size == 1:
        received.copy_(sent)
        return Pending.done()
    work = comm.issue(
        dist.all_to_all_single,
        received,
        sent,
        list(received_sizes),
        list(sent_sizes),
        group=comm.group,
        async_op=True,
    )
    _count(comm, [size * sent.element_size() for size in sent_sizes])
    # The hash of the sequence must be the same on every rank, so it takes no sizes.
    return comm.account(_OP, label, 0, work)


def _count(comm: Comm, sizes: Sequence[int]) -> None:
    """Count the bytes that go to each rank."""
    node = comm.rank // comm.nodes.ranks_per_node
    for rank, num_bytes in enumerate(sizes):
        if rank != comm.rank:
            comm.bytes_sent[_OP] += num_bytes
        if rank // comm.nodes.ranks_per_node != node:
            comm.cross_node_bytes[_OP] += num_bytes
