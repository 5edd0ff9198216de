"""Pods without a node count as what their job asked for: they preempt and spread as it does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.test_operator_unbound_pods import NOW, owner, unscheduled, worker
from tests.operator.test_reconcile_capacity import GPU, claim
from zerotrain.operator.cluster.snapshot import Movement, SnapshotReader
from zerotrain.operator.reconcile.capacity import admit
from zerotrain.operator.reconcile.claims import Claim
from zerotrain.operator.reconcile.placement import Node, node_of

Json = dict[str, Any]


def gpus(name: str, **labels: str) -> Node:
    status = {"allocatable": {GPU: "8", "pods": "110"}}
    return node_of({"metadata": {"name": name, "labels": labels}, "status": status})


def filler(node: str) -> Json:
    """A pod of nobody's that gives way to any other."""
    container = {"resources": {"requests": {GPU: "8"}}}
    spec = {"nodeName": node, "priority": -10, "containers": [container]}
    return {
        "metadata": {"name": f"filler-{node}", "namespace": "x", "labels": {}},
        "spec": spec,
        "status": {},
    }


def admitted(nodes: list[Node], pods: list[Json], asks: Claim, let_in: Claim | None = None) -> bool:
    """Whether a job gets in beside these pods, or beside one that was let in and has no pods yet."""
    reader = SnapshotReader(nodes, owner, now=NOW)
    for pod in pods:
        reader.take(pod)
    snapshot = reader.snapshot()
    starting = [let_in] if let_in is not None else Movement().unbound(snapshot, 0.0)
    return admit(snapshot.nodes, [asks], starting)[asks.uid].admitted


def preempting(index: int, **more: Any) -> Json:
    return worker(index, of="A", priority=10, preemptionPolicy="PreemptLowerPriority", **more)


@pytest.mark.parametrize("has_pods", [False, True])
def test_nobody_else_gets_the_room_that_a_gang_takes_from_lower_priorities(has_pods: bool) -> None:
    nodes, fillers = [gpus("a"), gpus("b")], [filler("a"), filler("b")]
    first, second = (claim(name, 2, 8, priority=10, preempts=True) for name in "AB")
    pods = [preempting(0), preempting(1)] if has_pods else []
    assert not admitted(nodes, [*fillers, *pods], second, None if has_pods else first)
    assert admitted(nodes, fillers, second)


@pytest.mark.parametrize("has_pods", [False, True])
def test_nobody_else_gets_the_only_node_of_a_zone_that_a_gang_spreads_to(has_pods: bool) -> None:
    nodes = [gpus("a1", zone="a"), gpus("a2", zone="a"), gpus("b1", zone="b")]
    hard = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
    pods = [worker(index, of="S", topologySpreadConstraints=[hard]) for index in range(2)] if has_pods else []
    spread = claim("S", 2, 8, topology_key="zone", spread=True)
    assert not admitted(nodes, pods, claim("J", 1, 8), None if has_pods else spread)


def test_a_preference_to_spread_needs_no_zone() -> None:
    nodes = [gpus("a1", zone="a"), gpus("a2", zone="a"), gpus("b1", zone="b")]
    soft = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    pods = [worker(index, of="S", topologySpreadConstraints=[soft]) for index in range(2)]
    assert admitted(nodes, pods, claim("J", 1, 8))


@pytest.mark.parametrize("nominated", [True, False])
def test_a_node_that_the_scheduler_keeps_for_a_pod_is_no_room(nominated: bool) -> None:
    """Those that it pushes aside may save for minutes first."""
    status = unscheduled("Unschedulable", "2025-12-31T23:58:00Z")
    if nominated:
        status |= {"nominatedNodeName": "a"}
    reader, movement = SnapshotReader([gpus("a"), gpus("b")], owner, now=NOW), Movement()
    for index in range(2):
        reader.take(preempting(index, status=status))
    bound = filler("a")
    reader.take(bound)
    for now_s in (0.0, 600.0):
        counted = movement.unbound(reader.snapshot(), now_s)
        assert sum(item.demand.workers for item in counted) == (2 if nominated else 0)
