"""Creations in flight: a limit for each namespace, and batches that double up to the first error."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from zerotrain.operator.cluster.limits import AT_ONCE, MAX_BATCH, Creations

pytestmark = pytest.mark.unit


class Server:
    """Server that answers when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.made: list[int] = []
        self.refuses: set[int] = set()
        self._in_flight: dict[int, asyncio.Future[None]] = {}

    async def create(self, item: int) -> None:
        self.begun.append(item)
        self._in_flight[item] = asyncio.get_running_loop().create_future()
        await self._in_flight[item]
        if item in self.refuses:
            raise ValueError(f"quota {item}")
        self.made.append(item)

    async def in_flight(self) -> list[int]:
        """Return the items in flight, once all that may begin have begun."""
        for _ in range(20):
            await asyncio.sleep(0)
        return list(self._in_flight)

    def answer(self, *items: int) -> None:
        for item in items:
            self._in_flight.pop(item).set_result(None)


async def batches(server: Server, task: asyncio.Task[int]) -> list[int]:
    """Answer everything, and return how many were in flight together each time."""
    sizes = []
    while items := await server.in_flight():
        sizes.append(len(items))
        server.answer(*items)
    assert task.done()
    return sizes


def start(server: Server, creations: Creations, number: int, *, first: int = 1) -> asyncio.Task[int]:
    return asyncio.create_task(creations.in_batches("ml", range(number), number, server.create, first=first))


@pytest.mark.parametrize(
    ("number", "first", "sizes"),
    [(1, 1, [1]), (4, 1, [1, 2, 1]), (10, 1, [1, 2, 4, 3]), (15, 4, [4, 8, 3]), (0, 1, [])],
)
async def test_batches_double(number: int, first: int, sizes: list[int]) -> None:
    server = Server()
    task = start(server, Creations(), number, first=first)
    assert await batches(server, task) == sizes
    assert await task == number
    assert server.made == list(range(number))


async def test_a_large_job_has_as_many_in_flight_as_a_namespace_may_and_no_more() -> None:
    server = Server()
    task = start(server, Creations(), 1000, first=500)
    sizes = await batches(server, task)
    assert (await task, set(sizes)) == (1000, {AT_ONCE})
    assert MAX_BATCH % AT_ONCE == 0


async def test_an_error_ends_it_with_its_batch() -> None:
    """A quota refuses a thousand pods for one reason. What is in flight comes to its end: a request that is
    cancelled would count against the quota without its object.
    """
    server = Server()
    server.refuses = {4, 5}
    task = start(server, Creations(), 1000)
    for batch in ([0], [1, 2], [3, 4, 5, 6]):
        assert await server.in_flight() == batch
        server.answer(*(item for item in batch if item != 6))
    assert await server.in_flight() == [6]
    assert not task.done()
    server.answer(6)
    with pytest.raises(ValueError, match="quota 4"):
        await task
    assert server.made == [0, 1, 2, 3, 6]


async def test_an_error_stops_those_of_its_batch_that_wait() -> None:
    server = Server()
    server.refuses = {0}
    task = start(server, Creations(), 1000, first=MAX_BATCH)
    server.answer(*await server.in_flight())
    with pytest.raises(ValueError, match="quota 0"):
        await task
    assert server.begun == list(range(AT_ONCE))


async def test_an_item_that_cannot_be_built_is_an_error_like_others() -> None:
    def pods() -> list[int]:
        raise ValueError("no configuration")

    server = Server()
    broken = (pods()[0] for _ in range(10))
    with pytest.raises(ValueError, match="no configuration"):
        await Creations().in_batches("ml", broken, 10, server.create, first=4)


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_when_the_time_is_over_nothing_more_begins(after: int) -> None:
    server = Server()

    def is_over() -> bool:
        return len(server.made) >= after

    task = asyncio.create_task(
        Creations().in_batches("ml", range(1000), 1000, server.create, is_over=is_over)
    )
    await batches(server, task)
    assert await task == max(after, 1), "some progress there always is"


async def test_slots_are_taken_in_the_order_of_requests_and_come_back() -> None:
    creations, order = Creations(1), list[int]()

    async def create(number: int) -> None:
        async with creations.slots("ml"):
            order.append(number)
            await asyncio.sleep(0)
            if number == 1:
                raise ValueError

    await asyncio.gather(*(create(number) for number in range(5)), return_exceptions=True)
    assert order == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("woken", [False, True], ids=["while-it-waits", "when-its-turn-has-come"])
async def test_a_cancelled_creation_keeps_no_slot(woken: bool) -> None:
    creations, server, other = Creations(1), Server(), Server()
    first = start(server, creations, 1)
    assert await server.in_flight() == [0]
    second = start(server, creations, 10)
    third = start(other, creations, 1)
    assert await other.in_flight() == []
    if woken:
        server.answer(0)
        await asyncio.sleep(0)
    second.cancel()
    if not woken:
        server.answer(0)
    await asyncio.gather(first, second, return_exceptions=True)
    assert await other.in_flight() == [0]
    other.answer(0)
    assert await third == 1


@pytest.mark.parametrize("namespaces", [1, 60])
async def test_namespaces_whose_creations_hang_keep_no_other_waiting(namespaces: int) -> None:
    """Webhooks of tenants never answer."""
    creations, hung = Creations(), Counter[str]()

    async def hang(namespace: str) -> None:
        hung[namespace] += 1
        await asyncio.Event().wait()

    hanging = [
        asyncio.create_task(creations.in_batches(name, [name] * 50, 50, hang, first=10))
        for name in (f"slow-{number % namespaces}" for number in range(2 * namespaces))
    ]
    server = Server()
    task = start(server, creations, 100)
    assert sum(await batches(server, task)) == await task == 100
    assert "ml" not in creations._slots, "nothing is kept of a namespace at rest"
    assert set(hung.values()) == {AT_ONCE}, "its own limit holds for what hangs"
    for each in hanging:
        each.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
