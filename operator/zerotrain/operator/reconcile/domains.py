"""Room in terms of a topology key: workers that share one value of it, or spread evenly over all.

`slots` are workers that each suitable node has room for, by its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from zerotrain.operator.reconcile.claims import Demand, NodeUse

Nodes = Mapping[str, NodeUse]


def room_for(nodes: Nodes, demand: Demand, slots: Mapping[str, int]) -> tuple[str | None, int]:
    """The value that all workers should go to, where they share one, and how many have room."""
    if demand.topology_key is None:
        return None, sum(slots.values())
    domains = by_domain(nodes, demand, slots)
    if demand.spread:
        return None, even_room(demand.workers, list(domains.values()))
    # The tightest domain that holds all leaves the larger ones to larger jobs.
    fitting = [(room, domain) for domain, room in domains.items() if room >= demand.workers]
    if fitting:
        room, domain = min(fitting)
        return domain, room
    return None, max(domains.values(), default=0)


def by_domain(nodes: Nodes, demand: Demand, slots: Mapping[str, int]) -> Counter[str]:
    """Slots by value of the key. Nodes without the key belong to no domain."""
    found: Counter[str] = Counter()
    for name, count in slots.items():
        domain = domain_of(nodes[name], demand)
        if domain is not None:
            found[domain] += count
    return found


def domain_of(use: NodeUse, demand: Demand) -> str | None:
    return use.node.labels.get(demand.topology_key or "")


def even_room(workers: int, rooms: Sequence[int]) -> int:
    """The largest number up to `workers` that spreads over all domains with a difference of at most one."""
    if not rooms:
        return 0
    least = min(rooms)
    more = sum(1 for room in rooms if room > least)
    return min(workers, least * len(rooms) + more)
