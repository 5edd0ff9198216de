"""The status is written before any action; a job whose status cannot be written does not act."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.operator.api_double import ApiDouble, Json, created, failure, served
from tests.operator.controller.test_controller import KEY, PATH, make_controller, run_pass
from tests.operator.reconcile_builders import UID, job, seen, settled, status
from zerotrain.operator.api.planning import PlanMissing
from zerotrain.operator.controller import job_pass as module
from zerotrain.operator.controller.controller import Controller
from zerotrain.operator.controller.status_debounce import StatusDebounce
from zerotrain.operator.reconcile import Plan, reconcile

pytestmark = pytest.mark.ranks


CORE = "/api/v1/namespaces/ml"
STATUS = f"PUT {PATH}/status"
WRITTEN = (200, {"metadata": {"name": "gpt", "namespace": "ml", "uid": UID, "resourceVersion": "9"}})


def unwritten(**changes: Any) -> Json:
    body = job(**{"resourceVersion": "1", **changes})
    body.pop("status", None)
    return body


def accepting() -> ApiDouble:
    double = ApiDouble()
    policies = "/apis/networking.k8s.io/v1/namespaces/ml/networkpolicies"
    for number, path in enumerate((f"{CORE}/services", f"{CORE}/secrets", policies)):
        double.on(f"POST {path}", (201, {"metadata": {"uid": f"s{number}"}}))
    double.on(f"POST {CORE}/pods", created)
    double.on(STATUS, WRITTEN)
    return double


async def began(controller: Controller, body: Json) -> None:
    controller.job_changed(body)
    await run_pass(controller)


@pytest.mark.parametrize("workers", [2, 25])
async def test_the_status_comes_before_everything_else(workers: int) -> None:
    double = accepting()
    async with served(double) as api:
        await began(make_controller(api), unwritten(spec={"workers": workers}))
    (sent,) = double.bodies(STATUS)
    assert sent["status"]["attempt"] == 1
    assert [f"{verb} {path}" for verb, path, _ in double.requests].index(STATUS) == 0
    assert len(double.requests) > 1


REJECTED = [
    pytest.param(failure(409, "Conflict"), id="another client wrote"),
    pytest.param(failure(403, "Forbidden"), id="forbidden"),
    pytest.param(failure(422, "Invalid"), id="invalid"),
    pytest.param(failure(404, "NotFound"), id="deleted"),
]
COUNTED = settled(job(status=status("Pending", podsCreated=False)), seen())
"""Job whose attempt is written, of which all pods are missing."""


@pytest.mark.parametrize("answer", REJECTED)
@pytest.mark.parametrize("attempt", [0, 1], ids=["that begins", "that goes on"])
async def test_without_its_status_a_job_does_not_act(
    answer: Any, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StatusDebounce, "wait_s", lambda *_: 0.0)
    goes_on = {**unwritten(), "status": {**COUNTED["status"], "ranks": {}}}  # the ranks are counted anew
    body, double = unwritten() if attempt == 0 else goes_on, accepting()
    double.on(STATUS, answer)
    double.on(f"GET {PATH}", (200, body))
    async with served(double) as api:
        controller = make_controller(api)
        await began(controller, body)
        assert double.asked(STATUS) == 1
        await controller._pass(KEY)  # another event
    assert not [path for verb, path, _ in double.requests if verb == "POST"]


def later(uid: str = UID, **changes: Any) -> Json:
    return unwritten(resourceVersion="7", uid=uid, generation=2, **changes)


@pytest.mark.parametrize("uid", [UID, "other-uid"], ids=["edited", "made again"])
async def test_news_that_come_while_the_plan_is_made_are_not_lost(
    monkeypatch: pytest.MonkeyPatch, uid: str
) -> None:
    loop = asyncio.get_running_loop()

    def slowly(*known: Any) -> Plan:
        if len(known) == 5:
            raise PlanMissing
        asyncio.run_coroutine_threadsafe(edit_job(), loop).result()
        return reconcile(*known)

    async def edit_job() -> None:
        controller.job_changed(later(uid, spec={"suspend": True}))

    double = accepting()
    async with served(double) as api:
        controller = make_controller(api)
        with monkeypatch.context() as patched:
            patched.setattr(module, "reconcile", slowly)
            await began(controller, unwritten())
        assert not double.requests
        held = controller.jobs.get(KEY)
        assert held is not None
        assert held["metadata"]["uid"] == uid
        await run_pass(controller)  # the pass of the new version
        (sent,) = double.bodies(STATUS)
        assert sent["status"]["phase"] == "Suspended"
        assert not double.asked(f"POST {CORE}/pods")


async def test_late_news_of_a_deleted_job_do_not_hide_the_one_that_has_its_name_now() -> None:
    async with served(accepting()) as api:
        controller = make_controller(api)
        controller.job_changed(unwritten())
        controller.job_changed(later("other-uid"))
        controller.job_changed(unwritten(resourceVersion="5"))
        controller.job_deleted(unwritten(resourceVersion="6"))
        held = controller.jobs.get(KEY)
        assert held is not None
        assert held["metadata"]["uid"] == "other-uid"
        assert "status" not in held
