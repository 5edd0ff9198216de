"""The room of a job that was let in stays its own while its pods are made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.operator.api_double import ApiDouble, served
from tests.operator.test_operator_admission import NOW, by_label, cluster, waiting_job
from tests.operator.test_operator_executor import executor, nobody
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.cluster import capacity
from zerotrain.operator.cluster.actions.admission import claim_of_begun
from zerotrain.operator.cluster.capacity import (
    DUTY,
    MAX_PAUSE_S,
    STARTING_S,
    CapacityBoard,
    _Start,
)
from zerotrain.operator.cluster.errors import Unavailable
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.snapshot import SnapshotReader
from zerotrain.operator.reconcile import AskRoom
from zerotrain.operator.reconcile.claims import Verdict


async def test_a_large_job_keeps_its_room_while_its_pods_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was let in long ago, but with every reading there are more of them."""
    double, body, jobs = ApiDouble(), waiting_job(), JobCache()
    cluster(double)
    async with served(double) as api:
        hands = executor(api)
        one = CapacityBoard(api, hands.memories, lambda key: None, asyncio.Event(), jobs, nobody)
        await hands.perform(body, [AskRoom(shape=AttemptShape(workers=2))])
        (claim,) = hands.memories.claims.values()
    large = replace(claim, uid="large", demand=replace(claim.demand, workers=1000))
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    one._starting["large"] = _Start(large, moved_at=now_s)

    def left(seen: int) -> list[int]:
        reading = replace(SnapshotReader([], by_label, now=NOW).snapshot(), seen={"large": seen})
        return [item.demand.workers for item in one._not_seen_yet(reading)]

    for seen in (0, 200, 400, 600):
        assert left(seen) == [1000 - seen]
        now_s += STARTING_S - 1
    assert left(600) == [400]
    now_s += 2
    assert left(600) == [], "no more came for so long"


def begun(body: dict[str, Any], **status: Any) -> dict[str, Any]:
    """Another job, let in for all places but one, without a pod."""
    metadata = {**body["metadata"], "uid": "other", "name": "other", "resourceVersion": "9"}
    attempt = {"phase": "Pending", "attempt": 1, "shape": {"workers": 17, "gang": "Operator"}}
    return {**body, "metadata": metadata, "status": {**attempt, **status}}


@asynccontextmanager
async def judging(
    body: dict[str, Any], jobs: JobCache
) -> AsyncIterator[Callable[[AskRoom], Awaitable[tuple[Verdict, CapacityBoard]]]]:
    """What is told of a question of this job, by one board that knows of these jobs."""
    double = ApiDouble()
    cluster(double)
    async with served(double) as api:
        hands = executor(api)
        memory, claim_of = hands.memories.of(body["metadata"]["uid"]), partial(claim_of_begun, hands)
        board = CapacityBoard(api, hands.memories, lambda key: None, asyncio.Event(), jobs, claim_of)

        async def judged(question: AskRoom) -> tuple[Verdict, CapacityBoard]:
            await hands.perform(body, [question])
            await board._judge()
            assert memory.capacity is not None
            return memory.capacity, board

        yield judged


@pytest.mark.parametrize(
    ("status", "keeps"),
    [
        pytest.param({}, True, id="its attempt began"),
        pytest.param({"podsCreated": True}, False, id="its pods were all made"),
        pytest.param({"phase": "Completed"}, False, id="it has ended"),
        pytest.param({"shape": {"workers": 17}}, False, id="nobody had counted its room"),
        pytest.param({"shape": {"workers": "two", "gang": "Operator"}}, False, id="nobody understands it"),
    ],
)
async def test_an_operator_that_has_just_begun_keeps_the_room_of_attempts_that_lack_pods(
    status: dict[str, Any], keeps: bool
) -> None:
    """The one before it had let the other job in, and was killed before it had made its pods."""
    body, jobs = waiting_job(), JobCache()
    jobs.put(begun(body, **status))
    async with judging(body, jobs) as judged:
        verdict, _ = await judged(AskRoom(shape=AttemptShape(workers=2)))
    assert verdict.admitted is not keeps


async def test_a_replica_that_leads_again_asks_whom_others_have_let_in_meanwhile() -> None:
    body, jobs = waiting_job(), JobCache()
    async with judging(body, jobs) as judged:
        verdict, board = await judged(AskRoom(shape=AttemptShape(workers=2)))
        assert verdict.admitted
        jobs.put(begun(body))
        board.recall()
        verdict, _ = await judged(AskRoom(shape=AttemptShape(workers=1), growing=True))
        assert verdict.fits == 1, "and what it had let in itself is nobody's any more"


async def test_a_job_that_asks_anew_is_not_in_its_own_way() -> None:
    """It was let in a moment ago, and its attempt is over before it had pods."""
    body = waiting_job()
    async with judging(body, JobCache()) as judged:
        for _ in range(2):
            verdict, _ = await judged(AskRoom(shape=AttemptShape(workers=2)))
            assert verdict.admitted, verdict.message
            verdict, _ = await judged(AskRoom(shape=AttemptShape(workers=18), growing=True))
            assert verdict.fits == 18


async def test_nor_is_it_before_those_that_are_ahead_of_it() -> None:
    body = waiting_job()
    async with judging(body, JobCache()) as judged:
        _, board = await judged(AskRoom(shape=AttemptShape(workers=2)))
        first = board._starting[body["metadata"]["uid"]].claim
        ahead = replace(first, uid="ahead", demand=replace(first.demand, workers=18, priority=9))
        board._memories.of("ahead")
        board._memories.claims["ahead"] = ahead
        verdict, _ = await judged(AskRoom(shape=AttemptShape(workers=4)))
        assert not verdict.admitted


@pytest.mark.parametrize(
    ("took_s", "error", "pause_s"),
    [
        (0.5, None, 0.5 * DUTY),
        (30.0, None, MAX_PAUSE_S),
        (230.0, Unavailable("no answer"), 0.0),
        (230.0, KeyError("metadata"), MAX_PAUSE_S),
    ],
)
async def test_the_pause_after_a_reading_is_bounded_and_failures_do_not_prolong_it(
    took_s: float, error: Exception | None, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that comes meanwhile waits for the next reading, and the client has waited between its tries."""
    now_s, pauses = 0.0, list[float]()

    async def judge() -> None:
        nonlocal now_s
        now_s += took_s
        if error is not None:
            raise error

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        raise asyncio.CancelledError

    async def at_once() -> None:
        pass

    async with served(ApiDouble()) as api:
        hands = executor(api)
        board = CapacityBoard(api, hands.memories, lambda key: None, asyncio.Event(), JobCache(), nobody)
        monkeypatch.setattr(board, "_judge", judge)
        monkeypatch.setattr(board, "_next_round", at_once)
        monkeypatch.setattr(capacity, "time", SimpleNamespace(monotonic=lambda: now_s))
        monkeypatch.setattr(capacity, "asyncio", SimpleNamespace(sleep=sleep))
        with pytest.raises(asyncio.CancelledError):
            await board.run()
    assert pauses == [pause_s]
