"""Requests to a worker over real HTTP: its whole answer is read, up to a report's size, and no other
worker's.
"""

from __future__ import annotations

import asyncio
import threading

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, served
from zerotrain.contract.progress import Progress
from zerotrain.contract.worker_http import MAX_STACKS_BYTES, WorkerReport
from zerotrain.operator.cluster import channel
from zerotrain.operator.cluster.channel import (
    MAX_REPORT_BYTES,
    ChannelError,
    ChannelKind,
    HttpChannel,
    WorkerAddress,
)

pytestmark = pytest.mark.ranks


WORKER = WorkerAddress(namespace="ml", pod="gpt-1-0", ip="10.0.0.1")
PATH = "/api/v1/namespaces/ml/pods/gpt-1-0:8471/proxy/progress"


def text_of(ranks: int) -> bytes:
    records = tuple(Progress(rank=rank, attempt=1, step=7) for rank in range(ranks))
    report = WorkerReport(job="gpt", job_uid="u", attempt=1, node_rank=0, world_size=ranks, ranks=records)
    return report.to_json().encode()


async def asked(double: ApiDouble) -> WorkerReport:
    async with served(double) as api:
        return await HttpChannel(api, api.session, ChannelKind.PROXY, operator_key=b"k" * 32).report(WORKER)


async def test_a_report_in_many_chunks_is_read_to_its_end() -> None:
    async def slowly(request: web.Request) -> web.StreamResponse:
        response, text = web.StreamResponse(), text_of(8)
        await response.prepare(request)
        for start in range(0, len(text), 500):
            await response.write(text[start : start + 500])
            await asyncio.sleep(0.01)
        return response

    double = ApiDouble()
    double.on(f"GET {PATH}", slowly)
    assert len((await asked(double)).ranks) == 8


async def test_an_endless_answer_is_cut_off() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(4):
            await response.write(b" " * MAX_REPORT_BYTES)
        return response

    double = ApiDouble()
    double.on(f"GET {PATH}", endless)
    with pytest.raises(ChannelError, match="longer than"):
        await asked(double)


@pytest.mark.parametrize(("size", "is_read"), [(MAX_STACKS_BYTES, True), (MAX_STACKS_BYTES + 1, False)])
async def test_stacks_are_as_long_as_a_launcher_sends_them_and_no_longer(size: int, is_read: bool) -> None:
    async def stacks(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * size)

    double = ApiDouble()
    double.on(f"GET {PATH.replace('progress', 'stacks')}", stacks)
    async with served(double) as api:
        caller = HttpChannel(api, api.session, ChannelKind.PROXY, operator_key=b"k" * 32)
        if is_read:
            assert await caller.stacks(WORKER, token="t") == "x" * size
            return
        with pytest.raises(ChannelError, match="longer than"):
            await caller.stacks(WORKER, token="t")


async def test_a_worker_cannot_send_the_operator_elsewhere() -> None:
    async def elsewhere(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "/secret"})

    double = ApiDouble()
    double.on(f"GET {PATH}", elsewhere)
    with pytest.raises(ChannelError, match="307"):
        await asked(double)
    assert double.asked("GET /secret") == 0


@pytest.mark.parametrize(("ranks", "is_beside"), [(8, False), (64, True)])
async def test_a_large_report_is_parsed_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, ranks: int, is_beside: bool
) -> None:
    parse, threads = channel._report, list[threading.Thread]()

    def parsed(text: bytes) -> WorkerReport:
        threads.append(threading.current_thread())
        return parse(text)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=text_of(ranks))

    monkeypatch.setattr(channel, "_report", parsed)
    double = ApiDouble()
    double.on(f"GET {PATH}", answer)
    assert len((await asked(double)).ranks) == ranks
    assert [thread is not threading.main_thread() for thread in threads] == [is_beside]


async def test_a_report_of_many_small_values_is_not_parsed() -> None:
    async def many(request: web.Request) -> web.Response:
        known = text_of(1).removesuffix(b"}")
        return web.Response(body=known + b',"x":[' + b"{}," * 60_000 + b"{}]}")

    double = ApiDouble()
    double.on(f"GET {PATH}", many)
    with pytest.raises(ChannelError, match="commas"):
        await asked(double)


async def test_a_report_keeps_its_slot_until_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of hundreds of workers must not pile up in memory."""
    parse, begun, may_end = channel._report, threading.Event(), threading.Event()

    def parsed(text: bytes) -> WorkerReport:
        begun.set()
        may_end.wait(30)
        return parse(text)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=text_of(64))

    monkeypatch.setattr(channel, "_report", parsed)
    double = ApiDouble()
    double.on(f"GET {PATH}", answer)
    async with served(double) as api:
        caller = HttpChannel(api, api.session, ChannelKind.PROXY, operator_key=b"k" * 32)
        slots = caller._slots[WORKER.call_kind]
        free = slots._value
        call = asyncio.create_task(caller.report(WORKER))
        await asyncio.to_thread(begun.wait, 30)
        assert slots._value == free - 1
        may_end.set()
        assert len((await call).ranks) == 64
        assert slots._value == free
