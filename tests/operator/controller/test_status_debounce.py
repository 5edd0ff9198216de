"""A status that the API server rejects is retried at growing intervals, and the rejection is reported."""

from __future__ import annotations

from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, failure, served
from tests.operator.controller.test_controller import KEY, PATH, make_controller, stored
from tests.operator.reconcile_builders import UID
from tests.support.ports import free_port
from zerotrain.operator.api import Phase, ZeroTrainingJobStatus
from zerotrain.operator.api.status import Count
from zerotrain.operator.cluster.errors import Forbidden, Unprocessable
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.cluster.telemetry import Telemetry
from zerotrain.operator.controller import job_pass as module
from zerotrain.operator.controller.health import serve
from zerotrain.operator.controller.status_debounce import StatusDebounce
from zerotrain.operator.reconcile import Plan

pytestmark = pytest.mark.ranks

PUT = f"PUT {PATH}/status"
DUE = [1, 3, 5, 9, 17, 33, 65, 125, 185]
"""Seconds of the tries, 1, 2, 4 ... 60 s apart. At second 2 there is a change that may wait to be batched."""


@pytest.mark.parametrize("status", [403, 422])
async def test_passes_in_between_bring_no_try_forward(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Every second there is a pass, by turns with a change that may wait to be batched and with one that may
    not.
    """
    now = 0

    def changing(*_: object) -> Plan:
        attempt = 2 if now % 2 else 1
        state = ZeroTrainingJobStatus(phase=Phase.RUNNING, attempt=attempt, workers=Count(ready=now))
        return Plan(status=state, events=(), actions=(), wake_at=None)

    monkeypatch.setattr(module, "reconcile", changing)
    double, tried = ApiDouble(), list[int]()
    double.on(PUT, failure(status, "Invalid", "Unsupported value"))
    async with served(double) as api:
        controller = replace(make_controller(api), statuses=StatusDebounce(clock=lambda: float(now)))
        controller.job_changed({**stored(), "status": {"phase": "Running", "attempt": 1}})
        for now in range(200):
            before = double.asked(PUT)
            await controller._pass(KEY)
            tried += [now] * (double.asked(PUT) - before)
        assert tried == DUE
        (line,) = controller.statuses.lines()
        assert line.startswith(
            "the status of 1 job cannot be written, so the status shown is outdated; ml/gpt: "
        )
        assert "Unsupported value" in line


async def test_a_status_that_is_written_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(*_: object) -> Plan:
        status = ZeroTrainingJobStatus(phase=Phase.RUNNING, attempt=2)
        return Plan(status=status, events=(), actions=(), wake_at=None)

    monkeypatch.setattr(module, "reconcile", changing)
    double, now = ApiDouble(), 0.0
    double.on(
        PUT, failure(422, "Invalid"), (200, {"metadata": {**stored()["metadata"], "resourceVersion": "2"}})
    )
    async with served(double) as api:
        controller = replace(make_controller(api), statuses=StatusDebounce(clock=lambda: now))
        controller.job_changed({**stored(), "status": {"phase": "Running", "attempt": 1}})
        await controller._pass(KEY)
        assert len(controller.statuses) == 1
        await controller._pass(KEY)
        assert double.asked(PUT) == 1
        now = 1.0
        await controller._pass(KEY)
        assert (double.asked(PUT), len(controller.statuses), controller.statuses.lines()) == (2, 0, [])


async def test_a_job_that_is_deleted_while_its_status_is_rejected_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan(status=ZeroTrainingJobStatus(phase=Phase.RUNNING, attempt=2))
    monkeypatch.setattr(module, "reconcile", lambda *_: plan)

    async def going(_: web.Request) -> web.Response:
        controller.job_deleted(stored())
        return web.json_response(failure(422, "Invalid")[1], status=422)

    double = ApiDouble()
    double.on(PUT, going)
    async with served(double) as api:
        controller = make_controller(api)
        controller.job_changed({**stored(), "status": {"phase": "Running", "attempt": 1}})
        await controller._pass(KEY)
        assert (double.asked(PUT), len(controller.statuses)) == (1, 0)


def test_a_deleted_job_is_no_longer_reported() -> None:
    statuses, error = StatusDebounce(clock=lambda: 0.0), Unprocessable("PUT status: 422", status=422)
    for uid in ("a", "b"):
        statuses.refused(uid, JobKey("ml", uid), error)
    assert "the status of 2 jobs cannot be written" in statuses.lines()[0]
    statuses.prune({"b"})
    assert "the status of 1 job cannot be written" in statuses.lines()[0]
    statuses.settled("b")
    assert statuses.lines() == []


async def test_readyz_reports_it_and_stays_ready() -> None:
    """One tenant's object must not make the operator unready for all."""
    statuses = StatusDebounce()
    statuses.refused(UID, KEY, Forbidden("PUT status: 403 may not", status=403))
    port = free_port()
    stop = await serve(
        f"127.0.0.1:{port}",
        problems=list,
        synced=lambda: True,
        unreadable=statuses.lines,
        registry=Telemetry().registry,
        before_scrape=lambda: None,
    )
    url = f"http://127.0.0.1:{port}/readyz"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        lines = (await answer.text()).splitlines()
        assert (answer.status, lines[0], len(lines)) == (200, "ok", 2)
        assert "PUT status: 403 may not" in lines[1]
    await stop()
