"""Room for all workers at once: which jobs start, which wait for what, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from zerotrain.operator.reconcile.capacity import KEEP_S, MAX_AVOIDED, MAX_BLOCKED, admit
from zerotrain.operator.reconcile.claims import Claim, Demand, Kept, NodeUse, Verdict
from zerotrain.operator.reconcile.placement import Kind, is_suitable, kind_of, node_of
from zerotrain.operator.resources.amounts import MILLI, PODS, Amounts, at_least, requests_of, resource_list

GPU = "nvidia.com/gpu"
HUGE = "hugepages-2Mi"
START = datetime(2026, 1, 1, tzinfo=UTC)
ZONE = "topology.kubernetes.io/zone"


def amounts(gpus: int, cpu: int = 0, pods: int = 1) -> Amounts:
    wanted = {GPU: gpus * MILLI, "cpu": cpu * MILLI, PODS: pods * MILLI}
    return {name: amount for name, amount in wanted.items() if amount}


def node(name: str, gpus: int = 8, *, cpu: int = 64, used: int = 0, lasting: int = 0, **more: Any) -> NodeUse:
    """`used` GPUs by a training job, `lasting` ones by a pod that stays."""
    item = {
        "metadata": {"name": name, "labels": more.get("labels", {})},
        "spec": {"taints": more.get("taints", []), "unschedulable": more.get("cordoned", False)},
        "status": {"allocatable": {GPU: str(gpus), "cpu": str(cpu), PODS: "110"}},
    }
    return NodeUse(
        node=node_of(item),
        ours={"running": {0: amounts(used)}} if used else {},
        lasting={0: amounts(lasting)} if lasting else {},
    )


def claim(
    name: str, workers: int, gpus: int = 8, *, age: int = 0, growing: bool = False, **demand: Any
) -> Claim:
    """Older with `age`."""
    kind = demand.pop("kind", None) or Kind(each=amounts(gpus))
    return Claim(
        uid=name,
        name=f"ml/{name}",
        created=START - timedelta(seconds=age),
        demand=Demand(workers=workers, kind=kind, **demand),
        growing=growing,
    )


def let_in(verdicts: Mapping[str, Verdict]) -> set[str]:
    return {uid for uid, verdict in verdicts.items() if verdict.admitted}


TWO = [node("a"), node("b")]
IN_ZONES = [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
CASES: list[tuple[str, list[NodeUse], list[Claim], set[str]]] = [
    ("fits", TWO, [claim("j", 2)], {"j"}),
    ("all-or-nothing", TWO, [claim("j", 3)], set()),
    ("two-share-what-is-there", TWO, [claim("i", 1), claim("j", 1)], {"i", "j"}),
    ("several-workers-a-node", TWO, [claim("j", 4, 4)], {"j"}),
    ("a-worker-is-not-split", [node("a", used=4), node("b", used=4)], [claim("j", 1, 8)], set()),
    ("older-first", TWO, [claim("young", 2), claim("old", 2, age=9)], {"old"}),
    ("priority-first", TWO, [claim("old", 2, age=9), claim("high", 2, priority=5)], {"high"}),
    ("waits-for-what-is-kept", [*TWO, node("c", used=8)], [claim("big", 3, age=9), claim("small", 1)], set()),
    (
        "behind-past-what-is-kept",
        [node("a", used=8, labels={"x": "y"}), node("b"), node("c")],
        [claim("big", 1, kind=Kind(each=amounts(8), node_selector={"x": "y"}), age=9), claim("small", 2)],
        {"small"},
    ),
    ("impossible-keeps-nothing", TWO, [claim("never", 5, age=9), claim("small", 2)], {"small"}),
    ("lasting-pods-stay", [node("a", lasting=1), node("b")], [claim("j", 2, age=9), claim("k", 1)], {"k"}),
    ("cpu-counts", [node("a", cpu=4)], [claim("j", 1, kind=Kind(each=amounts(1, cpu=5)))], set()),
    ("cordoned", [node("a", cordoned=True), node("b")], [claim("j", 2)], set()),
    (
        "not-beside-pods-that-may-go-to-its-node",
        [node("a", used=4), node("b")],
        [claim("small", 1, 4, age=9), claim("big", 1, 8)],
        {"small"},
    ),
    (
        "not-where-its-pods-may-take-the-node-of-another",
        [node("a", used=4), node("b")],
        [claim("big", 1, 8, age=9), claim("small", 1, 4)],
        {"big"},
    ),
    (
        "beside-pods-that-cannot-take-its-node",
        [node("a", used=4, labels={"x": "y"}), node("b", labels={"x": "z"})],
        [
            claim("small", 1, kind=Kind(each=amounts(4), node_selector={"x": "y"}), age=9),
            claim("big", 1, kind=Kind(each=amounts(8), node_selector={"x": "z"})),
        ],
        {"small", "big"},
    ),
    (
        "beside-pods-where-there-is-room-for-all-in-any-order",
        [*TWO, node("c", used=4)],
        [claim("small", 1, 4, age=9), claim("big", 1, 8)],
        {"small", "big"},
    ),
    (
        "spread-beside-pods-that-may-fill-one-zone",
        [node("a", labels={"zone": "1"}), node("b", labels={"zone": "2"}), node("c", used=4)],
        [claim("small", 1, 4, age=9), claim("big", 2, 8, topology_key="zone", spread=True)],
        {"small"},
    ),
    (
        "spread-beside-pods-that-go-to-other-nodes",
        [node(f"{zone}{index}", labels={"zone": zone}) for zone in "ab" for index in range(2)]
        + [node("c", labels={"x": "y"})],
        [
            claim("small", 1, kind=Kind(each=amounts(8), node_selector={"x": "y"}), age=9),
            claim("big", 4, kind=Kind(each=amounts(8), terms=IN_ZONES), topology_key="zone", spread=True),
        ],
        {"small", "big"},
    ),
    ("growing-comes-last", TWO, [claim("big", 2, age=9, growing=True), claim("new", 2)], {"new"}),
]


@pytest.mark.parametrize(("nodes", "claims", "want"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_who_starts(nodes: list[NodeUse], claims: list[Claim], want: set[str]) -> None:
    assert let_in(admit(nodes, claims)) == want


def test_the_order_of_asking_means_nothing() -> None:
    claims = [claim("a", 1, age=3), claim("b", 2, age=2), claim("c", 1, age=1)]
    assert admit(TWO, claims) == admit(list(reversed(TWO)), list(reversed(claims)))


def test_jobs_that_were_let_in_keep_their_room_until_their_pods_have_nodes() -> None:
    assert let_in(admit(TWO, [claim("j", 2)], [claim("started", 1)])) == set()


@pytest.mark.parametrize("free", ["n0", "n2"])
def test_a_job_that_is_half_bound_keeps_room_for_its_rest(free: str) -> None:
    """Whatever the nodes are called: its own bound worker does not make room for the other one."""
    nodes = [replace(node("n1"), ours={"half": {0: amounts(8)}}), node(free)]
    assert let_in(admit(nodes, [claim("late", 1)], [claim("half", 1)])) == set()
    assert let_in(admit([*nodes, node("n3")], [claim("late", 1)], [claim("half", 1)])) == {"late"}


def test_lower_priority_is_room_for_a_class_that_preempts() -> None:
    full = [node("a", used=8), node("b", used=8)]
    assert let_in(admit(full, [claim("high", 2, priority=5, preempts=True)])) == {"high"}
    assert let_in(admit(full, [claim("high", 2, priority=5, preempts=False)])) == set()


def test_a_job_is_told_what_is_missing_and_on_how_many_nodes() -> None:
    nodes = [node("a", used=8), node("b", used=1), node("c"), node("d", taints=[TAINT])]
    message = admit(nodes, [claim("j", 3)])["j"].message
    assert message == "room for 1 of 3 workers; nvidia.com/gpu is missing on 2 of 3 suitable nodes"
    nodes = [node("a", lasting=8), node("b")]
    assert "without other training jobs it would hold 1" in admit(nodes, [claim("j", 2)])["j"].message
    nowhere = admit([node("a", taints=[TAINT])], [claim("j", 1)])["j"].message
    assert "none of 1 nodes matches the selectors and taints" in nowhere


def test_a_job_that_passes_another_avoids_the_nodes_that_are_kept_for_it() -> None:
    nodes = [node("a", used=4), node("b", used=4), node("c", gpus=4)]
    verdicts = admit(nodes, [claim("big", 2, 8, age=9), claim("small", 1, 4)])
    assert let_in(verdicts) == {"small"}
    assert verdicts["small"].avoid == ("a", "b")


def test_a_kept_area_too_large_to_avoid_is_waited_for() -> None:
    busy = [node(f"n{index:03}", used=4) for index in range(MAX_AVOIDED + 1)]
    verdicts = admit([*busy, node("free", gpus=4)], [claim("big", len(busy), age=9), claim("small", 1, 4)])
    assert let_in(verdicts) == set()
    assert "kept for 1 jobs ahead (first ml/big)" in verdicts["small"].message


def test_how_large_a_running_job_could_be() -> None:
    nodes = [node("a", used=8), node("b"), node("c", lasting=8)]
    verdict = admit(nodes, [replace(claim("running", 3, growing=True), uid="running")])["running"]
    assert (verdict.admitted, verdict.fits) == (False, 2)


def test_jobs_that_can_never_fit_hold_nobody_up() -> None:
    """However many there are, of one tenant or of several."""
    impossible = [
        replace(claim(f"imp{number:03}", 1, gpus=16, age=1000 - number), name=f"ns{number % 2}/imp")
        for number in range(3 * MAX_BLOCKED)
    ]
    verdicts = admit([node("a"), node("b")], [*impossible, claim("small", 2)])
    assert verdicts["small"].admitted
    assert verdicts["small"].avoid == ()
    told = [verdicts[item.uid].message for item in impossible]
    assert all("it would hold 0" in message for message in told)
    assert all("is missing on 2 of 2 suitable nodes" in message for message in told)


def test_how_many_workers_would_fit_is_told_behind_any_number_of_impossible_jobs() -> None:
    """One that may be smaller becomes so by that number."""
    impossible = [claim(f"imp{number}", 9, age=9) for number in range(100)]
    verdict = admit([node(name) for name in "abcd"], [*impossible, claim("elastic", 8)])["elastic"]
    assert (verdict.admitted, verdict.fits) == (False, 4)


def test_who_waits_for_others_is_not_told_that_nodes_are_missing() -> None:
    """Behind as many as nodes are kept for, and behind more kept nodes than a pod can avoid."""
    blocked = [claim(f"big{number:03}", 2, age=9) for number in range(MAX_BLOCKED)]
    busy = [node(f"n{number:03}", used=1) for number in range(2 * MAX_BLOCKED)]
    assert admit(busy, [*blocked, claim("last", 1, 4)])["last"].fits is None
    verdicts = admit(busy, [claim("big", 2 * MAX_BLOCKED, age=9), claim("last", 1, 4)])
    assert verdicts["last"].fits is None


def test_a_job_whose_pods_have_no_nodes_yet_is_told_of_their_room() -> None:
    """The pods that it asks for are the ones that stand in line, and a larger job ahead takes none of it."""
    nodes = [node(f"n{index}") for index in range(6)]
    verdict = admit(nodes, [claim("begun", 4)], [claim("begun", 4)])["begun"]
    assert (verdict.admitted, verdict.fits) == (True, 4)
    ahead = claim("big", 6, priority=9)
    verdicts = admit(nodes, [ahead, claim("begun", 4)], [claim("begun", 3)])
    assert verdicts["begun"].fits == 4
    assert (verdicts["big"].fits, verdicts["big"].keeps is not None) == (3, True)
    assert verdicts["begun"].keeps is None
    verdict = admit(nodes[:3], [claim("begun", 4)], [claim("begun", 4), claim("other", 1)])["begun"]
    assert (verdict.admitted, verdict.fits, verdict.keeps) == (False, 3, None)


def test_what_lasts_counts_only_where_it_cannot_be_pushed_aside() -> None:
    lasting = {5: amounts(8)}
    nodes = [replace(node("a"), lasting=lasting), replace(node("b"), ours={"x": {9: amounts(8)}})]
    pushing, meek = claim("p", 2, priority=7, preempts=True, age=2), claim("m", 2, priority=7, age=1)
    assert "it would hold 1" in admit(nodes, [meek])["m"].message
    assert "it would hold" not in admit(nodes, [pushing])["p"].message


class Simulation:
    """A cluster of 8-GPU nodes: jobs that start are placed where they may, and end after their time."""

    def __init__(self, num_nodes: int) -> None:
        self.names = [f"n{index}" for index in range(num_nodes)]
        self.running: dict[str, tuple[int, dict[str, int]]] = {}
        """UID -> when it ends, and its GPUs by node."""
        self.cordoned: str | None = None

    def nodes(self) -> list[NodeUse]:
        used = dict.fromkeys(self.names, 0)
        for _, places in self.running.values():
            for name, gpus in places.items():
                used[name] += gpus
        return [node(name, used=gpus, cordoned=name == self.cordoned) for name, gpus in used.items()]

    def start(self, item: Claim, verdict: Verdict, *, until: int) -> None:
        """On the emptiest nodes, as a scheduler that knows nothing of what is kept would."""
        each = item.demand.kind.each[GPU] // MILLI
        places: dict[str, int] = {}
        for _ in range(item.demand.workers):
            used = {use.node.name: sum(part[0][GPU] for part in use.ours.values()) for use in self.nodes()}
            free = {
                name: 8 - gpus // MILLI - places.get(name, 0)
                for name, gpus in used.items()
                if name not in (*verdict.avoid, self.cordoned)
            }
            best = max(free, key=lambda name: (free[name], name))
            assert free[best] >= each, "a job was let in that does not fit"
            places[best] = places.get(best, 0) + each
        self.running[item.uid] = (until, places)


@pytest.mark.parametrize("num_workers", [1, 3, 4])
@pytest.mark.parametrize("flaps_every", [0, 4, 7])
def test_a_large_job_is_not_starved_by_an_endless_stream_of_small_ones(
    num_workers: int, flaps_every: int
) -> None:
    """Nor where a node is away for a moment again and again, as with kubelets that are restarted in turn."""
    cluster, waiting = Simulation(4), {"big": claim("big", num_workers, 8, age=-3)}
    started: dict[str, int] = {}
    kept: dict[str, Kept] = {}
    for tick in range(60):
        cluster.running = {uid: item for uid, item in cluster.running.items() if item[0] > tick}
        cluster.cordoned = f"n{tick % 4}" if flaps_every and tick % flaps_every == 0 else None
        for index in range(3):  # more than the cluster can ever work off
            uid = f"small-{tick}-{index}"
            waiting[uid] = claim(uid, 1, 4, age=-tick)
        now = START + tick * timedelta(seconds=5)
        verdicts = admit(cluster.nodes(), list(waiting.values()), kept=kept, now=now)
        kept = {uid: verdict.keeps for uid, verdict in verdicts.items() if verdict.keeps is not None}
        for uid, verdict in verdicts.items():
            if verdict.admitted:
                cluster.start(waiting.pop(uid), verdict, until=tick + 5)
                started[uid] = tick
    assert "big" in started, "it waited for ever"
    # It came at tick 3, and what ran then ended within five ticks.
    assert started["big"] <= 3 + 2 * 5
    assert sum(1 for uid in started if uid.startswith("small")) > 40, "the small ones were locked out"


def test_what_was_kept_for_a_job_that_became_impossible_is_free_again_after_a_while() -> None:
    """At once for a job that asks for something else."""
    big, small = claim("big", 2, age=9), claim("small", 1)
    first = admit([node("a", used=8), node("b")], [big, small], now=START)
    assert let_in(first) == set()
    assert first["big"].keeps is not None
    kept, away = {"big": first["big"].keeps}, [node("a", cordoned=True), node("b")]
    for now, claims, want in (
        (START + timedelta(seconds=KEEP_S - 1), [big, small], set()),
        (START + timedelta(seconds=KEEP_S), [big, small], {"small"}),
        (START, [claim("big", 3, age=9), small], {"small"}),
    ):
        # What it was told before it became impossible counts, not what it keeps since then.
        between = admit(away, claims, kept=kept, now=START)
        still = {uid: verdict.keeps for uid, verdict in between.items() if verdict.keeps is not None}
        verdicts = admit(away, claims, kept=still, now=now)
        assert let_in(verdicts) == want
    assert "its nodes stay kept until 00:05:00 UTC" in admit(away, [big], kept=kept, now=START)["big"].message


SPREAD = {"topology_key": ZONE, "spread": True}
TOGETHER = {"topology_key": ZONE}


def zones(*rooms: int) -> list[NodeUse]:
    """One node per free worker, in zones z0, z1, ..."""
    return [
        node(f"z{zone}-{index}", labels={ZONE: f"z{zone}"})
        for zone, room in enumerate(rooms)
        for index in range(room)
    ]


@pytest.mark.parametrize(
    ("rooms", "workers", "policy", "domain", "fits"),
    [
        ((2, 3), 3, TOGETHER, "z1", True),
        ((3, 4), 3, TOGETHER, "z0", True),
        ((2, 2), 3, TOGETHER, None, False),
        ((2, 2), 4, SPREAD, None, True),
        ((1, 3), 3, SPREAD, None, True),
        ((1, 3), 4, SPREAD, None, False),
    ],
)
def test_topology(
    rooms: tuple[int, ...], workers: int, policy: dict[str, Any], domain: str | None, fits: bool
) -> None:
    verdict = admit(zones(*rooms), [claim("j", workers, **policy)])["j"]
    assert (verdict.admitted, verdict.domain) == (fits, domain)


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("kind", "suitable"),
    [
        ({}, False),
        ({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, True),
        ({"tolerations": [{"key": "gpu", "value": "yes"}]}, True),
        ({"tolerations": [{"key": "gpu", "value": "no"}]}, False),
        ({"tolerations": [{"operator": "Exists", "effect": "NoExecute"}]}, False),
        ({"tolerations": [{"operator": "Exists"}], "node_selector": {"disk": "nvme"}}, True),
        ({"tolerations": [{"operator": "Exists"}], "node_selector": {"disk": "hdd"}}, False),
        ({"tolerations": [{"operator": "Exists"}], "terms": []}, False),
    ],
)
def test_selectors_and_taints(kind: dict[str, Any], suitable: bool) -> None:
    use = node("a", labels={"disk": "nvme"}, taints=[TAINT])
    assert is_suitable(Kind(each={}, **kind), use.node) is suitable


@pytest.mark.parametrize(
    ("key", "operator", "values", "holds"),
    [
        ("disk", "In", ["ssd", "nvme"], True),
        ("disk", "NotIn", ["nvme"], False),
        ("none", "NotIn", ["nvme"], True),
        ("disk", "Exists", [], True),
        ("none", "DoesNotExist", [], True),
        ("size", "Gt", ["7"], True),
        ("size", "Lt", ["7"], False),
        ("disk", "Gt", ["7"], False),
    ],
)
def test_required_affinity(key: str, operator: str, values: list[str], holds: bool) -> None:
    terms = [{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]
    use = node("a", labels={"disk": "nvme", "size": "8"})
    assert is_suitable(Kind(each={}, terms=terms), use.node) is holds


def test_nodes_that_a_pod_is_kept_off_by_name() -> None:
    away = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["a"]}]}
    kind = Kind(each={}, terms=[away])
    assert [is_suitable(kind, use.node) for use in TWO] == [False, True]


def test_requests_are_counted_as_the_scheduler_counts_them() -> None:
    def container(name: str, restart: str | None = None, **requests: str) -> dict[str, Any]:
        return {"name": name, "resources": {"limits": requests}, "restartPolicy": restart}

    spec = {
        "containers": [container("worker", cpu="500m", memory="1Gi")],
        "initContainers": [
            container("before", cpu="3"),
            container("sidecar", "Always", cpu="250m", memory="1Gi"),
            container("after", cpu="1"),
        ],
        "overhead": {"cpu": "10m"},
    }
    assert resource_list(requests_of(spec)) == {"cpu": "3010m", "memory": str(2 * 2**30)}
    assert kind_of({"spec": spec}).each[PODS] == MILLI


@pytest.mark.parametrize(
    ("pod", "want"),
    [
        # The containers of the spec below ask for cpu 2, memory 1Gi, hugepages-2Mi 4Mi and a GPU.
        ({}, {"cpu": "2010m", "memory": "1Gi", HUGE: "4Mi"}),
        ({"requests": {"cpu": "60"}}, {"cpu": "60010m", "memory": "1Gi", HUGE: "4Mi"}),
        ({"requests": {"cpu": "1"}}, {"cpu": "1010m", "memory": "1Gi", HUGE: "4Mi"}),
        ({"requests": {"memory": "9Gi"}}, {"cpu": "2010m", "memory": "9Gi", HUGE: "4Mi"}),
        ({"limits": {"cpu": "60"}}, {"cpu": "2010m", "memory": "1Gi", HUGE: "4Mi"}),
        ({"limits": {HUGE: "8Mi"}}, {"cpu": "2010m", "memory": "1Gi", HUGE: "8Mi"}),
        ({"limits": {"hugepages-1Gi": "1Gi"}}, {"cpu": "2010m", "memory": "1Gi", HUGE: "4Mi"}),
        ({"requests": {GPU: "7"}}, {"cpu": "2010m", "memory": "1Gi", HUGE: "4Mi"}),
    ],
    ids=["none", "more", "less", "another", "limit", "huge-limit", "new-limit", "not-of-pods"],
)
def test_what_a_pod_asks_for_as_a_whole(pod: dict[str, dict[str, str]], want: dict[str, str]) -> None:
    """As kube-scheduler counts it, with the API server's defaults; the overhead comes on top."""
    asked = {"cpu": "2", "memory": "1Gi", HUGE: "4Mi", GPU: "1"}
    spec = {"containers": [{"resources": {"requests": asked}}], "overhead": {"cpu": "10m"}, "resources": pod}
    new = {name: amount for name, amount in pod.get("limits", {}).items() if name not in asked}
    assert requests_of(spec) == {name: at_least(amount) for name, amount in {**want, GPU: "1", **new}.items()}
    # Where no container asks for anything, the pod's requests and limits are all that counts.
    bare = {"containers": [{"name": "c"}], "resources": pod}
    given = {**pod.get("limits", {}), **pod.get("requests", {})}
    assert requests_of(bare) == {name: at_least(given[name]) for name in given if name != GPU}
