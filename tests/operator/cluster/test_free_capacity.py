"""The hint on free resources: allocatable minus requests of one reading; nothing where that is
not known.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, Json, failure, served
from tests.operator.cluster.test_executor import job, make_executor
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.reconcile import Capacity, ReadCapacity

pytestmark = pytest.mark.ranks  # a server on a socket answers

UID = job()["metadata"]["uid"]
GPU = "nvidia.com/gpu"


def node(name: str, gpus: int | None = 8, *, labels: Json | None = None, **spec: Any) -> Json:
    allocatable = {"cpu": "64", "memory": "512Gi", "pods": "110"} | ({} if gpus is None else {GPU: str(gpus)})
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": spec,
        "status": {"allocatable": allocatable},
    }


def pod(on: str | None, gpus: int, uid: str | None = None) -> Json:
    meta: Json = {"name": f"p-{on}", "namespace": "ml"}
    if uid is not None:
        meta["labels"] = {"zerotrain.dev/job-uid": uid}
        meta["ownerReferences"] = [{"uid": uid, "controller": True}]
    containers = [{"name": "c", "resources": {"requests": {GPU: str(gpus)}}}]
    return {"metadata": meta, "spec": {"containers": containers, **({} if on is None else {"nodeName": on})}}


def body(**scheduling: Any) -> Json:
    plain = job()
    resources = {"gpus": {"count": 4}, "cpu": "1", "memory": "1Gi"}
    return {**plain, "spec": {**plain["spec"], "resources": resources, "scheduling": scheduling}}


async def hint(
    asked: Json, nodes: list[Json], pods: list[Json], *, excluded: tuple[str, ...] = ()
) -> Capacity:
    double = ApiDouble()
    double.on("GET /api/v1/nodes", (200, {"metadata": {}, "items": nodes}))
    double.on("GET /api/v1/pods", (200, {"metadata": {}, "items": pods}))
    async with served(double) as api:
        return await _read(make_executor(api), asked, excluded)


async def _read(executor: Any, asked: Json, excluded: tuple[str, ...] = ()) -> Capacity:
    job_state = executor.job_states.of(UID)
    shape = AttemptShape(workers=9, excluded_nodes=excluded)
    await executor.perform(asked, [ReadCapacity(shape=shape)])
    assert job_state.capacity is not None
    assert job_state.capacity.workers == 9
    found: Capacity = job_state.capacity
    return found


TAINT = {"key": "team", "value": "a", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("scheduling", "nodes", "pods", "fits"),
    [
        pytest.param({}, [node("a"), node("b")], [], 4, id="empty nodes"),
        pytest.param({}, [node("a"), node("b")], [pod("a", 1)], 3, id="a pod of somebody else"),
        pytest.param({}, [node("a")], [pod("a", 8, UID)], 2, id="the job's own pods go for the attempt"),
        pytest.param({}, [node("a")], [pod(None, 8)], 2, id="a pod without a node"),
        pytest.param({}, [node("a")], [pod("a", 9)], 0, id="more is taken than there is"),
        pytest.param({}, [node("a"), node("b", unschedulable=True)], [], 2, id="a cordon"),
        pytest.param({}, [node("a", taints=[TAINT])], [], 0, id="a taint"),
        pytest.param(
            {"tolerations": [{"key": "team", "operator": "Exists"}]},
            [node("a", taints=[TAINT])],
            [],
            2,
            id="a taint that is tolerated",
        ),
        pytest.param(
            {"nodeSelector": {"pool": "x"}},
            [node("a"), node("b", labels={"pool": "x"})],
            [],
            2,
            id="a node selector",
        ),
        pytest.param({}, [node("a"), node("b", None)], [], 2, id="a node without GPUs"),
        pytest.param({}, [node("a", None), node("b", None)], [], None, id="GPUs through DRA"),
    ],
)
async def test_what_is_free(scheduling: Json, nodes: list[Json], pods: list[Json], fits: int | None) -> None:
    assert (await hint(body(**scheduling), nodes, pods)).fits == fits


async def test_excluded_nodes_are_no_capacity() -> None:
    assert (await hint(body(), [node("a"), node("b")], [], excluded=("a",))).fits == 2


async def test_all_pages_are_read() -> None:
    double, asked = ApiDouble(), list[str]()

    async def page(request: Any) -> Any:
        asked.append(request.query.get("continue", ""))
        more = {"continue": "next"} if len(asked) == 1 else {}
        return web.json_response({"metadata": more, "items": [node(f"n{len(asked)}")]})

    double.on("GET /api/v1/nodes", page)
    double.on("GET /api/v1/pods", (200, {"metadata": {}, "items": []}))
    async with served(double) as api:
        assert (await _read(make_executor(api), body())).fits == 4
    assert asked == ["", "next"]


async def test_without_access_to_pods_the_capacity_is_unknown() -> None:
    double = ApiDouble()
    double.on("GET /api/v1/nodes", (200, {"metadata": {}, "items": [node("a")]}))
    double.on("GET /api/v1/pods", failure(403, "Forbidden", "pods of the whole cluster"))
    async with served(double) as api:
        assert (await _read(make_executor(api), body())).fits is None


async def test_one_job_reads_at_a_time() -> None:
    double = ApiDouble()
    async with served(double) as api:
        executor = make_executor(api)
        job_state = executor.job_states.of(UID)
        async with executor.job_states.reading:
            await executor.perform(body(), [ReadCapacity(shape=AttemptShape(workers=2))])
        assert job_state.capacity is None
    assert double.requests == []


async def test_readings_pause_for_nine_times_their_length() -> None:
    """A job may want to grow every second, and a reading of a large cluster takes longer than that."""

    async def slowly(request: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        return web.json_response({"metadata": {}, "items": []})

    double = ApiDouble()
    double.on("GET /api/v1/nodes", slowly)
    double.on("GET /api/v1/pods", slowly)
    now = asyncio.get_running_loop().time
    async with served(double) as api:
        executor, began = make_executor(api), now()
        states = executor.job_states
        await _read(executor, body())
        assert states.reads_again_at >= began + 0.05 + 9 * 0.05
        states.reads_again_at = now() + 600.0
        states.of(UID).capacity = None
        await executor.perform(body(), [ReadCapacity(shape=AttemptShape(workers=9))])
        assert states.of(UID).capacity is None
        states.reads_again_at = now()
        await _read(executor, body())
    assert double.asked("GET /api/v1/nodes") == 2
