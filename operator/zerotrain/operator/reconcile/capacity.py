"""All or nothing without a scheduler's help: which of the waiting jobs may create their pods now.

`cluster.capacity` reads nodes and pods while a job waits and asks `admit`. Pure: the same cluster and the
same claims give the same verdicts.

Order: priority, then age. A job that fits starts. One that does not fit *keeps* the nodes that it will need,
the emptiest ones, so that smaller jobs behind it cannot take what becomes free there, and it starts at the
latest when these nodes have drained; jobs behind it may use all other nodes and are told to avoid the kept
ones. A job that the cluster could not hold if it were idle keeps nothing and holds nobody up; where it could
a moment ago, it keeps its nodes for a while: a node that is away for a minute must not cost it its turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from zerotrain.operator.reconcile.placement import Kind, Node, is_suitable, short_of, slots
from zerotrain.operator.reconcile.unplaced import Unplaced, Wish
from zerotrain.operator.resources.amounts import Amounts, add, subtract, times

MAX_AVOIDED = 64
"""Longest list of nodes that a pod is told to avoid; a job behind a larger kept area waits instead."""

MAX_BLOCKED = 64
"""Waiting jobs that nodes are kept for in one round; the others wait behind them."""

UNSURE = "there may be room for all workers once the pods of jobs that were just let in have nodes"

KEEP_S = 300.0
"""So long a job keeps its nodes after the cluster became too small for it: a restart of a kubelet, a cordon
for maintenance or a reboot takes minutes, and what drained meanwhile would be lost to smaller jobs."""

MAX_IMPOSSIBLE = 16
"""Jobs of one namespace that even an idle cluster could not hold and that are told in detail why."""


VERDICT_AGE_S = 30.0
"""Older words on the cluster's room are not acted upon, unless the reader says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The workers of one attempt."""

    workers: int
    kind: Kind
    priority: int = 0
    preempts: bool = False
    """Whether the scheduler may evict pods of lower priority for them."""
    topology_key: str | None = None
    spread: bool = False
    """Over the values of the key, evenly; all on one value otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A job that waits, or one whose pods have no nodes yet."""

    uid: str
    name: str
    """namespace/name, for messages."""
    created: datetime
    demand: Demand
    growing: bool = False
    """It runs already and asks how large it could be; it keeps nothing and waits for nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The nodes that a waiting job keeps."""

    nodes: frozenset[str]
    demand: Demand
    """What they are kept for; another demand has no right to them."""
    until: datetime
    """Even if the cluster is too small for the job meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the job may start, and what it should know."""

    admitted: bool
    workers: int
    """How many were asked for."""
    fits: int = 0
    """Workers that the cluster could hold now; the job's own pods count as their places."""
    counted: bool = True
    """False where nodes and pods may not be read: the rest then says who may start, and nothing of room."""
    at: datetime | None = None
    """When the cluster was read; the reader fills it in."""
    good_for_s: float = VERDICT_AGE_S
    """How long the word is worth acting upon; a reader that reads more seldom stands by it for longer."""
    domain: str | None = None
    """Value of the topology key that all workers go to."""
    avoid: tuple[str, ...] = ()
    """Nodes that are kept for jobs ahead."""
    message: str = ""
    keeps: Kept | None = field(default=None, compare=False)
    """For the next round; no news to the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUse:
    """One node and what its pods request."""

    node: Node
    lasting: Mapping[int, Amounts] = field(default_factory=dict)
    """By priority: pods that are not ours, of which nobody knows when they end."""
    ours: Mapping[str, Mapping[int, Amounts]] = field(default_factory=dict)
    """By UID of the job and priority: workers of training jobs, which end."""


_EPOCH = datetime.fromtimestamp(0, UTC)


def admit(
    nodes: Sequence[NodeUse],
    waiting: Iterable[Claim],
    starting: Iterable[Claim] = (),
    *,
    kept: Mapping[str, Kept] | None = None,
    now: datetime = _EPOCH,
) -> dict[str, Verdict]:
    """Verdicts by UID for `waiting`. `starting` were let in before and have first call on what is free;
    `kept` is what the verdicts of the round before said (`keeps`), by UID."""
    ledger = _Ledger(nodes)
    for claim in starting:
        ledger.let_in(claim, beside_own=True)
    verdicts: dict[str, Verdict] = {}
    blocked: list[Claim] = []
    impossible: Counter[str] = Counter()
    for claim in sorted(waiting, key=_order):
        if len(blocked) >= MAX_BLOCKED:
            verdicts[claim.uid] = _refused(claim, 0, f"waits behind {len(blocked)} other jobs")
            continue
        possible = ledger.possible(claim)
        before = _still_kept(claim, possible, (kept or {}).get(claim.uid), now)
        if possible < claim.demand.workers and not claim.growing and before is None:
            impossible[_namespace(claim)] += 1
            if impossible[_namespace(claim)] > MAX_IMPOSSIBLE:
                verdicts[claim.uid] = _refused(claim, 0, _without_others(possible, claim.demand))
                continue
        verdict = _judge(ledger, claim, blocked, possible)
        if not verdict.admitted and not claim.growing:
            verdict = _keep(ledger, claim, verdict, before, now if possible >= claim.demand.workers else None)
        if verdict.keeps is not None:
            blocked.append(claim)
        verdicts[claim.uid] = verdict
    return verdicts


def _still_kept(claim: Claim, possible: int, before: Kept | None, now: datetime) -> Kept | None:
    """What a job keeps although the cluster is too small for it now."""
    if before is None or possible >= claim.demand.workers or claim.growing:
        return None
    return before if now < before.until and before.demand == claim.demand else None


def _keep(
    ledger: _Ledger, claim: Claim, verdict: Verdict, before: Kept | None, since: datetime | None
) -> Verdict:
    """`since`: now, where the cluster could hold the job."""
    if before is not None:
        ledger.kept |= before.nodes
        until = f"its nodes stay kept until {before.until:%H:%M:%S} UTC"
        return replace(verdict, message=f"{verdict.message}; {until}", keeps=before)
    if since is None:
        return verdict
    kept = Kept(nodes=ledger.keep(claim), demand=claim.demand, until=since + timedelta(seconds=KEEP_S))
    return replace(verdict, keeps=kept)


def _namespace(claim: Claim) -> str:
    return claim.name.partition("/")[0]


def _refused(claim: Claim, fits: int, message: str) -> Verdict:
    return Verdict(admitted=False, workers=claim.demand.workers, fits=fits, message=message)


def _without_others(possible: int, demand: Demand) -> str:
    return f"without other training jobs it would hold {possible} of {demand.workers}"


def _order(claim: Claim) -> tuple[bool, int, datetime, str]:
    # Whoever has nothing comes before whoever wants more.
    return claim.growing, -claim.demand.priority, claim.created, claim.uid


def _judge(ledger: _Ledger, claim: Claim, blocked: Sequence[Claim], possible: int) -> Verdict:
    demand = claim.demand
    area = ledger.area(claim)
    # A pod can be told to avoid a few nodes, not half a cluster: beyond that, those ahead go first.
    kept = tuple(sorted(name for name in area.suitable if name in ledger.kept))
    fits = min(area.room, demand.workers) if len(kept) <= MAX_AVOIDED else 0
    if fits >= demand.workers:
        if not claim.growing and not ledger.is_sure(claim, area.domain):
            return _refused(claim, fits, UNSURE)
        ledger.let_in(claim, area.domain)
        return Verdict(admitted=True, workers=demand.workers, fits=fits, domain=area.domain, avoid=kept)
    message = _shortage(demand, area, fits, kept=len(kept), ahead=[item.name for item in blocked])
    if possible < demand.workers:
        message += f"; without other training jobs it would hold {possible}"
    return _refused(claim, fits, message)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Area:
    """Where a kind may run, and how much room is there."""

    suitable: Mapping[str, int]
    """Node -> slots that are free and not kept."""
    short: Mapping[str, int]
    """Resource -> on how many suitable nodes not even one worker's amount is free."""
    unsuitable: int
    room: int
    domain: str | None = None


