"""Start of the operator while the API server is upgraded: it waits, and still ends where waiting is vain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kubernetes.aio import client

from tests.operator.api_double import FAST, ApiDouble, failure, served
from tests.support.ports import free_port
from zerotrain.operator.cluster import jobs
from zerotrain.operator.cluster.api import Api
from zerotrain.operator.cluster.connection import Connection
from zerotrain.operator.cluster.errors import ApiError, Forbidden, Unavailable
from zerotrain.operator.cluster.jobs import JobClient
from zerotrain.operator.cluster.telemetry import Telemetry
from zerotrain.operator.constants import GROUP, PLURAL, VERSION

pytestmark = pytest.mark.ranks


DISCOVERY = f"GET /apis/{GROUP}/{VERSION}"
KNOWN = (200, {"resources": [{"name": PLURAL}]})
TRIES = FAST.retries + 1
AWAY = "is not available"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SERVED_AGAIN_S", 0.01)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == jobs.__name__]


@asynccontextmanager
async def client_of(port: int, *, in_cluster: bool) -> AsyncIterator[Api]:
    configuration = client.Configuration(host=f"http://127.0.0.1:{port}")
    connection = Connection(configuration=configuration, in_cluster=in_cluster)
    async with Api(connection, FAST, Telemetry()) as api:
        yield api


async def test_waits_for_an_api_server_that_answers_with_503(caplog: pytest.LogCaptureFixture) -> None:
    """The outage lasts longer than the client's own retries, and is logged once each time."""
    double = ApiDouble()
    away = [failure(503, "ServiceUnavailable")] * TRIES
    double.on(DISCOVERY, *away * 3, failure(404, "NotFound"), *away * 2, KNOWN)
    with caplog.at_level(logging.WARNING):
        async with served(double) as api:
            await JobClient(api).wait_until_served()
    lines = logged(caplog)
    assert [AWAY in line for line in lines] == [True, False, True]
    assert "503" in lines[0]
    assert double.asked(DISCOVERY) == 5 * TRIES + 2


async def test_waits_in_a_cluster_for_an_api_server_that_refuses_connections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    double, port = ApiDouble(), free_port()
    double.on(DISCOVERY, KNOWN)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", double.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        async with client_of(port, in_cluster=True) as api, asyncio.timeout(60):
            waiting = asyncio.create_task(JobClient(api).wait_until_served())
            while not any(AWAY in line for line in logged(caplog)):
                assert not waiting.done() or waiting.result()
                await asyncio.sleep(0.01)
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await waiting
    finally:
        await runner.cleanup()
    assert double.asked(DISCOVERY) == 1


async def test_outside_a_cluster_a_server_that_never_answered_may_be_the_wrong_one() -> None:
    async with client_of(free_port(), in_cluster=False) as api:
        with pytest.raises(Unavailable, match="no answer"):
            await asyncio.wait_for(JobClient(api).wait_until_served(), 60)


@pytest.mark.parametrize(
    ("answer", "kind"), [(failure(401, "Unauthorized"), ApiError), (failure(403, "Forbidden"), Forbidden)]
)
async def test_who_may_not_ask_does_not_wait(answer: tuple[int, dict[str, object]], kind: type) -> None:
    double = ApiDouble()
    double.on(DISCOVERY, *[failure(503, "ServiceUnavailable")] * TRIES, answer)
    async with served(double) as api:
        with pytest.raises(kind, match=str(answer[0])):
            await asyncio.wait_for(JobClient(api).wait_until_served(), 60)
