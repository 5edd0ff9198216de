"""Whoever is let in finds room for all workers, wherever and in whatever order the pods of all get nodes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.operator.test_reconcile_capacity import amounts, claim, node
from zerotrain.operator.reconcile.capacity import admit
from zerotrain.operator.reconcile.claims import Claim, NodeUse, Verdict
from zerotrain.operator.reconcile.placement import Kind, is_suitable

GPU = "nvidia.com/gpu"
Places = tuple[tuple[int, ...], ...]
"""By job and node: workers that are bound."""


@dataclass
class Scheduler:
    """Every order of binding of the jobs' pods, one after the other, as kube-scheduler's filters allow it."""

    nodes: Sequence[NodeUse]
    jobs: Sequence[tuple[Claim, Verdict]]
    seen: set[Places] = field(default_factory=set)

    def dead_end(self) -> Places | None:
        """Where pods without a node are left and none of them fits any more."""
        start: Places = tuple((0,) * len(self.nodes) for _ in self.jobs)
        left = [start]
        while left:
            places = left.pop()
            if places in self.seen:
                continue
            self.seen.add(places)
            following = list(self.steps(places))
            left += following
            bound = [sum(row) for row in places]
            if not following and bound != [item.demand.workers for item, _ in self.jobs]:
                return places
        return None

    def steps(self, places: Places) -> Iterator[Places]:
        for number, (item, _) in enumerate(self.jobs):
            if sum(places[number]) == item.demand.workers:
                continue
            for spot in range(len(self.nodes)):
                if self.may_bind(places, number, spot):
                    row = list(places[number])
                    row[spot] += 1
                    yield (*places[:number], tuple(row), *places[number + 1 :])

    def may_bind(self, places: Places, number: int, spot: int) -> bool:
        item, _ = self.jobs[number]
        if not self.is_open(number, spot):
            return False
        use = self.nodes[spot]
        free = use.node.allocatable[GPU] - sum(part[0][GPU] for part in use.ours.values())
        for (other, _), row in zip(self.jobs, places, strict=True):
            free -= row[spot] * other.demand.kind.each[GPU]
        if free < item.demand.kind.each[GPU]:
            return False
        if not item.demand.spread:
            return True
        zones = Counter[str]()
        for place, count in enumerate(places[number]):
            if self.is_open(number, place) and "zone" in self.nodes[place].node.labels:
                zones[self.nodes[place].node.labels["zone"]] += count
        zone = use.node.labels.get("zone")
        return zone is not None and zones[zone] == min(zones.values())

    def is_open(self, number: int, spot: int) -> bool:
        item, verdict = self.jobs[number]
        found = self.nodes[spot].node
        if verdict.domain is not None and found.labels.get("zone") != verdict.domain:
            return False
        return is_suitable(item.demand.kind, found) and found.name not in verdict.avoid


def some_cluster(dice: random.Random) -> list[NodeUse]:
    nodes = []
    for index in range(dice.randint(2, 5)):
        labels = {"pool": dice.choice("xy"), "zone": dice.choice("ab")}
        if dice.random() < 0.1:
            del labels["zone"]
        gpus = dice.choice([1, 1, 2, 2, 3])
        nodes.append(node(f"n{index}", gpus, labels=labels, used=dice.choice([0, 0, 0, 1])))
    return nodes


def some_job(dice: random.Random, name: str, *, colocate: bool) -> Claim:
    where = dice.choice([{}, {}, {"pool": "x"}, {"pool": "y"}])
    topology = dice.choice(["none", "spread", "spread", "together" if colocate else "none"])
    policy: dict[str, Any] = (
        {} if topology == "none" else {"topology_key": "zone", "spread": topology == "spread"}
    )
    kind = Kind(each=amounts(dice.choice([1, 1, 1, 2])), node_selector=where)
    return claim(name, dice.randint(1, 4), kind=kind, age=dice.randint(0, 9), **policy)


def let_in(
    nodes: Sequence[NodeUse], claims: Sequence[Claim], starting: Sequence[Claim] = ()
) -> list[tuple[Claim, Verdict]]:
    verdicts = admit(nodes, claims, starting)
    return [(item, verdicts[item.uid]) for item in claims if verdicts[item.uid].admitted]


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_binding_leaves_a_job_without_its_room(seed: int) -> None:
    """Over two readings, with the jobs of the first one not bound yet in the second."""
    dice, together, spread = random.Random(seed), 0, 0
    for _ in range(150):
        nodes, two_rounds = some_cluster(dice), dice.random() < 0.5
        claims = [some_job(dice, f"j{number}", colocate=not two_rounds) for number in range(3)]
        if dice.random() < 0.4:  # two of a kind
            claims[1] = claim("j1", dice.randint(1, 3), age=dice.randint(0, 9), **kind_and_policy(claims[0]))
        admitted = let_in(nodes, claims[:2] if two_rounds else claims)
        # What is kept for others is another matter: the second reading cannot know it of pods without nodes.
        if two_rounds and not any(verdict.avoid for _, verdict in admitted):
            admitted += let_in(nodes, claims[2:], [item for item, _ in admitted])
        dead = Scheduler(nodes, admitted).dead_end()
        assert dead is None, (nodes, admitted, dead)
        together += len(admitted) > 1
        spread += len(admitted) > 1 and any(item.demand.spread for item, _ in admitted)
    assert together > 20, "they were let in one by one"
    assert spread > 10, "nobody that spreads was let in beside another"


SPREAD: dict[str, Any] = {"topology_key": "zone", "spread": True}


def kind_and_policy(item: Claim) -> dict[str, Any]:
    demand = item.demand
    return {"kind": demand.kind, "topology_key": demand.topology_key, "spread": demand.spread}


@pytest.mark.parametrize(
    ("rooms", "sizes", "want"),
    [
        ((6, 6), (4, 4), 2),
        ((6, 5), (4, 4), 1),
        ((2, 1), (2, 1), 1),
        ((5, 4), (1, 4), 2),
        ((3, 3), (1, 4), 1),
    ],
)
def test_two_that_spread_need_room_beside_each_other(
    rooms: tuple[int, int], sizes: tuple[int, int], want: int
) -> None:
    """Each worker counts as one that takes a slot in the tighter zone from the other job, and so two."""
    nodes = [node(zone, room, labels={"zone": zone}) for zone, room in zip("ab", rooms, strict=True)]
    jobs = [claim(f"j{age}", size, 1, age=-age, **SPREAD) for age, size in enumerate(sizes)]
    assert len(let_in(nodes, jobs)) == want


def test_a_promise_holds_beside_one_that_cannot_be_kept() -> None:
    """Two of a kind whose pods have no nodes yet: the small one may lose its room to the large one, which
    still must not lose its own to a third."""
    nodes = [node(zone, 3, labels={"zone": zone}) for zone in "ab"]
    starting = [claim("small", 1, 1, **SPREAD), claim("large", 4, 1, **SPREAD)]
    third = claim("third", 1, 1)
    assert let_in(nodes, [third], starting) == []
    everybody = [(item, Verdict(admitted=True, workers=0)) for item in (*starting, third)]
    assert Scheduler(nodes, everybody).dead_end() is not None, "it could have started"
