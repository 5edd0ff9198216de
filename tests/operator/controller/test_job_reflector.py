"""The operator's cache of jobs follows the cluster: batched events, deletions that no watch showed, and any
error of the API server in between.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, Json, failure, served
from tests.support.devcluster import PATIENCE_S
from zerotrain.operator.cluster import reflectors
from zerotrain.operator.cluster.channel import ChannelKind
from zerotrain.operator.cluster.jobs import ALL_JOBS, JobCache
from zerotrain.operator.cluster.listwatch import scoped
from zerotrain.operator.cluster.reflectors import BATCH_SIZE, JobReflector, _Jobs
from zerotrain.operator.controller.config import OperatorConfig
from zerotrain.operator.controller.manager import Manager

pytestmark = pytest.mark.ranks


LIST = f"GET {ALL_JOBS}"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/zerotrain-system/leases"


def listed_job(name: str, version: int, *, uid: str = "", namespace: str = "ml") -> Json:
    """Return a job as it stands in a list: without its kind."""
    meta = {"name": name, "namespace": namespace, "uid": uid or name, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {"workers": 1}}


def event(what: str, *job: Any, **more: Any) -> Json:
    return {"type": what, "object": listed_job(*job, **more)}


def failed(code: int) -> Json:
    return {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "etcdserver: no leader"}}


class Site:
    """Scripted lists and watches, the last of either repeated for ever; an open watch stays open."""

    def __init__(self, *script: tuple[int, list[Json]] | int | list[Json]) -> None:
        """Script the answers: per list a version with its jobs, or the code of a refusal; per watch its
        events.
        """
        self._lists = [step for step in script if not isinstance(step, list)]
        self._watches = [step for step in script if isinstance(step, list)]
        self.lists = self.watches = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        step = self._lists[min(self.lists, len(self._lists) - 1)]
        self.lists += 1
        if isinstance(step, int):
            code, body = failure(step, "NotFound")
            return web.json_response(body, status=code)
        version, jobs = step
        return web.json_response({"metadata": {"resourceVersion": str(version)}, "items": jobs})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        events = self._watches[self.watches] if self.watches < len(self._watches) else []
        self.watches += 1
        for item in events:
            await response.write(json.dumps(item).encode() + b"\n")
        if self.watches >= len(self._watches):
            await asyncio.sleep(PATIENCE_S)
        return response


class Known:
    """The calls in their order, and the cache that they fill."""

    def __init__(self) -> None:
        self.jobs, self.calls = JobCache(), list[tuple[str, str, str]]()

    def changed(self, job: Json) -> None:
        meta = job["metadata"]
        self.calls.append(("changed", meta["uid"], meta["resourceVersion"]))
        assert job["kind"] == "ZeroTrainingJob"
        self.jobs.put(job)

    def deleted(self, job: Json) -> None:
        self.calls.append(("deleted", job["metadata"]["uid"], job["metadata"]["resourceVersion"]))
        self.jobs.remove(job)

    def names(self) -> set[str]:
        return {key.name for key, _ in self.jobs}


@asynccontextmanager
async def following(**sites: Site) -> AsyncIterator[tuple[Known, JobReflector]]:
    """Run a reflector of the named namespaces; `everywhere` is the whole cluster."""
    double, known = ApiDouble(), Known()
    namespaces = tuple(name for name in sites if name != "everywhere")
    for path, site in zip(scoped(ALL_JOBS, namespaces), sites.values(), strict=True):
        double.on(f"GET {path}", site.answer)
    async with served(double) as api:
        reflector = JobReflector(api, known.jobs, known.changed, known.deleted, namespaces)
        task = asyncio.create_task(reflector.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield known, reflector
            assert not task.done()
        finally:
            task.cancel()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("code", [500, 504, 403, 404, 410])
async def test_no_word_of_the_api_server_on_the_watch_ends_it(code: int) -> None:
    """The causes are an etcd without a leader, a role or a kind that is being replaced, a version that is too
    old.
    """
    site = Site(
        (5, [listed_job("a", 2)]), [failed(code)], (7, [listed_job("a", 2)]), [event("ADDED", "b", 9)]
    )
    async with following(everywhere=site) as (known, _):
        await until(lambda: known.names() == {"a", "b"})
        assert site.watches == 2


async def test_a_kind_that_is_gone_is_waited_for() -> None:
    """The definition is deleted, and applied again."""
    site = Site((5, [listed_job("a", 2)]), [failed(404)], 404, 404, (90, [listed_job("b", 80)]), [])
    async with following(everywhere=site) as (known, reflector):
        await until(lambda: known.names() == {"b"})
        assert ("deleted", "a", "2") in known.calls
        assert reflector.refused == {"": False}


async def test_jobs_that_went_without_a_watch_are_deleted_and_younger_ones_stay() -> None:
    """The answer to a write may be newer than the list."""
    site = Site((5, [listed_job("a", 2), listed_job("b", 3)]), [failed(410)], (7, [listed_job("b", 3)]), [])
    async with following(everywhere=site) as (known, _):
        known.jobs.put(listed_job("c", 8))
        await until(lambda: ("deleted", "a", "2") in known.calls)
        await until(lambda: site.watches == 2)
        assert known.names() == {"b", "c"}


async def test_a_job_that_went_before_its_event_was_handed_over_is_not_brought_back() -> None:
    """The watch broke off in between, and the next list came while the event was still held back."""
    known, listed = Known(), asyncio.Event()
    sink = _Jobs(known.jobs, known.changed, known.deleted, None, lambda namespace: listed.set())
    for name, version in (("a", 2), ("b", 3), ("c", 8)):
        sink.put(listed_job(name, version))
    sink.listed({"b"}, 5)
    async with asyncio.timeout(PATIENCE_S):
        await listed.wait()
    assert known.calls == [("changed", "b", "3"), ("changed", "c", "8")]


async def test_events_of_one_job_in_one_moment_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events within one moment are mostly echoes of writes. A deletion is passed on at once, also when the
    name already has a new object.
    """
    monkeypatch.setattr(reflectors, "BATCH_S", 0.3)
    events = [
        event("MODIFIED", "a", 6),
        event("MODIFIED", "a", 7),
        event("ADDED", "b", 8, uid="b-1"),
        event("DELETED", "b", 9, uid="b-1"),
        event("ADDED", "b", 10, uid="b-2"),
    ]
    async with following(everywhere=Site((5, [listed_job("a", 2)]), events)) as (known, _):
        await until(lambda: len(known.calls) >= 3)
        assert known.calls == [("deleted", "b-1", "9"), ("changed", "a", "7"), ("changed", "b-2", "10")]


