"""An unreadable object costs no other one: on lists, on watches and when all are listed again."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, Json, served
from tests.support.devcluster import PATIENCE_S
from zerotrain.operator.cluster.api import lines_of
from zerotrain.operator.cluster.jobs import ALL_JOBS, JobClient
from zerotrain.operator.cluster.listwatch import (
    FIRST_PAGE,
    MAX_PAGE,
    PAGE_BYTES,
    Listing,
    ListWatch,
    next_limit,
)
from zerotrain.operator.cluster.nodes import PATH, NodeStore

pytestmark = pytest.mark.ranks


def node(name: str, *, version: int, **more: object) -> Json:
    return {"metadata": {"name": name, "uid": name, "resourceVersion": str(version)}, **more}


BAD: Json = {"status": {"conditions": ["not a condition"]}}


@asynccontextmanager
async def nodes_of(listed: list[Json], events: list[bytes]) -> AsyncIterator[NodeStore]:
    """Yield the store after a watch has delivered all of the list and the events."""
    double, store, done = ApiDouble(), NodeStore(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": listed})
        response = web.StreamResponse()
        await response.prepare(request)
        for line in events:
            await response.write(line + b"\n")
        await response.write(
            json.dumps({"type": "ADDED", "object": node("last", version=99)}).encode() + b"\n"
        )
        await asyncio.sleep(PATIENCE_S)
        return response

    double.on(f"GET {PATH}", answer)
    async with served(double) as api, asyncio.timeout(PATIENCE_S):
        watch = ListWatch(api, path=PATH, kind="nodes", sink=store)
        task = asyncio.create_task(watch.run())
        while "last" not in store._known:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
        done.set()
        assert not task.done()
        yield store
        task.cancel()


async def test_a_node_that_cannot_be_read_affects_no_other_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listed = [node("a", version=1), node("bad", version=2, **BAD), node("b", version=3)]
    events = [
        json.dumps({"type": "MODIFIED", "object": node("bad", version=10 + number, **BAD)}).encode()
        for number in range(5)
    ]
    with caplog.at_level(logging.WARNING):
        async with nodes_of(listed, events) as store:
            assert {"a", "b", "last"} == store._known
    assert sum("skipping" in record.getMessage() for record in caplog.records) == 1


async def test_a_node_that_can_no_longer_be_read_is_not_taken_for_one_that_is_gone() -> None:
    store = NodeStore()
    store.put(node("a", version=1))
    watch_keys = {store.key(node("a", version=2, **BAD))}
    store.listed(watch_keys, 5)
    assert store._known == {"a"}


@pytest.mark.parametrize(
    "line", [b"<html>", b'{"type":"ADDED","object":' + b'{"a":' * 5000 + b"1" + b"}" * 5001, b"[" * 100_000]
)
async def test_an_event_that_is_no_json_costs_no_other(line: bytes) -> None:
    async with nodes_of([node("a", version=1)], [line]) as store:
        assert {"a", "last"} == store._known


async def test_jobs_behind_one_that_is_deep_and_one_that_is_fat_are_listed() -> None:
    def job(name: str, config: str) -> str:
        meta = {"name": name, "namespace": "ml", "uid": name, "resourceVersion": "2"}
        text = json.dumps({"metadata": meta, "spec": {"config": "CONFIG"}})
        return text.replace('"CONFIG"', config)

    deep, fat = '{"a":' * 3000 + "1" + "}" * 3000, "[" + ",".join(["{}"] * 450_000) + "]"
    texts = [job("first", "{}"), job("deep", deep), job("fat", fat), job("last", "{}")]
    body = '{"items":[' + ",".join(texts) + '],"kind":"L","metadata":{"resourceVersion":"5"}}'
    double = ApiDouble()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    double.on(f"GET {ALL_JOBS}", answer)
    async with served(double) as api:
        found = {job["metadata"]["name"]: job async for job in JobClient(api).list()}
    assert list(found) == ["first", "deep", "fat", "last"]
    assert [bool(job.get("unread")) for job in found.values()] == [False, True, True, False]


async def test_large_items_are_asked_for_in_small_pages() -> None:
    limits, double = list[int](), ApiDouble()

    async def answer(request: web.Request) -> web.Response:
        limit, start = int(request.query["limit"]), int(request.query.get("continue", "0"))
        limits.append(limit)
        items = [{"metadata": {"name": str(start + number)}, "x": "y" * 200_000} for number in range(limit)]
        more = {"continue": str(start + limit)} if start + limit < 300 else {}
        return web.json_response({"metadata": {"resourceVersion": "5", **more}, "items": items})

    double.on("GET /things", answer)
    async with served(double) as api:
        listing = Listing(api, path="/things", kind="things")
        names = [json.loads(text)["metadata"]["name"] async for text in listing]
    assert names == [str(number) for number in range(len(names))]
    assert limits[0] == FIRST_PAGE
    assert max(limits[1:]) * 200_000 <= PAGE_BYTES


def test_pages_grow_and_shrink_with_what_comes() -> None:
    assert next_limit(FIRST_PAGE, 10_000) == 4 * FIRST_PAGE
    assert next_limit(MAX_PAGE, 10_000) == MAX_PAGE
    assert next_limit(1, 100 << 20) == 1
    assert next_limit(100, 135 << 20) == 2
    assert next_limit(100, PAGE_BYTES) == 100


async def test_a_line_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerotrain.operator.cluster.api.MAX_LINE_BYTES", 1000)

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b'{"a"', b":1}\n{", b"x" * 2000, b"y\n\n", b'{"b":2}\n', b"rest"):
            yield piece

    assert [line async for line in lines_of(pieces())] == [b'{"a":1}', b'{"b":2}']
