"""A refusal of a moment lets nobody in: who has begun cannot be taken back."""

from __future__ import annotations

import asyncio
from copy import deepcopy

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, failure, served
from tests.operator.test_operator_admission import board, cluster, waiting_job
from tests.operator.test_operator_executor import executor
from tests.support.devcluster import PATIENCE_S
from zerotrain.operator.api import AttemptShape
from zerotrain.operator.cluster import capacity
from zerotrain.operator.reconcile import AskRoom

WORKERS = 18
"""As many as the cluster holds."""


@pytest.mark.parametrize(("moment_s", "let_in"), [(600.0, 1), (0.0, 3)], ids=["a moment", "for good"])
async def test_gangs_that_wait_are_let_in_uncounted_only_where_nobody_will_count(
    moment_s: float, let_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "SETTLE_S", 0.0)
    monkeypatch.setattr(capacity, "PERIOD_S", 0.05)
    monkeypatch.setattr(capacity, "MOMENT_S", moment_s)
    double, refused = ApiDouble(), failure(403, "Forbidden", "clusterrole not found")
    cluster(double)
    asked = 0

    async def pods(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        status, body = refused if asked <= 2 else (200, {"metadata": {}, "items": []})
        return web.json_response(body, status=status)

    double.on("GET /api/v1/pods", pods)
    uids = [f"u{number}" for number in range(3)]
    async with served(double) as api:
        hands = executor(api)
        for uid in uids:
            body = deepcopy(waiting_job())
            body["metadata"] |= {"uid": uid, "name": f"job-{uid}"}
            hands.memories.of(uid)
            await hands.perform(body, [AskRoom(shape=AttemptShape(workers=WORKERS))])
        async with board(api, hands, 0.0) as changed:
            for _ in uids:
                await asyncio.wait_for(changed.get(), PATIENCE_S)
        verdicts = [hands.memories.of(uid).capacity for uid in uids]
    assert sum(verdict is not None and verdict.admitted for verdict in verdicts) == let_in
