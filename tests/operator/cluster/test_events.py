"""Events: each once, a bounded number per job, and outside of the passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.operator.api_double import ApiDouble, failure, served
from tests.operator.reconcile_builders import job
from zerotrain.operator.cluster import events as module
from zerotrain.operator.cluster.api import Api
from zerotrain.operator.cluster.events import EventWriter
from zerotrain.operator.reconcile import Event

pytestmark = pytest.mark.ranks


EVENTS = "/apis/events.k8s.io/v1/namespaces/ml/events"
POST = f"POST {EVENTS}"
EXISTS = failure(409, "AlreadyExists")


def stored(uid: str = "job-uid") -> dict[str, Any]:
    found = job(resourceVersion="1")
    found["metadata"]["uid"] = uid
    return found


def events(number: int) -> list[Event]:
    return [Event(reason="Killed", message=f"rank {rank}", attempt=1) for rank in range(number)]


@asynccontextmanager
async def sending(api: Api) -> AsyncIterator[EventWriter]:
    """Yield a writer that sends; all is sent at the end of the block."""
    writer = EventWriter(api, instance="test")
    sends = asyncio.create_task(writer.run())
    yield writer
    assert await writer.drain(10) == 0
    sends.cancel()
    await asyncio.wait([sends])


async def emit(api: Api, *batches: Iterable[Event]) -> None:
    async with sending(api) as writer:
        for some in batches:
            writer.emit(stored(), some)


def names(double: ApiDouble) -> list[str]:
    return [body["metadata"]["name"] for body in double.bodies(POST)]


async def test_the_same_event_is_written_once_even_by_another_operator() -> None:
    double = ApiDouble()
    double.on(POST, (201, {}), EXISTS)
    first, second = events(2)
    async with served(double) as api:
        await emit(api, [first], [first])
        await emit(api, [first])
        await emit(api, [second])
    sent = names(double)
    assert sent[0] == sent[1] != sent[2]


async def test_one_that_was_not_written_is_sent_again_when_it_is_emitted_again() -> None:
    double = ApiDouble()
    double.on(POST, failure(422, "Invalid"), (201, {}))
    async with served(double) as api, sending(api) as writer:
        for _ in range(2):
            writer.emit(stored(), events(1))
            assert await writer.drain(10) == 0
    assert len(names(double)) == 2


async def test_a_program_with_ever_new_messages_has_a_budget_of_events() -> None:
    double = ApiDouble()
    double.on(POST, (201, {}))
    async with served(double) as api:
        async with sending(api) as writer:
            writer.emit(stored(), events(200))
            writer.emit(stored("another"), events(1))
        assert double.asked(POST) == module.BURST + 1


async def test_jobs_of_one_namespace_leave_space_for_the_events_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_OF_ONE", 7)
    neighbour = stored("neighbour")
    neighbour["metadata"]["namespace"] = "neighbours"
    double = ApiDouble()
    double.on(POST, (201, {}))
    double.on(POST.replace("/ml/", "/neighbours/"), (201, {}))
    async with served(double) as api:
        async with sending(api) as writer:
            for number in range(10):
                writer.emit(stored(f"uid-{number}"), events(2))
            writer.emit(neighbour, events(1))
            assert writer._waiting_of == {"ml": 7, "neighbours": 1}
        assert not writer._waiting_of
    assert double.asked(POST) == 7
    assert double.asked(POST.replace("/ml/", "/neighbours/")) == 1


async def test_emitting_does_not_block_and_events_beyond_the_queue_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    double = ApiDouble()
    double.on(POST, (201, {}))
    async with served(double) as api:
        writer = EventWriter(api, instance="test")
        writer.emit(stored(), events(5))
        assert double.asked(POST) == 0
        assert await writer.drain(0.01) == 3, "nobody sends"
        sends = asyncio.create_task(writer.run())
        assert await writer.drain(10) == 0
        writer.emit(stored(), events(5))  # those that were left out, for the others are known
        assert await writer.drain(10) == 0
        sends.cancel()
    assert len(set(names(double))) == len(names(double)) == 5
