"""Pods without a node hold room for their job, but no more once nothing happens to them for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from tests.operator.api_double import ApiDouble, Json, served
from tests.operator.test_operator_executor import executor, job
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.cluster import capacity
from zerotrain.operator.cluster.capacity import PERIOD_S, CapacityBoard
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.snapshot import STUCK_S, Movement, SnapshotReader
from zerotrain.operator.constants import LABEL_JOB, LABEL_JOB_UID
from zerotrain.operator.reconcile import AskRoom
from zerotrain.operator.resources.gang import GATE

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OLD = "2020-01-01T00:00:00Z"
GPU = "nvidia.com/gpu"
GATED: dict[str, Any] = {"schedulingGates": [{"name": GATE}]}


def unscheduled(reason: str, since: str | None) -> Json:
    said = {"type": "PodScheduled", "status": "False", "reason": reason, "lastTransitionTime": since}
    return {"conditions": [said]}


def worker(index: int = 0, *, node: str | None = None, status: Json | None = None, **spec: Any) -> Json:
    """Of the first attempt of job `first`."""
    labels = {LABEL_JOB_UID: "first", LABEL_JOB: "first"}
    place = {"zerotrain.dev/attempt": "1", "zerotrain.dev/rank": str(index)}
    meta = {
        "name": f"first-1-{index}",
        "namespace": "ml",
        "creationTimestamp": OLD,
        "labels": {**labels, **place},
        "ownerReferences": [{"uid": "first", "controller": True}],
    }
    containers = [{"resources": {"requests": {GPU: "8"}}}]
    return {
        "metadata": meta,
        "spec": {"nodeName": node, "containers": containers, **spec},
        "status": status or {},
    }


def first_job() -> Json:
    body = deepcopy(job())
    body["metadata"] |= {"name": "first", "uid": "first", "resourceVersion": "1"}
    return {**body, "status": {"attempt": 1, "workers": {"desired": 2}}}


@pytest.mark.parametrize(
    "pod",
    [
        worker(**GATED),
        worker(**GATED, status=unscheduled("SchedulingGated", OLD)),
        worker(schedulerName="nobody"),
        worker(schedulerName="nobody", status=unscheduled("SchedulingGated", OLD)),
        worker(status=unscheduled("Unschedulable", None)),
    ],
    ids=["our-gate", "told-of-our-gate", "no-scheduler", "no-scheduler-after-our-gate", "refused-no-time"],
)
async def test_a_job_behind_pods_that_get_no_node_starts_after_a_while(
    pod: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two free nodes, and a worker of another job whose peer a quota refuses, or that no scheduler looks at.
    Whatever the clocks of those say that stamped the pod: for all that we know it has just come."""
    clock = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(capacity, "time", SimpleNamespace(monotonic=lambda: clock.s))
    double, body, jobs = ApiDouble(), job(), JobCache()
    body["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    jobs.put(first_job())
    nodes = [
        {"metadata": {"name": name}, "status": {"allocatable": {GPU: "8", "pods": "9"}}} for name in "ab"
    ]
    double.on("GET /api/v1/nodes", (200, {"metadata": {}, "items": nodes}))
    double.on("GET /api/v1/pods", (200, {"metadata": {}, "items": [pod]}))
    double.on("GET /apis/scheduling.k8s.io/v1/priorityclasses", (200, {"items": []}))
    async with served(double) as api:
        hands = executor(api)
        memory = hands.memories.of(body["metadata"]["uid"])
        board = CapacityBoard(api, hands.memories, lambda key: None, asyncio.Event(), jobs)
        await hands.perform(body, [AskRoom(shape=AttemptShape(workers=2))])
        started = clock.s
        while hands.memories.claims and clock.s - started < 10 * STUCK_S:
            await board._judge()
            clock.s += PERIOD_S
        assert memory.capacity is not None
        assert memory.capacity.admitted, memory.capacity.message
        waited_s = clock.s - started
        assert STUCK_S < waited_s <= STUCK_S + 3 * PERIOD_S


NUM_PODS = 6


def a_gang_that_starts() -> Iterator[list[Json]]:
    """One step per reading: workers are created one by one, their gates opened, and they are bound. The API
    server's clock counts every second of a long past."""
    pods: list[Json] = []
    for index in range(NUM_PODS):
        pod = worker(index, **GATED)
        pod["metadata"]["creationTimestamp"] = f"2020-01-01T00:00:{index:02}Z"
        pods.append(pod)
        yield pods
    for pod in pods:
        pod["spec"]["schedulingGates"] = []
        yield pods
    for pod in pods[:-1]:
        pod["spec"]["nodeName"] = "a"
        yield pods


def owner(pod: Mapping[str, Any]) -> str | None:
    return "first"


def unbound(movement: Movement, pods: list[Json], now_s: float) -> int:
    reader = SnapshotReader([], owner, now=NOW)
    for pod in pods:
        reader.take(pod)
    return sum(item.demand.workers for item in movement.unbound(reader.snapshot(), now_s))


def test_a_large_gang_keeps_its_room_while_its_pods_come_one_after_the_other() -> None:
    """However long it takes until all are created, opened and bound; and no more once it stops."""
    movement, now_s, pods = Movement(), 0.0, list[Json]()
    for pods in a_gang_that_starts():
        free = [pod for pod in pods if pod["spec"]["nodeName"] is None]
        assert unbound(movement, pods, now_s) == len(free)
        now_s += STUCK_S - 1
        assert unbound(movement, pods, now_s) == len(free)
        now_s += 2
    assert now_s > 10 * STUCK_S
    assert unbound(movement, pods, now_s) == 0


def test_a_pod_that_is_made_again_counts_anew() -> None:
    """As one of the next attempt, or after a restart of the operator, which remembers nothing."""
    movement, pod = Movement(), worker(**GATED)
    assert unbound(movement, [pod], 0.0) == 1
    assert unbound(movement, [pod], STUCK_S + 1) == 0
    assert unbound(Movement(), [pod], STUCK_S + 1) == 1
    again = worker(**GATED)
    again["metadata"]["creationTimestamp"] = "2020-01-01T00:00:01Z"
    assert unbound(movement, [again], STUCK_S + 2) == 1
    assert unbound(movement, [], STUCK_S + 3) == 0
    assert unbound(movement, [again], 3 * STUCK_S) == 1, "what was gone has moved"
