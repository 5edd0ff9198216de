"""Table of queues that choose the node of every worker: gates, nodes that the job excludes, nodes that
fail.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.operator.reconcile.test_queueing import CREATE, case, held
from tests.operator.reconcile.test_queues import ADMITTED, IN_QUEUE, KUEUE, ask, queued
from tests.operator.reconcile_builders import NOW, Row, Want, check, seen, stamp
from zerotrain.operator.cluster.workload_status import queue_view
from zerotrain.operator.reconcile.observe import QueueView
from zerotrain.operator.reconcile.plan import QueueStep

pytestmark = pytest.mark.unit


GATES = ("kueue.x-k8s.io/topology",)
PLACED = replace(ADMITTED, gates=GATES)
NAME = "zerotrain-gpt-12345678"


def keeps_off(*nodes: str, ends_in_s: float = 600) -> dict[str, Any]:
    until = stamp(NOW + timedelta(seconds=ends_in_s))
    body = queued("Queued")
    excluded = [{"name": node, "until": until, "reason": "RankFailed"} for node in nodes]
    return {**body, "status": {**body["status"], "excludedNodes": excluded}}


PLACES = [
    case(
        "pods-have-the-queue-s-gates",
        queued("Queued"),
        seen(apis=KUEUE, queue=PLACED),
        Want(phase="Pending", actions=(CREATE,), fields={"shape.schedulingGates": list(GATES)}),
    ),
    case(
        "the-queue-is-told-where-not-to",
        keeps_off("node-0", "node-1"),
        seen(apis=KUEUE, queue=QueueView()),
        Want(
            actions=(ask(QueueStep.CREATE, workers=2, queue="team-a", excluded_nodes=("node-0", "node-1")),),
            **held("Queued"),
        ),
    ),
    case(
        "it-chose-a-node-that-the-job-keeps-off-by-now",
        keeps_off("node-0", "node-1"),
        seen(apis=KUEUE, queue=replace(PLACED, excluded_nodes=frozenset({"node-0"}))),
        Want(actions=(ask(QueueStep.DELETE),), **held("Queued")),
    ),
    case(
        "it-knew",
        keeps_off("node-0"),
        seen(apis=KUEUE, queue=replace(PLACED, excluded_nodes=frozenset({"node-0", "node-1"}))),
        Want(phase="Pending", attempt=1),
    ),
    case(
        "where-it-chooses-no-nodes-the-admission-stays",
        keeps_off("node-0"),
        seen(apis=KUEUE, queue=ADMITTED),
        Want(phase="Pending", attempt=1),
    ),
    case(
        "it-waits-for-others-than-a-node-that-is-back",
        keeps_off("node-0"),
        seen(apis=KUEUE, queue=replace(IN_QUEUE, excluded_nodes=frozenset({"node-0", "node-1"}))),
        Want(actions=(ask(QueueStep.DELETE),), **held("Queued")),
    ),
    case(
        "and-looks-again-when-one-is-back",
        keeps_off("node-0", ends_in_s=90),
        seen(apis=KUEUE, queue=replace(IN_QUEUE, excluded_nodes=frozenset({"node-0"}))),
        Want(actions=(), wake_in_s=90, **held("Queued", "insufficient quota")),
    ),
    case(
        "no-pod-is-made-for-a-node-that-failed",
        queued("Queued"),
        seen(apis=KUEUE, queue=replace(PLACED, problem="it looks for other nodes in place of n1")),
        Want(actions=(), **held("Queued", "in place of n1")),
    ),
]


@pytest.mark.parametrize("row", PLACES, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    check(row)


def placed(request: dict[str, Any] | None, **status: Any) -> dict[str, Any]:
    """Return a Workload that Kueue admitted with an assignment of nodes."""
    pods: dict[str, Any] = {"name": "workers", "count": 2}
    if request is not None:
        pods["topologyRequest"] = request
    assignment = {
        "name": "workers",
        "topologyAssignment": {"levels": ["kubernetes.io/hostname"], "slices": []},
    }
    admission = {"clusterQueue": "all", "podSetAssignments": [assignment]}
    meta = {"name": NAME, "annotations": {"zerotrain.dev/excluded-nodes": "a,b"}}
    return {"metadata": meta, "spec": {"podSets": [pods]}, "status": {"admission": admission, **status}}


@pytest.mark.parametrize(
    ("request_", "reports_it"),
    [
        (None, True),
        ({"podIndexLabel": "zerotrain.dev/rank"}, True),
        ({"required": "rack"}, False),
        ({"preferred": "rack"}, False),
        ({"unconstrained": True}, False),
    ],
    ids=str,
)
def test_kueue_finds_the_pods_that_it_places(request_: dict[str, Any] | None, reports_it: bool) -> None:
    view = queue_view(placed(request_), [])
    assert view.gates == GATES
    assert view.excluded_nodes == frozenset({"a", "b"})
    assert view.labels == {"kueue.x-k8s.io/podset": "workers"}
    assert view.annotations["kueue.x-k8s.io/workload"] == NAME
    assert ("kueue.x-k8s.io/podset-unconstrained-topology" in view.annotations) is reports_it


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([], None),
        (["n1"], "it looks for other nodes in place of n1, which failed"),
        (
            ["n1", "n2", "n3", "n4"],
            "it looks for other nodes in place of n1, n2, n3 and 1 more, which failed",
        ),
    ],
)
def test_nodes_that_failed_are_named(names: list[str], problem: str | None) -> None:
    item = placed(None, unhealthyNodes=[{"name": name} for name in names])
    assert queue_view(item, []).problem == problem
