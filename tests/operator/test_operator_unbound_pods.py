"""Pods without a node hold room for their job, but no more once nothing happens to them for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from tests.operator.api_double import ApiDouble, Json, served
from tests.operator.test_operator_executor import executor, job, nobody
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.cluster import capacity
from zerotrain.operator.cluster.capacity import PERIOD_S, CapacityBoard
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.snapshot import MAX_SCHEDULERS, SERVES_S, STUCK_S, Movement, SnapshotReader
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


def worker(
    index: int = 0, *, of: str = "first", node: str | None = None, status: Json | None = None, **spec: Any
) -> Json:
    """Of the job's first attempt."""
    labels = {LABEL_JOB_UID: of, LABEL_JOB: of}
    place = {"zerotrain.dev/attempt": "1", "zerotrain.dev/rank": str(index)}
    meta = {
        "name": f"{of}-1-{index}",
        "namespace": "ml",
        "creationTimestamp": OLD,
        "labels": {**labels, **place},
        "ownerReferences": [{"uid": of, "controller": True}],
    }
    containers = [{"resources": {"requests": {GPU: "8"}}}]
    return {
        "metadata": meta,
        "spec": {"nodeName": node, "containers": containers, **spec},
        "status": status or {},
    }


def other(node: str | None = "c", status: Json | None = None, **spec: Any) -> Json:
    """A pod that is nobody's worker and needs nothing."""
    meta = {"name": "other", "namespace": "web", "creationTimestamp": OLD, "labels": {}}
    return {"metadata": meta, "spec": {"nodeName": node, "containers": [], **spec}, "status": status or {}}


def job_called(name: str) -> Json:
    body = deepcopy(job())
    body["metadata"] |= {"name": name, "uid": name, "resourceVersion": "1", "creationTimestamp": OLD}
    body["spec"] |= {"ranksPerWorker": 8, "resources": {"gpus": {"count": 8}}}
    return {**body, "status": {"attempt": 1, "workers": {"desired": 2}}}


