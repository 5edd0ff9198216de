"""A crash at an await point is final: no code of the operator runs after it, not even `finally`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.chaos.awaits import Gate, place_of
from tests.cluster.chaos.operator_run import ignore_unraisable_errors
from tests.cluster.chaos.scenario import collect_errors
from zerotrain.operator.cluster import limits
from zerotrain.operator.cluster.limits import TokenBucket
from zerotrain.operator.controller.work_queue import WorkQueue

pytestmark = pytest.mark.unit


def run(work: Any, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
    loop.set_task_factory(gate.tasks)
    loop.set_exception_handler(lambda _loop, _context: None)
    task = loop.create_task(work)
    task.add_done_callback(lambda _task: loop.stop())
    loop.run_forever()


def half_a_token_at_each_look(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """Let each reading of the clock bring half a token, however slow the machine is: a second token always
    has to be waited for.
    """
    looks = itertools.count()
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: next(looks) / (2 * rate)))


def test_no_step_is_taken_after_the_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    half_a_token_at_each_look(monkeypatch, 1000)
    done: list[str] = []
    places: list[str] = []
    loop = asyncio.new_event_loop()

    async def work() -> None:
        bucket = TokenBucket(rate=1000, burst=1)
        try:
            await bucket.take()
            done.append("first")
            async with asyncio.TaskGroup() as group:
                group.create_task(bucket.take())
                group.create_task(bucket.take())
            done.append("group")
        finally:
            done.append("finally")

    def third(place: str, in_pass: bool) -> bool:
        places.append(place)
        return len(places) == 3

    gate = Gate(third, loop.stop)
    with ignore_unraisable_errors():
        run(work(), gate, loop)
        assert done == ["first"], "code ran after the crash"
        assert len(places) == 3
        assert all(place.startswith("cluster/limits.py:TokenBucket.take:") for place in places)
        loop.close()


def test_errors_of_a_killed_operator_while_it_terminates_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    half_a_token_at_each_look(monkeypatch, 1000)
    log = logging.getLogger("zerotrain.operator.test")
    loop = asyncio.new_event_loop()

    async def work() -> None:
        bucket = TokenBucket(rate=1000, burst=1)
        try:
            await bucket.take()
            await bucket.take()
        finally:
            log.error("unwound")

    gate = Gate(lambda place, in_pass: True, loop.stop)
    with ignore_unraisable_errors(), collect_errors() as errors:
        log.error("alive")
        run(work(), gate, loop)
        loop.close()
        gate.close_coroutines()
        log.error("alive again")
    assert errors == ["alive", "alive again"]


def test_a_run_without_a_crash_is_not_disturbed() -> None:
    loop = asyncio.new_event_loop()
    done: list[int] = []

    async def work() -> None:
        bucket = TokenBucket(rate=1000, burst=1)

        async def one(number: int) -> None:
            await bucket.take()
            done.append(number)

        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(10)
        except TimeoutError:
            done.append(-1)
        await asyncio.gather(*(one(number) for number in range(5)))

    run(work(), Gate(lambda place, in_pass: False, loop.stop), loop)
    loop.close()
    assert done == [-1, 0, 1, 2, 3, 4]


async def test_the_place_is_the_operators_innermost_frame() -> None:
    async def outside() -> None:
        await WorkQueue[str]().get()

    coroutine = outside()
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    place = place_of(coroutine)
    task.cancel()
    assert place is not None
    assert place.startswith("controller/work_queue.py:WorkQueue.")
