"""What is free in the cluster while one round of `capacity.admit` is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from zerotrain.operator.reconcile.claims import Claim, Demand, NodeUse
from zerotrain.operator.reconcile.domains import by_domain, domain_of, even_room, room_for
from zerotrain.operator.reconcile.placement import Kind, Node, is_suitable, short_of, slots
from zerotrain.operator.reconcile.unplaced import Unplaced, Wish
from zerotrain.operator.resources.amounts import Amounts, add, subtract, times


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """Where a kind may run, and how much room is there."""

    suitable: Mapping[str, int]
    """Node -> slots that are free and not kept."""
    short: Mapping[str, int]
    """Resource -> on how many suitable nodes not even one worker's amount is free."""
    unsuitable: int
    room: int
    domain: str | None = None


class Ledger:
    """The amounts that are free while one round is decided."""

    def __init__(self, nodes: Sequence[NodeUse]) -> None:
        self._nodes = {use.node.name: use for use in nodes}
        self._taken: dict[str, dict[str, dict[int, Amounts]]] = {}
        """Node -> UID -> priority -> amounts of claims that were let in."""
        self.kept: set[str] = set()
        """Nodes that a blocked job waits for."""
        self._unplaced = Unplaced()
        self._wishes: dict[tuple[object, ...], Wish] = {}
        self._looks: dict[tuple[object, ...], tuple[Mapping[str, int], Mapping[str, int]]] = {}
        self._holders = {uid for use in nodes for uid in use.ours}
        """Jobs to which some of the amounts that are not free belong."""
        self._suitable: dict[str, tuple[NodeUse, ...]] = {}
        self._idle: dict[tuple[str, int | None], dict[str, int]] = {}

    def area(self, claim: Claim) -> Area:
        open_slots, short = self._look(claim)
        domain, room = room_for(self._nodes, claim.demand, open_slots)
        return Area(
            suitable=open_slots,
            short=short,
            unsuitable=len(self._nodes) - len(open_slots),
            room=room,
            domain=domain,
        )

    def _look(self, claim: Claim) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Slots of each suitable node, and how many of these lack what. Once for all jobs that ask for the
        same while nobody is let in: those that wait are many at times."""
        kind, preempts = claim.demand.kind, claim.demand.priority if claim.demand.preempts else None
        key = repr(kind), preempts, self._own(claim)
        if (known := self._looks.get(key)) is not None:
            return known
        free = {use.node.name: self._free(use, claim) for use in self._suitable_for(kind)}
        found = {name: 0 if name in self.kept else slots(kind, amounts) for name, amounts in free.items()}
        short = Counter(name for amounts in free.values() for name in short_of(kind, amounts))
        self._looks[key] = found, short
        return found, short

    def _own(self, claim: Claim) -> str:
        """Its UID where that makes a difference to what is free, empty elsewhere."""
        return claim.uid if claim.uid in self._holders else ""

    def possible(self, claim: Claim) -> int:
        """Workers that fit when no training job runs: what lasts stays, unless they may push it aside."""
        _, room = room_for(self._nodes, claim.demand, self._idle_slots(claim.demand))
        return room

    def is_sure(self, claim: Claim, domain: str | None) -> bool:
        """Whether this job and all before it find their room wherever the scheduler puts their pods."""
        return not self._unplaced or self._unplaced.fits(self._wish(claim, domain), claim.demand.workers)

    def let_in(self, claim: Claim, domain: str | None = None, *, beside_own: bool = False) -> None:
        """`beside_own`: the workers are the rest of an attempt whose bound ones stay where they are."""
        if not claim.growing:
            wish = self._wish(claim, domain, beside_own=beside_own)
            self._unplaced.add(wish, claim.demand.workers)
        self._take(claim, domain, beside_own=beside_own)

    def _wish(self, claim: Claim, domain: str | None, *, beside_own: bool = False) -> Wish:
        demand, where = claim.demand, dict[str, int]()
        key = (repr(replace(demand, workers=0)), domain, len(self.kept), self._own(claim), beside_own)
        if (known := self._wishes.get(key)) is not None:
            return known
        for use in self._suitable_for(demand.kind):
            if use.node.name in self.kept or (domain is not None and domain_of(use, demand) != domain):
                continue
            free = self._free(use, claim, beside_own=beside_own, beside_unplaced=False)
            if count := slots(demand.kind, free):
                where[use.node.name] = count
        apart = demand.spread and demand.topology_key is not None
        room, domains = sum(where.values()), Counter[str]()
        if apart:
            found = by_domain(self._nodes, demand, where)
            suitable = (use.node.name for use in self._suitable_for(demand.kind))
            domains = by_domain(self._nodes, demand, dict.fromkeys(suitable, 0))
            room = even_room(room, [found[name] for name in domains])
        self._wishes[key] = wish = Wish(
            key=key,
            kind=demand.kind,
            priority=demand.priority,
            preempts=demand.preempts,
            where=where,
            room=room,
            fragility=max(len(domains), 1),
        )
        return wish

    def _take(self, claim: Claim, domain: str | None, *, beside_own: bool) -> None:
        """Count the workers as if they were bound, fullest node first, so that whole nodes stay free."""
        workers = claim.demand.workers
        demand, found = claim.demand, []
        for use in self._suitable_for(demand.kind):
            if use.node.name in self.kept or (domain is not None and domain_of(use, demand) != domain):
                continue
            count = slots(demand.kind, self._free(use, claim, beside_own=beside_own))
            if count:
                found.append((count, use.node.name))
        self._looks.clear()
        self._holders.add(claim.uid)
        for count, name in sorted(found):
            held = self._taken.setdefault(name, {}).setdefault(claim.uid, {})
            used = held.setdefault(demand.priority, {})
            add(used, times(demand.kind.each, min(count, workers)))
            workers -= count
            if workers <= 0:
                return

    def keep(self, claim: Claim) -> frozenset[str]:
        """Set aside the nodes that will hold the demand once they have drained: the emptiest ones."""
        demand, idle = claim.demand, self._idle_slots(claim.demand)
        domain = self._emptiest_domain(claim, idle)
        ranked = []
        for use in self._suitable_for(demand.kind):
            name = use.node.name
            if name in self.kept or not idle[name] or domain not in (None, domain_of(use, demand)):
                continue
            free = self._free(use, claim)
            ranked.append((-slots(demand.kind, free), -_free_share(demand.kind, free, use.node), name))
        missing, chosen = demand.workers, set[str]()
        for _, _, name in sorted(ranked):
            if missing <= 0:
                break
            chosen.add(name)
            missing -= idle[name]
        self.set_aside(chosen)
        return frozenset(chosen)

    def set_aside(self, nodes: Iterable[str]) -> None:
        """From now on they are nobody's but those of the jobs before."""
        self.kept.update(nodes)
        self._looks.clear()

    def _suitable_for(self, kind: Kind) -> tuple[NodeUse, ...]:
        key = repr(kind)
        found = self._suitable.get(key)
        if found is None:
            found = tuple(use for use in self._nodes.values() if is_suitable(kind, use.node))
            self._suitable[key] = found
        return found

    def _free(
        self, use: NodeUse, claim: Claim, *, beside_own: bool = False, beside_unplaced: bool = True
    ) -> Amounts:
        demand, free = claim.demand, dict(use.node.allocatable)
        taken = self._taken.get(use.node.name, {}) if beside_unplaced else {}
        others = [
            parts
            for held in (use.ours, taken)
            for uid, parts in held.items()
            if beside_own or uid != claim.uid
        ]
        for parts in (use.lasting, *others):
            for priority, amounts in parts.items():
                if not (demand.preempts and priority < demand.priority):
                    subtract(free, amounts)
        return free

    def _idle_slots(self, demand: Demand) -> Mapping[str, int]:
        """Once for all jobs that ask for the same: those that can never start are many at times."""
        key = repr(demand.kind), demand.priority if demand.preempts else None
        found = self._idle.get(key)
        if found is None:
            found = self._idle[key] = {}
            for use in self._suitable_for(demand.kind):
                free = dict(use.node.allocatable)
                for priority, amounts in use.lasting.items():
                    if not (demand.preempts and priority < demand.priority):
                        subtract(free, amounts)
                found[use.node.name] = slots(demand.kind, free)
        return found

    def _emptiest_domain(self, claim: Claim, idle: Mapping[str, int]) -> str | None:
        demand = claim.demand
        if demand.topology_key is None or demand.spread:
            return None
        now = by_domain(self._nodes, demand, self.area(claim).suitable)
        possible = by_domain(self._nodes, demand, idle)
        fitting = [domain for domain, room in possible.items() if room >= demand.workers]
        return max(fitting, key=lambda domain: (now[domain], domain), default=None)


def _free_share(kind: Kind, free: Mapping[str, int], node: Node) -> float:
    """Of the scarcest resource that the kind requests."""
    return min((free.get(name, 0) / max(node.allocatable.get(name, 0), 1) for name in kind.each), default=0.0)