async def test_a_namespace_that_may_not_be_read_keeps_no_other_waiting() -> None:
    """A list of one namespace says nothing about the jobs of another."""
    mine = Site((5, [listed_job("a", 2)]), [event("ADDED", "b", 9)])
    async with following(ml=mine, lost=Site(403), other=Site((20, []), [])) as (known, reflector):
        await until(lambda: known.names() == {"a", "b"})
        await reflector.synced.wait()
        assert reflector.refused == {"ml": False, "lost": True, "other": False}
        assert {what for what, *_ in known.calls} == {"changed"}


async def test_a_long_list_is_passed_on_in_batches_and_a_bad_job_affects_no_other() -> None:
    jobs = [listed_job(f"job-{number:03}", number + 1) for number in range(2 * BATCH_SIZE + 1)]
    del jobs[3]["metadata"]["name"]
    async with following(everywhere=Site((900, jobs), [])) as (known, reflector):
        turns = set[int]()
        while not reflector.synced.is_set():
            turns.add(len(known.names()))
            await asyncio.sleep(0)
        assert BATCH_SIZE - 1 in turns
        assert len(known.names()) == 2 * BATCH_SIZE, "it is not told before the last one"
        assert "job-003" not in known.names()


async def test_who_may_read_no_jobs_is_not_ready() -> None:
    site = Site(403, 403, 403, (5, []), [])
    async with following(everywhere=site) as (_, reflector):
        await until(lambda: site.lists > 1)
        assert not reflector.synced.is_set()
        await reflector.synced.wait()
        assert site.lists == 4


async def test_no_pass_runs_before_all_jobs_and_pods_are_known() -> None:
    """The order holds also where the lease comes first."""
    double, release = ApiDouble(), {"jobs": asyncio.Event(), "pods": asyncio.Event()}

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            await release["jobs" if request.path == ALL_JOBS else "pods"].wait()
        return await Site((5, []), []).answer(request)

    async def lease(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        body["metadata"]["resourceVersion"] = "1"
        double.on(f"GET {LEASES}/zerotrain-operator", (200, body))
        return web.json_response(body)

    double.on(f"POST {LEASES}", lease)
    double.on(f"PUT {LEASES}/zerotrain-operator", lease)
    resources = {"resources": [{"name": "zerotrainingjobs"}]}
    double.on(f"GET {ALL_JOBS.rpartition('/')[0]}", (200, resources))
    double.on(LIST, answer)
    double.on("GET /api/v1/pods", answer)
    async with served(double) as api, asyncio.timeout(PATIENCE_S):
        runtime = Manager(OperatorConfig(channel=ChannelKind.SILENT, http_address=""), api.connection)
        await runtime.start()
        try:
            await runtime._leadership.held.wait()
            for kind in ("pods", "jobs"):
                await asyncio.sleep(0.1)
                assert not runtime.controller.may_act.is_set(), f"{kind} are not listed"
                release[kind].set()
            await runtime.controller.may_act.wait()
        finally:
            await runtime.stop()
