"""Number of creations in flight at once, against API servers that process so many at a time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from zerotrain.operator.cluster.creations import (
    FAST_S,
    LEAST,
    LIMIT_WHEN_HANGING,
    MOST,
    MOST_OF_ONE,
    REST_S,
    Creations,
    Slot,
)

pytestmark = pytest.mark.unit


class Server:
    """Server that works on `places` requests at a time, each for `work_s` of a clock that the test advances;
    the others wait in the order of arrival.
    """

    def __init__(self, places: int, work_s: float) -> None:
        self.now = 0.0
        self.places, self.work_s = places, work_s
        self._free_at = [0.0] * places

    def ends_at(self) -> float:
        place = min(range(self.places), key=self._free_at.__getitem__)
        self._free_at[place] = max(self._free_at[place], self.now) + self.work_s
        return self._free_at[place]

    def answer_first(self, ends: list[tuple[float, int, asyncio.Future[None]]]) -> None:
        """Advance the clock to the earliest end of `ends`, if there is any, and take it out."""
        if ends:
            first = min(ends)
            ends.remove(first)
            self.now = max(self.now, first[0])
            first[2].set_result(None)


async def flood(server: Server, creations: Creations, number: int, limits: list[int]) -> list[float]:
    """Start so many creations at once; return how long each was in flight."""
    took: list[float] = []
    ends: list[tuple[float, int, asyncio.Future[None]]] = []
    numbers: Iterator[int] = count()

    async def create() -> None:
        async with creations.one("ml"):
            began = server.now
            answered = asyncio.get_running_loop().create_future()
            ends.append((server.ends_at(), next(numbers), answered))
            await answered
        took.append(server.now - began)

    tasks = [asyncio.create_task(create()) for _ in range(number)]
    while len(took) < number:
        limits.append(creations.limit("ml"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        server.answer_first(ends)
    await asyncio.gather(*tasks)
    return took


async def test_a_fast_api_server_quickly_gets_as_many_as_one_namespace_may_have() -> None:
    server, limits = Server(places=100, work_s=0.02), list[int]()
    creations = Creations(clock=lambda: server.now)
    took = await flood(server, creations, 400, limits)
    assert (limits[0], max(limits)) == (LEAST, MOST_OF_ONE)
    assert limits.index(MOST_OF_ONE) < 50, "it doubles with every round"
    assert max(took) == pytest.approx(0.02)


async def test_a_slow_one_gets_no_more_than_it_answers_fast_and_is_never_idle() -> None:
    server, limits = Server(places=2, work_s=0.04), list[int]()
    creations = Creations(clock=lambda: server.now)
    took = await flood(server, creations, 1000, limits)
    # The server makes 50 a second in any case: the limit changes only where creations wait.
    assert server.now == pytest.approx(1000 * 0.04 / 2)
    assert max(took) < 3 * FAST_S, "while it looks for the limit"
    assert max(took[200:]) < 1.5 * FAST_S
    assert max(limits) > LEAST
    assert 8 <= min(limits[200:]) <= max(limits[200:]) <= 15


async def test_the_least_are_sent_however_slow_it_is_and_more_again_once_it_is_not() -> None:
    server, limits = Server(places=1, work_s=1.5), list[int]()
    creations = Creations(clock=lambda: server.now)
    async with creations.one("ml"):  # without any creation in flight the namespace would be forgotten
        await flood(server, creations, 100, limits)
        assert set(limits) <= {LEAST}
        server.places, server.work_s, server._free_at = 100, 0.01, [server.now] * 100
        await flood(server, creations, 1000, limits)
        assert limits[-1] == MOST_OF_ONE


async def test_a_webhook_that_takes_its_time_with_each_does_not_count_as_waiting() -> None:
    server, limits = Server(places=100, work_s=0.4), list[int]()
    creations = Creations(clock=lambda: server.now)
    await flood(server, creations, 200, limits)
    assert limits[-1] == MOST_OF_ONE


async def test_fast_errors_do_not_raise_the_limit() -> None:
    creations = Creations()

    async def refused() -> None:
        async with creations.one("ml"):
            raise ValueError("quota")

    async with creations.one("ml"):
        await asyncio.gather(*(refused() for _ in range(100)), return_exceptions=True)
        assert creations.limit("ml") == LEAST


async def test_what_was_learned_lasts_from_pass_to_pass_and_is_forgotten_at_rest() -> None:
    server, limits = Server(places=100, work_s=0.02), list[int]()
    creations = Creations(clock=lambda: server.now)
    await flood(server, creations, 100, limits)
    server.now += REST_S
    assert creations.limit("ml") == MOST_OF_ONE
    server.now += 1
    assert creations.limit("ml") == LEAST


async def test_an_unused_limit_does_not_grow() -> None:
    creations = Creations()
    for _ in range(100):
        async with creations.one("ml"):
            pass
    assert creations.limit("ml") == LEAST


class Counted(Creations):
    """Creations with a count of the tasks that wait for a slot or have one."""

    wanting = 0

    @asynccontextmanager
    async def one(self, namespace: str) -> AsyncIterator[Slot]:
        self.wanting += 1
        try:
            async with super().one(namespace) as slot:
                yield slot
        finally:
            self.wanting -= 1


async def spread(server: Server, creations: Creations, number: int, **how: Any) -> tuple[int, int]:
    """Return how many of so many were done, and the most that were in flight at once."""
    ends, flying, most = list[tuple[float, int, asyncio.Future[None]]](), 0, 0

    async def act(item: int) -> None:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        answered = asyncio.get_running_loop().create_future()
        ends.append((server.ends_at(), item, answered))
        await answered
        flying -= 1

    task = asyncio.create_task(creations.spread("ml", iter(range(number)), act, **how))
    while not task.done():
        for _ in range(5):
            await asyncio.sleep(0)
        server.answer_first(ends)
    return await task, most


async def test_one_job_alone_quickly_has_its_whole_share_in_flight() -> None:
    server = Server(places=100, work_s=0.02)
    creations = Creations(clock=lambda: server.now)
    assert await spread(server, creations, 200) == (200, math.ceil(0.6 * MOST_OF_ONE))


async def test_who_still_waits_when_the_time_is_over_begins_nothing() -> None:
    server = Server(places=1, work_s=0.1)
    creations = Creations(clock=lambda: server.now)
    done, _ = await spread(server, creations, 200, is_over=lambda: server.now >= 0.45)
    assert 5 <= done < 12, "what was in flight, and nothing after"
    done, _ = await spread(server, creations, 200, is_over=lambda: True)
    assert done == 1, "some progress there always is"


async def test_the_first_error_stops_those_that_wait() -> None:
    begun = list[int]()

    async def refuse(item: int) -> None:
        begun.append(item)
        await asyncio.sleep(0)
        raise ValueError("quota")

    with pytest.raises(ValueError, match="quota"):
        await Creations().spread("ml", iter(range(1000)), refuse)
    assert len(begun) <= LEAST


async def test_what_is_in_flight_when_one_is_refused_comes_to_its_end() -> None:
    """A request that is cancelled would count against the quota without its object."""
    begun, made, going = list[int](), list[int](), asyncio.Event()

    async def act(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ValueError("quota")
        await going.wait()
        made.append(item)

    task = asyncio.create_task(Creations().spread("ml", iter(range(1000)), act))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    going.set()
    with pytest.raises(ValueError, match="quota"):
        await task
    assert made == [item for item in begun if item != 1]
    assert 0 < len(made) < LEAST


async def test_one_job_leaves_slots_for_others() -> None:
    assert 0 < Creations().share("ml") < LEAST
    assert Creations(1).share("ml") == 1


async def test_jobs_that_create_together_ask_for_no_more_than_there_is() -> None:
    """A job that asks for more slots than there are would wait in the middle of a pass."""
    creations, going, most = Creations(), asyncio.Event(), 0
    begun = list[int]()

    async def act(item: int) -> None:
        begun.append(item)
        await going.wait()

    jobs = [asyncio.create_task(creations.spread("ml", iter(range(50)), act)) for _ in range(4)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(begun) == LEAST
    assert creations.share("ml") == LEAST / 4
    going.set()
    while not all(job.done() for job in jobs):
        most = max(most, creations.share("ml") if any(job.done() for job in jobs) else 0)
        await asyncio.sleep(0)
    assert [await job for job in jobs] == [50] * 4
    assert most > LEAST / 4, "the last ones take what the others leave"


async def test_shares_that_do_not_divide_the_limit_leave_no_job_waiting() -> None:
    """Five jobs share eight creations: rounded up, shares of two would make two jobs wait all the time."""
    creations, acting, waited = Counted(), 0, list[int]()

    async def act(item: int) -> None:
        nonlocal acting
        acting += 1
        await asyncio.sleep(0)
        waited.append(creations.wanting - acting)
        acting -= 1

    await asyncio.gather(*(creations.spread("ml", iter(range(50)), act) for _ in range(5)))
    assert len(waited) == 250
    assert set(waited[LEAST : 4 * 50]) == {0}, "once those that came first have made room for the others"


async def test_what_a_job_had_of_its_namespace_is_given_back_however_it_ends() -> None:
    creations = Counted()

    async def refuse(item: int) -> None:
        raise ValueError("quota")

    for _ in range(2 * LEAST):  # tasks of the later ones are cancelled before they ever ran
        with pytest.raises(ValueError, match="quota"):
            await creations.spread("ml", iter(range(50)), refuse)
    assert await spread(Server(places=100, work_s=0.02), creations, 50) == (50, creations.share("ml"))


async def test_slots_are_taken_in_the_order_of_requests_and_come_back() -> None:
    creations, order = Creations(1, least=1), list[int]()

    async def create(number: int) -> None:
        async with creations.one("ml"):
            order.append(number)
            await asyncio.sleep(0)
            if number == 1:
                raise ValueError

    await asyncio.gather(*(create(number) for number in range(5)), return_exceptions=True)
    assert order == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("woken", [False, True], ids=["while-it-waits", "when-its-turn-has-come"])
async def test_a_cancelled_creation_keeps_no_slot(woken: bool) -> None:
    creations, release, done = Creations(1, least=1), asyncio.Event(), list[str]()

    async def hold() -> None:
        async with creations.one("ml"):
            await release.wait()

    async def take(name: str) -> None:
        async with creations.one("ml"):
            done.append(name)

    holder = asyncio.create_task(hold())
    await asyncio.sleep(0)
    first, second = asyncio.create_task(take("first")), asyncio.create_task(take("second"))
    await asyncio.sleep(0)
    if woken:
        release.set()
        await asyncio.sleep(0)
        await holder
    first.cancel()
    if not woken:
        release.set()
    async with asyncio.timeout(10):
        await second
    assert done == ["second"]
    async with asyncio.timeout(10), creations.one("ml"):
        pass


async def test_a_namespace_whose_creations_hang_keeps_no_other_waiting() -> None:
    """A webhook of one tenant never answers; all of its creations want a slot."""
    creations, made = Creations(), list[int]()

    async def hang() -> None:
        async with creations.one("slow"):
            await asyncio.Event().wait()

    async def create(number: int) -> None:
        async with creations.one("other"):
            made.append(number)

    hanging = [asyncio.create_task(hang()) for _ in range(100)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await asyncio.gather(*(create(number) for number in range(MOST)))
    assert made == list(range(MOST))
    await cancelled(hanging)


async def cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("namespaces", [2, 5, 60])
async def test_many_hanging_namespaces_leave_places_to_others(namespaces: int) -> None:
    """The hanging namespaces are more than there are slots for; a few hung creations must not be all that a
    namespace ever gets.
    """
    creations, hung, made = Creations(hangs_s=0.01), Counter[str](), list[str]()
    all_hang = asyncio.Event()

    async def hang(namespace: str) -> None:
        async with creations.one(namespace):
            hung[namespace] += 1
            if len(hung) == namespaces:
                all_hang.set()
            await asyncio.Event().wait()

    async def create(namespace: str) -> None:
        async with creations.one(namespace):
            made.append(namespace)

    hanging = [
        asyncio.create_task(hang(f"slow-{number % namespaces}")) for number in range(namespaces * MOST_OF_ONE)
    ]
    async with asyncio.timeout(30):
        for namespace in ("other", "another"):
            await asyncio.gather(*(create(namespace) for _ in range(MOST)))
        await all_hang.wait()
    assert made == ["other"] * MOST + ["another"] * MOST
    assert max(hung.values()) <= LEAST, "its own bound holds for what hangs as well"
    assert sum(hung.values()) <= 2 * MOST + LIMIT_WHEN_HANGING * namespaces
    await cancelled(hanging)
    async with asyncio.timeout(30):
        await asyncio.gather(*(create("slow-0") for _ in range(MOST)))
    assert len(made) == 3 * MOST, "all places came back"
