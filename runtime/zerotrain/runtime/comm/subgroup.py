"""Collectives among some of the ranks, for traffic within and between nodes; used by ZeRO++."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zerotrain.runtime.comm.group import Comm, nccl_options, without_other_ranks
from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.comm.work import FLAT_ALL_GATHER, sendable


class SubGroup:
    """Group of this rank, out of several groups that together hold all ranks."""

    def __init__(self, comm: Comm, groups: Sequence[Sequence[int]]) -> None:
        """Make all groups. Collective over all ranks, which pass the groups in the same order."""
        self._comm = comm
        self.ranks: tuple[int, ...] = ()
        self._group: Any = None
        for members in groups:
            is_member = comm.rank in members
            made = _make([comm.global_ranks[rank] for rank in members], comm, is_member=is_member)
            if is_member:
                self.ranks, self._group = tuple(members), made
        if self._group is not None:
            comm.subgroups.append(self._group)
        nodes = comm.nodes
        here = comm.rank // nodes.ranks_per_node
        node_of = [rank // nodes.ranks_per_node for rank in self.ranks]
        self._outside = sum(node != here for node in node_of)
        self._other_nodes = len(set(node_of) - {here})

    @property
    def rank(self) -> int:
        """Rank of this process within the group."""
        return self.ranks.index(self._comm.rank)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str) -> Pending:
        """Start `Comm.all_gather` within the group."""
        if self._group is None:
            full.copy_(shard)
            return Pending.done()
        whole, part = sendable(full), sendable(shard)
        work = self._comm.issue(FLAT_ALL_GATHER, whole, part, group=self._group, async_op=True)
        return self._comm.account(
            "all_gather", label, shard.nbytes, work, receivers=self.world_size - 1, crossing=self._other_nodes
        )

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, *, label: str) -> Pending:
        """Send part i of `sent` to rank i of the group; `received` gets the parts in the group's order."""
        if self._group is None:
            received.copy_(sent)
            return Pending.done()
        work = self._comm.issue(dist.all_to_all_single, received, sent, group=self._group, async_op=True)
        bytes_each = sent.nbytes // self.world_size
        return self._comm.account(
            "reduce_scatter",
            label,
            bytes_each,
            work,
            receivers=self.world_size - 1,
            crossing=self._outside,
        )

    def close(self) -> None:
        """Leave the group, unless it is kept for the life of the process."""
        group, self._group = self._group, None
        if group is None:
            return
        self._comm.subgroups.remove(group)
        if group not in _LASTING.values() and dist.is_initialized():
            dist.destroy_process_group(group)


def _make(global_ranks: list[int], comm: Comm, *, is_member: bool) -> Any:
    """Make a process group; None for one rank.

    All ranks of the job call this, or only the members if the engine has a part of the job's ranks. Without a
    timeout torch would use its own, on NCCL 10 minutes.
    """
    if len(global_ranks) == 1:
        return None
    options = nccl_options(dist.get_backend(), comm.timeout)
    make = partial(dist.new_group, global_ranks, timeout=comm.timeout, pg_options=options)
    if comm.world_size == dist.get_world_size():
        return make()
    if not is_member:
        return None
    key = tuple(global_ranks)
    if key not in _LASTING:
        with without_other_ranks():
            _LASTING[key] = make(use_local_synchronization=True)
    return _LASTING[key]


_LASTING: dict[tuple[int, ...], Any] = {}
"""Groups that only their members made, by global ranks, kept for the life of the process. torch names such a
group after its ranks and the number of groups that exist, so a later group would find the addresses of a
destroyed one."""
