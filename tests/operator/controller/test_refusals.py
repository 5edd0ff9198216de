"""Rejections by the API server, and errors while a webhook is down: reported, and no obstacle for other
jobs.
"""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, failure, served
from tests.operator.cluster.test_executor import CORE, accept_all, job, make_executor
from tests.operator.controller.test_controller import KEY, PATH, make_controller, run_pass
from tests.operator.reconcile_builders import UID, ago, stamp, status
from tests.operator.reconcile_builders import job as job_of
from zerotrain.operator.cluster.errors import Unavailable
from zerotrain.operator.cluster.executor import ActionRefused
from zerotrain.operator.constants import Reason
from zerotrain.operator.controller import controller as module
from zerotrain.operator.controller import job_pass
from zerotrain.operator.reconcile import DeletePods, DeleteWorkers, Plan, ProtectWorkers, SaveLog

pytestmark = pytest.mark.ranks


WEBHOOK_DOWN = failure(500, "InternalError", 'failed calling webhook "x": refused')
SAVE = SaveLog(attempt=1, pod="gpt-1-0", rank=0, key="attempt-1.log", title="t")
EVENTS = "/apis/events.k8s.io/v1/namespaces/ml/events"
BUDGETS = "/apis/policy/v1/namespaces/ml/poddisruptionbudgets"
REMOVE = DeletePods(names_uids=(("gpt-1-0", "u"),), grace_s=1)


def with_log(double: ApiDouble) -> None:
    async def text(_: web.Request) -> web.Response:
        return web.Response(text="boom\n")

    double.on(f"GET {CORE}/pods/gpt-1-0/log", text)
    double.on(f"DELETE {CORE}/pods/gpt-1-0", (200, {}))


async def test_a_log_that_a_webhook_keeps_from_being_stored_keeps_no_pod() -> None:
    double = ApiDouble()
    with_log(double)
    double.on(f"POST {CORE}/configmaps", WEBHOOK_DOWN)
    async with served(double) as api:
        executor = make_executor(api)
        await executor.perform(job(), [SAVE, REMOVE])
        kept = executor.job_states.of(job()["metadata"]["uid"]).log
    assert double.asked(f"DELETE {CORE}/pods/gpt-1-0") == 1
    assert kept is not None
    assert "failed calling webhook" in kept.error


async def test_one_that_an_api_server_in_trouble_does_not_take_is_tried_again_first() -> None:
    double = ApiDouble()
    with_log(double)
    double.on(f"POST {CORE}/configmaps", failure(503, "ServiceUnavailable", "apiserver is shutting down"))
    async with served(double) as api:
        with pytest.raises(Unavailable):
            await make_executor(api).perform(job(), [SAVE, REMOVE])
    assert double.asked(f"DELETE {CORE}/pods/gpt-1-0") == 0


async def test_that_a_webhook_is_down_stands_in_the_conditions() -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {CORE}/pods", WEBHOOK_DOWN)
    stored = status("Pending", 1, podsCreated=False, attemptStartTime=stamp(ago(60)))
    body = job_of(status=stored, resourceVersion="1")
    written = job_of(status=stored, resourceVersion="2")["metadata"]
    double.on(f"PUT {PATH}/status", (200, {"metadata": written}))
    async with served(double) as api:
        controller = make_controller(api)
        controller.job_changed(body)
        for _ in range(3):
            await run_pass(controller)
        problem = controller.job_states.of(UID).problem
    assert problem is not None
    assert "failed calling webhook" in problem.message
    conditions = double.bodies(f"PUT {PATH}/status")[-1]["status"]["conditions"]
    assert any("failed calling webhook" in item["message"] for item in conditions)


@pytest.mark.parametrize("answer", [(403, "Forbidden"), (422, "Invalid"), (500, "InternalError")])
async def test_so_does_any_other_action_that_is_refused(answer: tuple[int, str]) -> None:
    double = ApiDouble()
    double.on(f"DELETE {CORE}/pods", failure(*answer, "a policy says no"))
    async with served(double) as api:
        with pytest.raises(ActionRefused, match="a policy says no") as refused:
            await make_executor(api).perform(job(), [DeleteWorkers(attempt=1, grace_s=1)])
    assert refused.value.problem.reason == Reason.API_REFUSED


@pytest.mark.parametrize("answer", [(403, "Forbidden"), (422, "Invalid")])
async def test_a_refused_budget_of_a_job_that_trains_waits_for_the_backoff(
    answer: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every report of a rank brings a pass, and a policy of the cluster may refuse the budgets of all
    jobs.
    """
    actions = (DeleteWorkers(attempt=1, grace_s=1), ProtectWorkers(attempt=2, workers=2))
    plan = Plan(status=None, events=(), actions=actions, wake_at=None)
    monkeypatch.setattr(job_pass, "reconcile", lambda *_: plan)
    double = ApiDouble()
    double.on(f"DELETE {CORE}/pods", (200, {}))
    double.on(f"POST {BUDGETS}", failure(*answer, "no budget may block all evictions"))
    async with served(double) as api:
        controller = make_controller(api)
        controller.job_changed(job_of(resourceVersion="1"))
        for number in range(1, 6):
            controller.queue.add(KEY)
            await run_pass(controller)
            assert double.asked(f"POST {BUDGETS}") == 1, "tried once"
            assert double.asked(f"DELETE {CORE}/pods") == number, "other actions do not wait"
        state = controller.job_states.of(UID)
        assert state.problem is not None
        assert "may block" in state.problem.message
        state.refused_until = 0.0
        double.on(f"POST {BUDGETS}", (201, {}))
        controller.queue.add(KEY)
        await run_pass(controller)
        assert double.asked(f"POST {BUDGETS}") == 2
        assert state.problem is None


async def test_an_error_of_the_operators_own_is_an_event_on_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners of jobs cannot read the log. An event lasts for an hour, the error may last longer."""

    def broken(*_: object) -> Plan:
        raise KeyError("shape")

    monkeypatch.setattr(job_pass, "reconcile", broken)
    monkeypatch.setattr(module, "REPORT_EVERY", 2)
    double = ApiDouble()
    double.on(f"POST {EVENTS}", (201, {}))
    async with served(double) as api:
        controller = make_controller(api)
        controller.job_changed(job_of(resourceVersion="1"))
        for _ in range(3):
            await run_pass(controller)
            controller.queue.add(KEY)
        sender = asyncio.create_task(controller.events.run())
        assert not await controller.events.drain(60)
        sender.cancel()
    first, second = double.bodies(f"POST {EVENTS}")
    assert (first["reason"], first["type"], first["regarding"]["name"]) == ("InternalError", "Warning", "gpt")
    assert "(failure 1 in a row) and tries again: KeyError: 'shape'" in first["note"]
    assert "(failure 3 in a row)" in second["note"]