class _Ledger:
    """The amounts that are free while one round is decided."""

    def __init__(self, nodes: Sequence[NodeUse]) -> None:
        self._nodes = {use.node.name: use for use in nodes}
        self._taken: dict[str, dict[int, Amounts]] = {}
        """Node -> priority -> amounts of claims that were let in."""
        self.kept: set[str] = set()
        """Nodes that a blocked job waits for."""
        self._unplaced = Unplaced()
        self._wishes: dict[tuple[object, ...], Wish] = {}
        self._bound = {uid for use in nodes for uid in use.ours}
        self._suitable: dict[str, tuple[NodeUse, ...]] = {}
        self._idle: dict[tuple[str, int | None], dict[str, int]] = {}

    def area(self, claim: Claim) -> _Area:
        kind, suitable = claim.demand.kind, self._suitable_for(claim.demand.kind)
        free = {use.node.name: self._free(use, claim) for use in suitable}
        open_slots = {
            name: 0 if name in self.kept else slots(kind, amounts) for name, amounts in free.items()
        }
        domain, room = self._room(claim.demand, open_slots)
        return _Area(
            suitable=open_slots,
            short=Counter(name for amounts in free.values() for name in short_of(kind, amounts)),
            unsuitable=len(self._nodes) - len(suitable),
            room=room,
            domain=domain,
        )

    def possible(self, claim: Claim) -> int:
        """Workers that fit when no training job runs: what lasts stays, unless they may push it aside."""
        _, room = self._room(claim.demand, self._idle_slots(claim.demand))
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
        own = claim.uid if claim.uid in self._bound else ""
        key = (repr(replace(demand, workers=0)), domain, len(self.kept), own, beside_own)
        if (known := self._wishes.get(key)) is not None:
            return known
        for use in self._suitable_for(demand.kind):
            if use.node.name in self.kept or (domain is not None and _domain(use, demand) != domain):
                continue
            free = self._free(use, claim, beside_own=beside_own, beside_unplaced=False)
            if count := slots(demand.kind, free):
                where[use.node.name] = count
        apart = demand.spread and demand.topology_key is not None
        domains = self._by_domain(demand, self._open(demand)) if apart else Counter[str]()
        room = sum(where.values())
        if apart:
            found = self._by_domain(demand, where)
            room = _even_room(room, [found[name] for name in domains])
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

    def _open(self, demand: Demand) -> dict[str, int]:
        return {use.node.name: 0 for use in self._suitable_for(demand.kind)}

    def _take(self, claim: Claim, domain: str | None, *, beside_own: bool) -> None:
        """Count the workers as if they were bound, fullest node first, so that whole nodes stay free."""
        workers = claim.demand.workers
        demand, found = claim.demand, []
        for use in self._suitable_for(demand.kind):
            if use.node.name in self.kept or (domain is not None and _domain(use, demand) != domain):
                continue
            count = slots(demand.kind, self._free(use, claim, beside_own=beside_own))
            if count:
                found.append((count, use.node.name))
        for count, name in sorted(found):
            used = self._taken.setdefault(name, {}).setdefault(demand.priority, {})
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
            if name in self.kept or not idle[name] or domain not in (None, _domain(use, demand)):
                continue
            free = self._free(use, claim)
            ranked.append((-slots(demand.kind, free), -_free_share(demand.kind, free, use.node), name))
        missing, chosen = demand.workers, set[str]()
        for _, _, name in sorted(ranked):
            if missing <= 0:
                break
            chosen.add(name)
            missing -= idle[name]
        self.kept |= chosen
        return frozenset(chosen)

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
        others = [parts for uid, parts in use.ours.items() if beside_own or uid != claim.uid]
        taken = self._taken.get(use.node.name, {}) if beside_unplaced else {}
        for parts in (use.lasting, taken, *others):
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

    def _room(self, demand: Demand, open_slots: Mapping[str, int]) -> tuple[str | None, int]:
        if demand.topology_key is None:
            return None, sum(open_slots.values())
        domains = self._by_domain(demand, open_slots)
        if demand.spread:
            return None, _even_room(demand.workers, list(domains.values()))
        # The tightest domain that holds all leaves the larger ones to larger jobs.
        fitting = [(room, domain) for domain, room in domains.items() if room >= demand.workers]
        if fitting:
            room, domain = min(fitting)
            return domain, room
        return None, max(domains.values(), default=0)

    def _emptiest_domain(self, claim: Claim, idle: Mapping[str, int]) -> str | None:
        demand = claim.demand
        if demand.topology_key is None or demand.spread:
            return None
        now = self._by_domain(demand, self.area(claim).suitable)
        possible = self._by_domain(demand, idle)
        fitting = [domain for domain, room in possible.items() if room >= demand.workers]
        return max(fitting, key=lambda domain: (now[domain], domain), default=None)

    def _by_domain(self, demand: Demand, open_slots: Mapping[str, int]) -> Counter[str]:
        """Nodes without the key belong to no domain."""
        found: Counter[str] = Counter()
        for name, count in open_slots.items():
            domain = _domain(self._nodes[name], demand)
            if domain is not None:
                found[domain] += count
        return found


