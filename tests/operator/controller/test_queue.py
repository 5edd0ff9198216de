"""The work queue: no key twice at once, no change lost, delays that bring a key once."""

from __future__ import annotations

import asyncio

import pytest

from zerotrain.operator.controller.manager import dead_tasks
from zerotrain.operator.controller.work_queue import MAX_PASSES_WHEN_LATE, MAX_VOID, WorkQueue

pytestmark = pytest.mark.unit


async def take(queue: WorkQueue[str]) -> str:
    async with asyncio.timeout(60):
        return await queue.get()


async def nothing(queue: WorkQueue[str]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await queue.get()


async def test_a_key_that_is_added_twice_is_one_key() -> None:
    queue = WorkQueue[str]()
    queue.add("a")
    queue.add("a")
    assert await take(queue) == "a"
    await nothing(queue)


async def test_a_key_that_is_added_during_its_pass_comes_again_afterwards() -> None:
    queue = WorkQueue[str]()
    queue.add("a")
    assert await take(queue) == "a"
    queue.add("a")
    await nothing(queue)
    queue.done("a")
    assert await take(queue) == "a"


async def test_keys_do_not_wait_for_each_other() -> None:
    queue = WorkQueue[str]()
    queue.add("a")
    queue.add("b")
    assert [await take(queue), await take(queue)] == ["a", "b"]


async def test_a_waiter_wakes_up_for_a_new_key() -> None:
    queue = WorkQueue[str]()
    waiter = asyncio.create_task(take(queue))
    await asyncio.sleep(0)
    queue.add("a")
    assert await waiter == "a"


async def test_of_two_delays_the_earlier_counts_and_the_key_comes_once() -> None:
    queue = WorkQueue[str]()
    queue.add_after("a", 3600)
    queue.add_after("a", 0.01)
    queue.add_after("a", 3600)
    assert await take(queue) == "a"
    queue.done("a")
    await nothing(queue)


async def test_delays_come_in_order() -> None:
    queue = WorkQueue[str]()
    queue.add_after("late", 0.05)
    queue.add_after("early", 0.01)
    assert [await take(queue), await take(queue)] == ["early", "late"]


async def test_a_forgotten_key_does_not_come() -> None:
    queue = WorkQueue[str]()
    queue.add_after("a", 0.01)
    queue.forget("a")
    await nothing(queue)


async def test_a_part_that_died_is_a_problem_of_health() -> None:
    async def dies() -> None:
        raise RuntimeError("gone")

    async def ends() -> None:
        return

    tasks = [
        asyncio.create_task(dies(), name="pod reflector"),
        asyncio.create_task(ends(), name="first list"),
    ]
    await asyncio.wait(tasks)
    assert dead_tasks(tasks) == ["task 'pod reflector' ended: RuntimeError('gone')"]


async def test_an_end_waits_for_the_passes_that_run_and_starts_no_other() -> None:
    queue = WorkQueue[str]()
    queue.add("a")
    queue.add("b")
    assert await take(queue) == "a"
    draining = asyncio.create_task(queue.drain(5))
    await asyncio.sleep(0)
    await nothing(queue)
    assert not draining.done()
    queue.done("a")
    assert await draining == 0


async def test_an_end_does_not_wait_for_ever() -> None:
    queue = WorkQueue[str]()
    queue.add("a")
    await take(queue)
    assert await queue.drain(0.01) == 1


async def test_a_far_deadline_behind_many_near_passes_takes_no_memory_for_each_of_them() -> None:
    """A job with an active deadline has a pass every few seconds for a month."""
    queue = WorkQueue[str]()
    for _ in range(2000):
        queue.add_after("a", 30 * 86400)
        queue.add_after("a", 0)
        assert await take(queue) == "a"
        queue.done("a")
    queue.add_after("a", 30 * 86400)
    queue.add_after("b", 0.01)
    assert len(queue._heap) <= 2 * len(queue._due) + MAX_VOID
    assert await take(queue) == "b"


async def test_what_is_thrown_out_of_the_queue_is_void() -> None:
    queue = WorkQueue[int]()
    for key in range(MAX_VOID):
        queue.add_after(key, 3600)
        queue.add_after(key, 0.05)
    for key in range(MAX_VOID):
        queue.add_after(key + MAX_VOID, 7200)
        queue.add_after(key + MAX_VOID, 0.01)
    taken = [await asyncio.wait_for(queue.get(), 60) for _ in range(2 * MAX_VOID)]
    assert sorted(taken) == list(range(2 * MAX_VOID))


async def test_a_namespace_in_which_a_pass_takes_long_has_no_more_than_so_many_at_once() -> None:
    queue = WorkQueue[str](lambda key: key[0])
    names = [f"a{number:02}" for number in range(MAX_PASSES_WHEN_LATE + 4)]
    for name in (*names, "b"):
        queue.add(name)
    running = [await take(queue) for _ in range(MAX_PASSES_WHEN_LATE + 1)]
    assert running == names[: MAX_PASSES_WHEN_LATE + 1], "none takes long yet"
    queue.passes.late("a00")
    assert await take(queue) == "b"
    await nothing(queue)
    assert len(queue) == 3
    assert not queue.done("a01")
    await nothing(queue)
    queue.add("a02")
    assert not queue.done("a02"), "one place, which the first in line gets"
    assert await take(queue) == names[-3]
    await nothing(queue)
    assert queue.done("a00"), "it was the one that took long"
    assert sorted([await take(queue), await take(queue), await take(queue)]) == ["a02", *names[-2:]]


async def test_whoever_waits_for_a_key_hears_of_those_that_stood_aside() -> None:
    queue = WorkQueue[str](lambda key: key[0])
    for number in range(MAX_PASSES_WHEN_LATE + 2):
        queue.add(f"a{number:02}")
    running = [await take(queue) for _ in range(MAX_PASSES_WHEN_LATE)]
    queue.passes.late("a00")
    waiters = [asyncio.create_task(take(queue)) for _ in range(2)]
    await asyncio.sleep(0)
    for name in running:
        queue.done(name)
    assert sorted([await waiter for waiter in waiters]) == ["a16", "a17"]
