"""Mapping of ranks to nodes, and counts of what crosses node boundaries; used by `group.py` and by ZeRO++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMap:
    """Nodes of a group. Consecutive ranks share a node, as launchers number them."""

    world_size: int
    ranks_per_node: int

    @classmethod
    def of(cls, global_ranks: Sequence[int], *, local_world_size: int) -> NodeMap:
        """Map a group with these ranks of the job, of which `local_world_size` share a node (0 = all).

        The result is one node unless every node has an equal, contiguous run of ranks.
        """
        world_size = len(global_ranks)
        nodes = [rank // local_world_size if local_world_size > 0 else 0 for rank in global_ranks]
        size = nodes.count(nodes[0])
        runs = [nodes[first : first + size] for first in range(0, world_size, size)]
        even = all(len(set(run)) == 1 and len(run) == size for run in runs)
        fits = even and len(runs) == len(set(nodes))
        return cls(world_size=world_size, ranks_per_node=size if fits else world_size)

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def outside(self) -> int:
        """Number of ranks on other nodes."""
        return self.world_size - self.ranks_per_node