def _domain(use: NodeUse, demand: Demand) -> str | None:
    return use.node.labels.get(demand.topology_key or "")


def _free_share(kind: Kind, free: Mapping[str, int], node: Node) -> float:
    """Of the scarcest resource that the kind requests."""
    return min((free.get(name, 0) / max(node.allocatable.get(name, 0), 1) for name in kind.each), default=0.0)


def _even_room(workers: int, rooms: Sequence[int]) -> int:
    """The largest number up to `workers` that spreads over all domains with a difference of at most one."""
    if not rooms:
        return 0
    least = min(rooms)
    more = sum(1 for room in rooms if room > least)
    return min(workers, least * len(rooms) + more)


def _shortage(demand: Demand, area: _Area, room: int, *, kept: int, ahead: Sequence[str]) -> str:
    """`room for 1 of 4 workers: nvidia.com/gpu is missing on 3 of 5 suitable nodes`."""
    parts = [f"room for {room} of {demand.workers} workers"]
    suitable = len(area.suitable)
    if not suitable:
        parts.append(f"none of {area.unsuitable} nodes matches the selectors and taints")
    for name, nodes in sorted(area.short.items()):
        parts.append(f"{name} is missing on {nodes} of {suitable} suitable nodes")
    if demand.topology_key is not None and suitable:
        together = "spread evenly over" if demand.spread else "within one value of"
        parts.append(f"the workers must be {together} {demand.topology_key}")
    if kept and ahead:
        parts.append(f"{kept} suitable nodes are kept for {len(ahead)} jobs ahead (first {ahead[0]})")
    return "; ".join(parts)