def two_free_nodes(double: ApiDouble) -> None:
    nodes = [
        {"metadata": {"name": name}, "status": {"allocatable": {GPU: "8", "pods": "9"}}} for name in "ab"
    ]
    double.on("GET /api/v1/nodes", (200, {"metadata": {}, "items": nodes}))
    double.on("GET /apis/scheduling.k8s.io/v1/priorityclasses", (200, {"items": []}))


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
    """Two free nodes, and a worker of another job whose peer a quota refuses, or that no scheduler looks at,
    while the default one serves. Whatever the clocks of those say that stamped the pod: for all that we know
    it has just come."""
    clock = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(capacity, "time", SimpleNamespace(monotonic=lambda: clock.s))
    double, body, jobs = ApiDouble(), job(), JobCache()
    body["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    jobs.put(job_called("first"))
    two_free_nodes(double)
    double.on("GET /api/v1/pods", (200, {"metadata": {}, "items": [pod, other()]}))
    async with served(double) as api:
        hands = executor(api)
        memory = hands.memories.of(body["metadata"]["uid"])
        board = CapacityBoard(api, hands.memories, lambda key: None, asyncio.Event(), jobs, nobody)
        await hands.perform(body, [AskRoom(shape=AttemptShape(workers=2))])
        started = clock.s
        while hands.memories.claims and clock.s - started < 10 * STUCK_S:
            await board._judge()
            clock.s += PERIOD_S
        assert memory.capacity is not None
        assert memory.capacity.admitted, memory.capacity.message
        waited_s = clock.s - started
        assert STUCK_S < waited_s <= STUCK_S + 3 * PERIOD_S


def a_paused_scheduler(minute: int) -> list[Json]:
    return [other()]


def a_busy_scheduler(minute: int) -> list[Json]:
    """It places one of ten others per minute."""
    return [other("c" if index <= minute else None) for index in range(10)]


@pytest.mark.parametrize("others", [a_paused_scheduler, a_busy_scheduler])
async def test_gangs_are_not_let_in_one_after_the_other_into_the_same_room(
    others: Callable[[int], list[Json]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one gang of three. Its pods are all made and opened; for ten minutes the scheduler does not
    come to them. Then it places them, and each time that a gang has ended the next one is let in, once."""
    clock = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(capacity, "time", SimpleNamespace(monotonic=lambda: clock.s))
    double, jobs, pods = ApiDouble(), JobCache(), list[Json]()
    names = ["first", "second", "third"]
    two_free_nodes(double)
    async with served(double) as api:
        hands = executor(api)
        board = CapacityBoard(api, hands.memories, lambda key: None, asyncio.Event(), jobs, nobody)
        for name in names:
            jobs.put(job_called(name))
            await hands.perform(job_called(name), [AskRoom(shape=AttemptShape(workers=2))])

        async def let_in(seconds: float) -> set[str]:
            began, came = clock.s, set[str]()
            while clock.s - began < seconds and hands.memories.claims:
                seen = [*pods, *others(int((clock.s - 1000) // 60))]
                double.on("GET /api/v1/pods", (200, {"metadata": {}, "items": seen}))
                before = set(hands.memories.claims)
                await board._judge()
                came |= (new := before - set(hands.memories.claims))
                pods.extend(worker(index, of=name) for name in sorted(new) for index in range(2))
                clock.s += PERIOD_S
            return came

        left = set(names)
        while left:
            came = await let_in(10 * STUCK_S)
            assert len(came) == 1
            left -= came
            for pod, node in zip(pods, "ab", strict=True):
                pod["spec"]["nodeName"] = node
            assert await let_in(2 * STUCK_S) == set()
            pods.clear()


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
    uid: str | None = pod["metadata"]["labels"].get(LABEL_JOB_UID)
    return uid


def unbound(movement: Movement, pods: list[Json], now_s: float) -> int:
    reader = SnapshotReader([], owner, now=NOW)
    for pod in pods:
        reader.take(pod)
    return sum(item.demand.workers for item in movement.unbound(reader.snapshot(), now_s))


def test_a_large_gang_keeps_its_room_while_its_pods_come_one_after_the_other() -> None:
    """However long it takes until all are created, opened and bound; and the last one, which stands in line
    behind them, for as long as it does."""
    movement, now_s, pods = Movement(), 0.0, list[Json]()
    for pods in a_gang_that_starts():
        free = [pod for pod in pods if pod["spec"]["nodeName"] is None]
        assert unbound(movement, pods, now_s) == len(free)
        now_s += STUCK_S - 1
        assert unbound(movement, pods, now_s) == len(free)
        now_s += 2
    assert now_s > 10 * STUCK_S
    assert unbound(movement, pods, now_s) == 1


CLAIM: dict[str, Any] = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpus"}]}
MADE: Json = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "gpu-x"}]}
TOLD_GATED = unscheduled("SchedulingGated", OLD)


def leaving() -> Json:
    pod = worker()
    pod["metadata"]["deletionTimestamp"] = OLD
    return pod


@pytest.mark.parametrize(
    ("pods", "counted"),
    [
        ([worker(), other()], 1),
        ([worker(schedulerName="default-scheduler"), other()], 1),
        ([worker(), other(schedulerName="default-scheduler")], 1),
        ([worker(status=TOLD_GATED), other()], 1),
        ([worker(), worker(1, node="a")], 1),
        ([worker(), other(None, unscheduled("Unschedulable", OLD))], 1),
        ([worker(), other(None, TOLD_GATED)], 0),
        ([worker(), other(None)], 0),
        ([worker(), other(schedulerName="mine")], 0),
        ([worker(schedulerName="mine"), other()], 0),
        ([worker(**GATED), other()], 0),
        ([worker(**GATED), worker(1), other()], 1),
        ([worker(schedulingGroup={"podGroupName": "first-1"}), other()], 0),
        ([leaving(), other()], 0),
        ([worker(**CLAIM), other()], 0),
        ([worker(**CLAIM, status=MADE), other()], 1),
    ],
    ids=[
        "in-line",
        "default-named",
        "default-named-by-the-other",
        "opened",
        "behind-its-peer",
        "somebody-refused",
        "somebody-gated",
        "nobody-placed",
        "another-scheduler",
        "no-such-scheduler",
        "gated",
        "only-the-open-one",
        "native-gang",
        "being-deleted",
        "no-device-claim",
        "device-claim",
    ],
)
def test_after_a_while_only_pods_in_line_at_a_scheduler_that_serves_count(
    pods: list[Json], counted: int
) -> None:
    ours = sum(pod["spec"]["nodeName"] is None and pod["metadata"]["namespace"] == "ml" for pod in pods)
    movement = Movement()
    assert unbound(movement, pods, 0.0) == ours
    assert unbound(movement, pods, STUCK_S) == ours
    assert unbound(movement, pods, STUCK_S + 1) == counted
    assert unbound(movement, pods, SERVES_S + 2) == counted


def test_a_pod_that_is_refused_after_a_long_time_in_line_counts_a_while_longer() -> None:
    movement, late = Movement(), worker(status=unscheduled("Unschedulable", None))
    for now_s in (0.0, 10 * STUCK_S):
        assert unbound(movement, [worker(), other()], now_s) == 1
    assert unbound(movement, [late, other()], 10 * STUCK_S + 5) == 1
    assert unbound(movement, [late, other()], 11 * STUCK_S + 5) == 1
    assert unbound(movement, [late, other()], 11 * STUCK_S + 6) == 0


def test_a_scheduler_serves_for_a_while_after_its_last_pod_has_ended() -> None:
    movement, pod = Movement(), worker(schedulerName="mine")
    assert unbound(movement, [other(schedulerName="mine")], 0.0) == 0
    for now_s in (5.0, SERVES_S):
        assert unbound(movement, [pod], now_s) == 1
    assert unbound(movement, [pod], SERVES_S + 1) == 0


def test_few_schedulers_are_remembered_whatever_others_write_into_their_pods() -> None:
    movement, pod = Movement(), worker(schedulerName="mine")
    for index in range(3):
        many = [other(schedulerName=f"{index}-{number}") for number in range(2 * MAX_SCHEDULERS)]
        crowd = [other(schedulerName="mine"), *many, pod]
        assert unbound(movement, crowd, index * (STUCK_S + 1)) == 1, "those of the reading serve all the same"
        assert len(movement._served) == MAX_SCHEDULERS


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
