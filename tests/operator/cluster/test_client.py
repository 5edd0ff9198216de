"""The API client: which requests it repeats, which errors it raises, and of which type."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from tests.operator.api_double import FAST, ApiDouble, failure, served
from zerotrain.operator.cluster.api import LARGE_EVENT_BYTES, Api, ApiLimits, Request
from zerotrain.operator.cluster.connection import Connection
from zerotrain.operator.cluster.errors import (
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Gone,
    NotFound,
    Unavailable,
    Unprocessable,
)
from zerotrain.operator.cluster.telemetry import Telemetry

pytestmark = pytest.mark.ranks


GET = Request(method="GET", path="/thing", kind="things")


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
async def test_repeats_what_may_pass(code: int) -> None:
    double = ApiDouble()
    double.on("GET /thing", failure(code, "Later"), failure(code, "Later"), (200, {"ok": 1}))
    async with served(double) as api:
        assert await api.call(GET) == {"ok": 1}
    assert double.asked("GET /thing") == 3


async def test_gives_up_after_its_retries() -> None:
    double = ApiDouble()
    double.on("GET /thing", failure(503, "Down"))
    async with served(double) as api:
        with pytest.raises(Unavailable, match="503"):
            await api.call(GET)
    assert double.asked("GET /thing") == FAST.retries + 1


@pytest.mark.parametrize(("patience_s", "tries"), [(600.0, 4), (0.01, 1)], ids=["quick", "slow"])
async def test_a_failure_that_takes_long_is_not_repeated_for_all_retries(
    patience_s: float, tries: int
) -> None:
    """A webhook that hangs for 10 s would keep a job without a reason for over a minute."""

    async def fail(_: web.Request) -> web.Response:
        await asyncio.sleep(0.02)
        return web.json_response({"message": "failed calling webhook"}, status=500)

    double = ApiDouble()
    double.on("GET /thing", fail)
    async with served(double, replace(FAST, patience_s=patience_s)) as api:
        with pytest.raises(Unavailable, match="failed calling webhook"):
            await api.call(GET)
    assert double.asked("GET /thing") == tries


def test_the_client_waits_for_the_answer_to_any_write() -> None:
    """The API server takes 34 s at most: a client that gives up sooner never learns which webhook hangs."""
    assert ApiLimits().timeout_s > 34


TRIES = range(200)
"""Number of draws of the random jitter: so many would surely include one that is too short."""


@pytest.mark.parametrize("own_s", [0.25, 7.0, 8.0], ids="own pause {}".format)
async def test_never_comes_back_sooner_than_the_server_asks(own_s: float) -> None:
    error = Unavailable("later", status=429)
    error.retry_after_s = 7.0
    async with served(ApiDouble(), ApiLimits(first_backoff_s=own_s)) as api:
        pauses = [api.backoff_s(0, error) for _ in TRIES]
    assert min(pauses) >= 7
    assert max(pauses) <= 1.2 * max(7, own_s)
    assert len(set(pauses)) > 1, "those that were refused together come back together"


async def test_its_own_pause_doubles_up_to_a_limit_and_is_jittered_both_ways() -> None:
    async with served(ApiDouble(), ApiLimits(first_backoff_s=0.25, max_backoff_s=8)) as api:
        for attempt, own_s in enumerate([0.25, 0.5, 1, 2, 4, 8, 8]):
            pauses = [api.backoff_s(attempt, Unavailable("later")) for _ in TRIES]
            assert 0.8 * own_s <= min(pauses) < own_s < max(pauses) <= 1.2 * own_s


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (failure(400, "BadRequest"), Unprocessable),
        (failure(403, "Forbidden"), Forbidden),
        (failure(404, "NotFound"), NotFound),
        (failure(409, "Conflict"), Conflict),
        (failure(409, "AlreadyExists"), AlreadyExists),
        (failure(410, "Expired"), Gone),
        (failure(422, "Invalid"), Unprocessable),
    ],
)
async def test_passes_on_what_repeating_cannot_change(
    answer: tuple[int, dict[str, object]], kind: type[ApiError]
) -> None:
    double = ApiDouble()
    double.on("GET /thing", answer)
    async with served(double) as api:
        with pytest.raises(ApiError) as caught:
            await api.call(GET)
    assert type(caught.value) is kind
    assert double.asked("GET /thing") == 1


async def test_no_server_is_unavailable() -> None:
    configuration = client.Configuration(host="http://127.0.0.1:9")
    connection = Connection(configuration=configuration, in_cluster=False)
    async with Api(connection, FAST, Telemetry()) as api:
        with pytest.raises(Unavailable, match="no answer"):
            await api.call(GET)


async def test_counts_every_try_by_code() -> None:
    double = ApiDouble()
    double.on("GET /thing", failure(500, "Later"), (200, {}))
    telemetry = Telemetry()
    async with served(double) as api:
        api.telemetry = telemetry
        await api.call(GET)

    def counted(code: str) -> float | None:
        labels = {"verb": "GET", "resource": "things", "code": code}
        return telemetry.registry.get_sample_value("zerotrain_operator_api_requests_total", labels)

    assert (counted("500"), counted("200")) == (1.0, 1.0)


async def test_a_large_event_of_a_watch_is_read_beside_the_event_loop() -> None:
    events = [{"object": "x" * size} for size in (10, LARGE_EVENT_BYTES, 10)]
    threads = list[threading.Thread]()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"".join(json.dumps(event).encode() + b"\n" for event in events))

    def read(line: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return dict(json.loads(line))

    double = ApiDouble()
    double.on("GET /things", answer)
    async with served(double) as api:
        assert [event async for event in api.watch("/things", {}, kind="things", read=read)] == events
    assert [thread is threading.main_thread() for thread in threads] == [True, False, True]
