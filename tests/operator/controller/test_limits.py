"""The operator's own limits: urgent requests do not wait for others, budgets of keys stay small, and a client
that writes all the time does not make the operator write all the time.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.operator.api_double import FAST, ApiDouble, served
from zerotrain.operator.cluster.api import Request
from zerotrain.operator.cluster.limits import KeyedBuckets, TokenBucket
from zerotrain.operator.controller.controller import (
    CONFLICT_BACKOFF_S,
    FREE_CONFLICTS,
    MAX_CONFLICT_BACKOFF_S,
    conflict_backoff_s,
)


@pytest.mark.unit
async def test_a_renewal_goes_before_a_thousand_creations_and_they_pay_for_it() -> None:
    bucket = TokenBucket(rate=0.001, burst=1)
    await bucket.take()
    waiting = [asyncio.create_task(bucket.take()) for _ in range(1000)]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await bucket.take(urgent=True)
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.ranks
async def test_only_what_asks_for_it_is_urgent() -> None:
    double = ApiDouble()
    double.on("GET /thing", (200, {}))
    slow = replace(FAST, requests_per_second=0.001, burst=1)
    async with served(double, slow) as api:
        await api.call(Request(method="GET", path="/thing", kind="things"))
        await api.call(Request(method="GET", path="/thing", kind="leases", urgent=True))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await api.call(Request(method="GET", path="/thing", kind="things"))
    assert double.asked("GET /thing") == 2


@pytest.mark.unit
def test_a_budget_refills_and_is_each_ones_own() -> None:
    now = [0.0]
    budgets = KeyedBuckets(burst=2, every_s=10.0, max_keys=100, clock=lambda: now[0])
    assert [budgets.try_take("a") for _ in range(3)] == [True, True, False]
    assert budgets.try_take("b")
    now[0] = 10.0
    assert [budgets.try_take("a") for _ in range(2)] == [True, False]
    now[0] = 1e9
    assert [budgets.try_take("a") for _ in range(3)] == [True, True, False]


@pytest.mark.unit
def test_budgets_stay_small() -> None:
    budgets = KeyedBuckets(burst=1, every_s=10.0, max_keys=10)
    for number in range(1000):
        budgets.try_take(str(number))
    assert not budgets.try_take("999")
    assert budgets.try_take("0"), "forgotten, as the longest unused"


@pytest.mark.unit
def test_lost_races_are_run_again_at_once_and_then_ever_more_slowly() -> None:
    waits = [conflict_backoff_s(lost) for lost in range(1, 20)]
    assert waits[:FREE_CONFLICTS] == [0.0] * FREE_CONFLICTS
    assert waits[FREE_CONFLICTS] == CONFLICT_BACKOFF_S
    assert waits == sorted(waits)
    assert waits[-1] == MAX_CONFLICT_BACKOFF_S
