"""The cluster's side of admission: which APIs are there, how the room is read, what a Workload says."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, Json, failure, served
from tests.operator.test_operator_executor import executor, job, nobody
from tests.support.devcluster import PATIENCE_S
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.api.scheduling import Gang
from zerotrain.operator.cluster import capacity
from zerotrain.operator.cluster.api import Api
from zerotrain.operator.cluster.capacity import (
    DUTY,
    MAX_PERIOD_S,
    PERIOD_S,
    STARTING_S,
    CapacityBoard,
    _Start,
)
from zerotrain.operator.cluster.discovery import discover
from zerotrain.operator.cluster.executor import ActionRefused, Executor
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.kueue import (
    Flavor,
    Said,
    advanced,
    flavors_of,
    queue_view,
)
from zerotrain.operator.cluster.memory import Memories
from zerotrain.operator.cluster.snapshot import SnapshotReader
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.constants import LABEL_JOB_UID
from zerotrain.operator.reconcile import AskRoom
from zerotrain.operator.reconcile.claims import Verdict
from zerotrain.operator.reconcile.placement import node_of
from zerotrain.operator.reconcile.queues import ClusterApis, QueueStep, QueueView
from zerotrain.operator.resources.amounts import MILLI, PODS

NOW = datetime(2026, 1, 1, tzinfo=UTC)
UID = job()["metadata"]["uid"]
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"


def serve(double: ApiDouble, group: str, **versions: list[str]) -> None:
    listed = [{"version": version} for version in versions]
    double.on(f"GET /apis/{group}", (200, {"versions": listed}))
    for version, resources in versions.items():
        found = {"resources": [{"name": name} for name in resources]}
        double.on(f"GET /apis/{group}/{version}", (200, found))


async def test_the_newest_version_that_has_the_group_is_taken() -> None:
    double = ApiDouble()
    serve(double, "scheduling.k8s.io", v1=["priorityclasses"], v1alpha2=["podgroups"], v1beta1=["podgroups"])
    serve(double, "kueue.x-k8s.io", v1beta1=["workloads"], v1beta2=["workloads", "resourceflavors"])
    async with served(double) as api:
        found = await discover(api)
    assert found.gangs == {Gang.NATIVE: "scheduling.k8s.io/v1beta1"}
    assert found.kueue == "kueue.x-k8s.io/v1beta2"


async def test_a_group_that_cannot_be_written_is_not_found() -> None:
    double = ApiDouble()
    serve(double, "scheduling.k8s.io", v1=["priorityclasses"], v1alpha1=["workloads"], v1beta1=[])
    async with served(double) as api:
        found = await discover(api)
    assert (found.gangs, found.kueue) == ({}, None)


def pod(uid: str | None, *, node: str | None, gpus: int, **more: Any) -> Json:
    labels = {LABEL_JOB_UID: uid} if uid else {}
    containers = [{"resources": {"requests": {"nvidia.com/gpu": str(gpus)}}}]
    return {"metadata": {"labels": labels}, "spec": {"nodeName": node, "containers": containers, **more}}


NODE = {"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "8", "cpu": "8", PODS: "9"}}}


def by_label(item: Mapping[str, Any]) -> str | None:
    return cast("str | None", item["metadata"]["labels"].get(LABEL_JOB_UID))


def test_pods_are_added_up_by_who_they_belong_to() -> None:
    reader = SnapshotReader([node_of(NODE)], by_label, now=NOW)
    reader.take(pod(None, node="a", gpus=1, priority=7))
    reader.take(pod("j", node="a", gpus=2))
    reader.take(pod("j", node="a", gpus=2))
    reader.take(pod("k", node=None, gpus=3))
    reader.take(pod("k", node=None, gpus=3))
    reader.take(pod(None, node=None, gpus=8))
    snapshot = reader.snapshot()
    (use,) = snapshot.nodes
    assert use.lasting == {7: {"nvidia.com/gpu": 1 * MILLI, PODS: MILLI}}
    assert use.ours == {"j": {0: {"nvidia.com/gpu": 4 * MILLI, PODS: 2 * MILLI}}}
    assert snapshot.unbound["k"].demand.workers == 2
    assert snapshot.seen == {"j": 2, "k": 2}


def owned_pod(
    *, namespace: str = "ml", owner: str = UID, controls: bool = True, name: str = "gpt-1-0", **labels: str
) -> Json:
    item = pod(UID, node=None, gpus=8)
    place = {"zerotrain.dev/job": "gpt", "zerotrain.dev/attempt": "1", "zerotrain.dev/rank": "0"}
    own = {**item["metadata"]["labels"], **place}
    own |= {f"zerotrain.dev/{key}": value for key, value in labels.items()}
    owners = [{"uid": owner, "controller": controls}]
    meta = {"name": name, "namespace": namespace, "labels": own, "ownerReferences": owners}
    return {**item, "metadata": meta}


@pytest.mark.parametrize(
    ("item", "counts"),
    [
        (owned_pod(), True),
        (owned_pod(namespace="evil"), False),
        (owned_pod(owner="another"), False),
        (owned_pod(controls=False), False),
        (owned_pod(name="mine"), False),
        (owned_pod(name="gpt-1-2", rank="2"), False),
        (owned_pod(name="gpt-2-0", attempt="2"), False),
        (owned_pod(name="gpt-verify", helper="verify"), True),
    ],
    ids=["ours", "namespace", "owner", "not-its-controller", "name", "rank", "attempt", "helper"],
)
def test_only_pods_of_jobs_take_their_room(item: Json, counts: bool) -> None:
    jobs = JobCache()
    body = waiting_job()
    status = {"attempt": 1, "workers": {"desired": 2}}
    jobs.put({**body, "metadata": {**body["metadata"], "resourceVersion": "1"}, "status": status})
    board = CapacityBoard(None, Memories(), lambda key: None, asyncio.Event(), jobs, nobody)  # type: ignore[arg-type]
    reader = SnapshotReader([node_of(NODE)], board._owner, now=NOW)
    reader.take(item)
    assert (UID in reader.snapshot().unbound) is counts


def refused(s_ago: float) -> Json:
    since = (NOW - timedelta(seconds=s_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return {"conditions": [{**said, "lastTransitionTime": since}]}


@pytest.mark.parametrize(
    ("more", "counts"),
    [
        ({"spec": {"schedulingGates": [{"name": "zerotrain.dev/all-workers"}]}}, True),
        ({"spec": {"schedulingGates": [{"name": "somebody/else"}]}}, False),
        ({"status": refused(30)}, True),
        ({"status": refused(61)}, False),
    ],
    ids=["our-gate", "foreign-gate", "no-place-yet", "no-place-for-long"],
)
def test_pods_that_can_have_no_node_take_no_room(more: Json, counts: bool) -> None:
    item = pod("k", node=None, gpus=8)
    reader = SnapshotReader([node_of(NODE)], by_label, now=NOW)
    reader.take({**item, "spec": {**item["spec"], **more.get("spec", {})}, "status": more.get("status", {})})
    assert ("k" in reader.snapshot().unbound) is counts


def cluster(double: ApiDouble, *, priorities: list[Json] | None = None) -> None:
    """Two free nodes of eight GPUs."""
    nodes = [NODE, {**NODE, "metadata": {"name": "b"}}]
    double.on("GET /api/v1/nodes", (200, {"metadata": {}, "items": nodes}))
    double.on("GET /api/v1/pods", (200, {"metadata": {}, "items": []}))
    double.on(f"GET {PRIORITIES}", (200, {"items": priorities or []}))


def waiting_job() -> Json:
    body = job()
    body["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return body


@asynccontextmanager
async def board(api: Api, hands: Executor, blind_s: float = 0.0) -> AsyncIterator[asyncio.Queue[JobKey]]:
    """A board that runs; the jobs that it tells of something."""
    changed, may_act = asyncio.Queue[JobKey](), asyncio.Event()
    may_act.set()
    task = asyncio.create_task(
        CapacityBoard(api, hands.memories, changed.put_nowait, may_act, JobCache(), nobody, blind_s).run()
    )
    try:
        yield changed
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_the_cluster_is_read_while_somebody_waits_and_not_before() -> None:
    double, body = ApiDouble(), waiting_job()
    cluster(double)
    uid = body["metadata"]["uid"]
    async with served(double) as api:
        hands = executor(api)
        async with board(api, hands) as changed:
            await asyncio.sleep(0.1)
            assert double.requests == []
            hands.memories.of(uid)  # as the pass that asks has done
            await hands.perform(body, [AskRoom(shape=AttemptShape(workers=2))])
            assert await asyncio.wait_for(changed.get(), PATIENCE_S) == JobKey("ml", "gpt")
            verdict = hands.memories.of(uid).capacity
            assert verdict is not None
            assert (verdict.admitted, verdict.workers, verdict.counted) == (True, 2, True)
            assert verdict.good_for_s == STARTING_S
            assert hands.memories.claims == {}
            await hands.perform(body, [AskRoom(shape=None)])
            assert hands.memories.of(uid).capacity is None


async def test_a_question_that_is_repeated_while_the_cluster_is_read_is_answered() -> None:
    """Each pass without an answer asks again, and reading a large cluster takes longer than a pass."""
    double, body = ApiDouble(), waiting_job()
    cluster(double)
    question = AskRoom(shape=AttemptShape(workers=2))
    async with served(double) as api:
        hands = executor(api)

        async def slow(request: web.Request) -> web.Response:
            await hands.perform(body, [question])
            return web.json_response({"metadata": {}, "items": []})

        double.on("GET /api/v1/pods", slow)
        hands.memories.of(body["metadata"]["uid"])
        async with board(api, hands) as changed:
            await hands.perform(body, [question])
            assert await asyncio.wait_for(changed.get(), PATIENCE_S) == JobKey("ml", "gpt")
    assert double.asked("GET /api/v1/pods") == 1


async def test_another_question_meanwhile_is_not_answered_by_the_old_reading() -> None:
    double, body = ApiDouble(), waiting_job()
    cluster(double)
    async with served(double) as api:
        hands = executor(api)

        async def slow(request: web.Request) -> web.Response:
            await hands.perform(body, [AskRoom(shape=AttemptShape(workers=1))])
            return web.json_response({"metadata": {}, "items": []})

        double.on("GET /api/v1/pods", slow)
        memory = hands.memories.of(body["metadata"]["uid"])
        async with board(api, hands) as changed:
            await hands.perform(body, [AskRoom(shape=AttemptShape(workers=2))])
            await asyncio.wait_for(changed.get(), PATIENCE_S)
            assert memory.capacity is not None
            assert memory.capacity.workers == 1


async def test_a_word_is_good_until_the_next_reading_even_if_that_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0.0, 4.0)
    monkeypatch.setattr(capacity, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    double, body = ApiDouble(), waiting_job()
    cluster(double)
    async with served(double) as api:
        hands = executor(api)
        memory = hands.memories.of(body["metadata"]["uid"])
        async with board(api, hands) as changed:
            await hands.perform(body, [AskRoom(shape=AttemptShape(workers=50))])
            await asyncio.wait_for(changed.get(), PATIENCE_S)
    assert memory.capacity is not None
    assert not memory.capacity.admitted
    assert memory.capacity.good_for_s > (DUTY + 1) * 4.0 + PERIOD_S


async def test_jobs_that_only_could_grow_cost_a_reading_every_half_minute() -> None:
    double, body = ApiDouble(), waiting_job()
    cluster(double)
    async with served(double) as api:
        hands = executor(api)
        memory = hands.memories.of(body["metadata"]["uid"])
        one = CapacityBoard(api, hands.memories, lambda key: None, asyncio.Event(), JobCache(), nobody)
        await hands.perform(body, [AskRoom(shape=AttemptShape(workers=50), growing=True)])
        periods = []
        for _ in range(6):
            await one._judge()
            periods.append(one._period_s)
        assert periods == [PERIOD_S, 2 * PERIOD_S, 4 * PERIOD_S, *[MAX_PERIOD_S] * 3]
        assert memory.capacity is not None
        assert memory.capacity.good_for_s > MAX_PERIOD_S, "the word is good until the next reading"
        double.on("GET /api/v1/nodes", (200, {"metadata": {}, "items": []}))
        await one._judge()
        assert one._period_s == PERIOD_S, "something changed"
        await hands.perform(body, [AskRoom(shape=AttemptShape(workers=50))])
        for _ in range(3):
            await one._judge()
        assert one._period_s == PERIOD_S, "a job that waits for its pods is never kept waiting"


async def test_a_job_keeps_its_nodes_over_readings_in_which_one_of_them_is_away() -> None:
    double, body = ApiDouble(), waiting_job()
    cluster(double)
    async with served(double) as api:
        hands = executor(api)
        memory = hands.memories.of(body["metadata"]["uid"])
        one = CapacityBoard(api, hands.memories, lambda key: None, asyncio.Event(), JobCache(), nobody)
        await hands.perform(body, [AskRoom(shape=AttemptShape(workers=2))])
        (claim,) = hands.memories.claims.values()
        others = replace(claim, uid="others", demand=replace(claim.demand, workers=99))
        one._starting["others"] = _Start(others, moved_at=time.monotonic())
        await one._judge()
        double.on("GET /api/v1/nodes", (200, {"metadata": {}, "items": []}))
        await one._judge()
        assert memory.capacity is not None
        assert "its nodes stay kept until" in memory.capacity.message


async def test_jobs_that_ask_together_list_the_priorities_once() -> None:
    double, body = ApiDouble(), waiting_job()
    cluster(double, priorities=[{"metadata": {"name": "high"}, "value": 7, "globalDefault": True}])
    async with served(double) as api:
        hands = executor(api)
        question = AskRoom(shape=AttemptShape(workers=2))
        await asyncio.gather(*(hands.perform(body, [question]) for _ in range(5)))
        assert double.asked(f"GET {PRIORITIES}") == 1
        (claim,) = hands.memories.claims.values()
        assert claim.demand.priority == 7
        cluster(double, priorities=[{"metadata": {"name": "new"}, "value": 9}])
        body["spec"]["scheduling"] = {"gang": "Operator", "priorityClassName": "new"}
        await hands.perform(body, [question])
        (claim,) = hands.memories.claims.values()
        assert claim.demand.priority == 9, "a class that is younger than the list was not found"


def item(status: Json, **spec: Any) -> Json:
    pods = [{"name": "workers", "count": 2}]
    return {"spec": {"podSets": pods, "queueName": "q", **spec}, "status": status}


def conditions(**words: str) -> list[Json]:
    """Type -> `True Reason message`."""
    found = []
    for kind, text in words.items():
        value, reason, *message = text.split(" ", 2)
        found.append({"type": kind, "status": value, "reason": reason, "message": " ".join(message)})
    return found


def test_a_workload_as_it_was_made() -> None:
    assert queue_view(item({}), []) == QueueView(exists=True, workers=2, queue="q")


def test_an_admission_with_flavors_and_the_updates_of_its_checks() -> None:
    checks = [
        {
            "podSetUpdates": [
                {"name": "workers", "labels": {"l": "1"}, "nodeSelector": {"pool": "x", "zone": "z"}}
            ]
        }
    ]
    status = {
        "conditions": conditions(QuotaReserved="True Reserved", Admitted="True Admitted"),
        "admission": {
            "clusterQueue": "all",
            "podSetAssignments": [{"name": "workers", "flavors": {"cpu": "f", "nvidia.com/gpu": "f"}}],
        },
        "admissionChecks": checks,
    }
    assert flavors_of(status) == ("f",)
    view = queue_view(item(status), [Flavor(node_labels={"pool": "a100"})])
    assert (view.admitted, view.holds_quota, view.cluster_queue) == (True, True, "all")
    assert view.node_selector == {"pool": "a100", "zone": "z"}
    assert view.labels == {"l": "1"}


def test_a_toleration_of_a_newer_kueue_is_a_problem_and_no_crash() -> None:
    update = {"name": "workers", "tolerations": [{"key": "a", "operator": "Newer"}]}
    view = queue_view(item({"admissionChecks": [{"podSetUpdates": [update]}]}), [])
    assert view.problem is not None
    assert "admission check" in view.problem


@pytest.mark.parametrize(
    ("reason", "requeued"),
    [
        ("Preempted", "True"),
        ("AdmissionCheck", "True"),
        ("PodsReadyTimeout", "False"),
        ("Deactivated", "False"),
    ],
)
def test_a_release_clears_the_reservation_and_keeps_what_is_not_ours(reason: str, requeued: str) -> None:
    before = {
        "conditions": conditions(
            Evicted=f"True {reason} why", QuotaReserved="True R", Admitted="True A", Other="True O"
        ),
        "admission": {"clusterQueue": "all"},
        "requeueState": {"count": 1},
    }
    said = Said(step=QueueStep.RELEASE, message="why", at=NOW, generation=4)
    after = advanced(before, said)
    words = {each["type"]: each["status"] for each in after["conditions"]}
    assert words == {
        "Evicted": "True",
        "QuotaReserved": "False",
        "Admitted": "False",
        "Other": "True",
        "Requeued": requeued,
    }
    assert "admission" not in after
    assert after["requeueState"] == {"count": 1}
    assert before["admission"] == {"clusterQueue": "all"}, "the body of the watch was changed"
    again = advanced(after, said)
    assert again["conditions"] == after["conditions"], "a second release moves no time"


@pytest.mark.parametrize(("phase", "reason"), [("Completed", "Succeeded"), ("Failed", "Failed")])
def test_finished(phase: str, reason: str) -> None:
    after = advanced({}, Said(step=QueueStep.FINISH, message=f"the job is {phase}", at=NOW, generation=1))
    (condition,) = after["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Finished", "True", reason)


async def test_another_question_drops_the_word_on_the_one_before() -> None:
    double, body = ApiDouble(), waiting_job()
    cluster(double)
    async with served(double) as api:
        hands = executor(api)
        memory, question = hands.memories.of(body["metadata"]["uid"]), AskRoom(shape=AttemptShape(workers=2))
        word = Verdict(admitted=False, workers=2)
        await hands.perform(body, [question])
        memory.capacity = word
        await hands.perform(body, [question])
        assert (memory.capacity, memory.question) == (word, question)
        away = AskRoom(shape=AttemptShape(workers=2, excluded_nodes=("a",)))
        await hands.perform(body, [away])
        assert hands.memories.of(body["metadata"]["uid"]).capacity is None
        assert memory.question == away
        await hands.perform(body, [AskRoom(shape=None)])
        assert hands.memories.of(body["metadata"]["uid"]).question is None
        assert hands.memories.claims == {}


@pytest.mark.parametrize(
    ("kind", "version", "reason"),
    [
        ("PodGroup", "scheduling.k8s.io/v1alpha2", "GangMissing"),
        ("Workload", "kueue.x-k8s.io/v1beta1", "QueueMissing"),
    ],
)
async def test_an_api_that_went_away_is_told_and_looked_for_again(
    kind: str, version: str, reason: str
) -> None:
    double = ApiDouble()
    async with served(double) as api:
        hands = executor(api)
        hands.memories.apis = ClusterApis(at=NOW)
        item = {"apiVersion": version, "kind": kind, "metadata": {"name": "x", "namespace": "ml"}}
        with pytest.raises(ActionRefused) as caught:
            await hands.post(item)
    assert caught.value.problem.reason == reason
    assert hands.memories.apis is None


@pytest.mark.parametrize(("blind_s", "asked"), [(60.0, 1), (0.0, 4)], ids=["soon", "later"])
async def test_who_may_not_see_the_room_keeps_nobody_waiting(
    blind_s: float, asked: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator for a few namespaces may read all nodes, but not all pods. Nodes that nobody can fill are
    not read for every claim, and a right that is granted later is found."""
    monkeypatch.setattr(capacity, "SETTLE_S", 0.0)
    monkeypatch.setattr(capacity, "MOMENT_S", 0.0)
    double, body = ApiDouble(), waiting_job()
    cluster(double)
    double.on("GET /api/v1/pods", failure(403, "Forbidden", "pods of the whole cluster"))
    async with served(double) as api:
        hands = executor(api)
        async with board(api, hands, blind_s) as changed:
            for _ in range(3):
                memory = hands.memories.of(UID)
                memory.capacity = memory.question = None
                await hands.perform(body, [AskRoom(shape=AttemptShape(workers=2))])
                assert await asyncio.wait_for(changed.get(), PATIENCE_S) == JobKey("ml", "gpt")
                verdict = hands.memories.of(UID).capacity
                assert verdict is not None
                assert (verdict.admitted, verdict.counted) == (True, False)
                assert not hands.memories.claims
            memory.capacity = memory.question = None
            await hands.perform(body, [AskRoom(shape=AttemptShape(workers=2), growing=True)])
            await asyncio.wait_for(changed.get(), PATIENCE_S)
            grown = hands.memories.of(UID).capacity
            assert grown is not None
            assert (grown.admitted, grown.counted) == (False, False), "a job that runs grew on a guess"
    assert double.asked("GET /api/v1/nodes") == asked
    assert caplog.text.count("room cannot be counted") == 1
