"""The room of a job that was let in stays its own while its pods are made."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from tests.operator.api_double import ApiDouble, served
from tests.operator.test_operator_admission import NOW, by_label, cluster, waiting_job
from tests.operator.test_operator_executor import executor
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.cluster.capacity import STARTING_S, CapacityBoard, _Start
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.snapshot import SnapshotReader
from zerotrain.operator.reconcile import AskRoom


async def test_a_large_job_keeps_its_room_while_its_pods_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was let in long ago, but with every reading there are more of them."""
    double, body, jobs = ApiDouble(), waiting_job(), JobCache()
    cluster(double)
    async with served(double) as api:
        hands = executor(api)
        one = CapacityBoard(api, hands.memories, lambda key: None, asyncio.Event(), jobs)
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
