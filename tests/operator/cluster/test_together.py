"""Parallel parts of an action all end before the action does, also when one of them is refused: nothing runs
beside the job's next pass, or after a replica that ends has given its lease back.
"""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, failure, served
from tests.operator.cluster.test_executor import CORE, CREATE, POLICIES, accept_all, job, make_executor, mine
from zerotrain.operator.cluster.errors import ApiError
from zerotrain.operator.cluster.executor import ActionRefused
from zerotrain.operator.reconcile import Action, DeletePods, KeepShared

pytestmark = pytest.mark.ranks


REFUSED = failure(403, "Forbidden", "denied by policy")


@pytest.mark.parametrize(
    ("action", "refused", "late"),
    [
        pytest.param(CREATE, f"POST {POLICIES}", f"POST {CORE}/secrets", id="create"),
        pytest.param(KeepShared(attempt=1), f"GET {POLICIES}/gpt", f"POST {CORE}/secrets", id="keep"),
        pytest.param(
            DeletePods(names_uids=(("a", "1"), ("b", "2")), grace_s=0),
            f"DELETE {CORE}/pods/a",
            f"DELETE {CORE}/pods/b",
            id="delete",
        ),
    ],
)
async def test_what_was_begun_together_ends_together(action: Action, refused: str, late: str) -> None:
    double, is_refused, ended = ApiDouble(), asyncio.Event(), list[str]()

    async def refuse(_: web.Request) -> web.Response:
        is_refused.set()
        return web.json_response(REFUSED[1], status=REFUSED[0])

    async def answer_late(_: web.Request) -> web.Response:
        await is_refused.wait()
        await asyncio.sleep(0.3)
        ended.append(late)
        return web.json_response(mine({}), status=201)

    accept_all(double)
    double.on(refused, refuse)
    double.on(late, answer_late)
    async with served(double) as api:
        with pytest.raises((ActionRefused, ApiError), match="denied by policy"):
            await make_executor(api).perform(job(), [action])
        assert ended == [late]
