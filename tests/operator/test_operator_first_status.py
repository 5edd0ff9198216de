"""The first attempt of a small job does not wait for a status write, and no attempt is lost by that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.operator.api_double import ApiDouble, Json, served
from tests.operator.reconcile_builders import NOW, UID, job
from tests.operator.test_operator_controller import KEY, PATH, make_controller, run_pass
from zerotrain.operator.api.planning import PlanMissing
from zerotrain.operator.api.scheduling import Gang
from zerotrain.operator.controller import controller as module
from zerotrain.operator.controller.controller import Controller
from zerotrain.operator.controller.pacing import Pace
from zerotrain.operator.reconcile import Plan, reconcile
from zerotrain.operator.reconcile.observe import ClusterApis

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
    double.on(f"POST {CORE}/pods", (201, {"metadata": {"uid": "p", "resourceVersion": "5"}}))
    double.on(STATUS, WRITTEN)
    return double


async def began(controller: Controller, body: Json) -> None:
    controller.job_changed(body)
    await run_pass(controller)


async def test_pods_come_first_and_the_status_shortly_after() -> None:
    double = accepting()
    async with served(double) as api:
        controller = make_controller(api)
        await began(controller, unwritten())
        assert (double.asked(f"POST {CORE}/pods"), double.asked(STATUS)) == (2, 0)
        await run_pass(controller)  # nothing has changed, but the write is due
        (sent,) = double.bodies(STATUS)
        assert sent["status"]["attempt"] == 1
        assert not controller.jobs.has_unwritten_status(UID)


async def test_the_first_status_waits_as_long_as_jobs_that_start_do(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def wait_s(pace: Pace, uid: str, *, starts: bool = False) -> float:
        asked.append(starts)
        return 60.0

    monkeypatch.setattr(Pace, "wait_s", wait_s)
    double = accepting()
    async with served(double) as api:
        await began(make_controller(api), unwritten())
    assert (asked, double.asked(STATUS)) == ([True], 0)


@pytest.mark.parametrize(
    "spec",
    [
        {"workers": 25},
        {"elastic": {"minWorkers": 1, "maxWorkers": 4}},
    ],
    ids=["large", "elastic"],
)
async def test_others_are_written_before_their_pods(spec: Json) -> None:
    double = accepting()
    async with served(double) as api:
        controller = make_controller(api)
        body = unwritten()
        body["spec"] = {**body["spec"], **spec}
        await began(controller, body)
        assert double.asked(STATUS) == 1


async def test_an_edit_of_the_job_does_not_take_the_status_away() -> None:
    double = accepting()
    async with served(double) as api:
        controller = make_controller(api)
        await began(controller, unwritten())
        edited = unwritten()
        edited["metadata"]["resourceVersion"] = "7"
        edited["metadata"]["labels"] = {"team": "a"}
        controller.job_changed(edited)
        held = controller.jobs.get(KEY)
        assert held is not None
        assert (held["status"]["attempt"], held["metadata"]["labels"]) == (1, {"team": "a"})
        await asyncio.sleep(0.2)
        await run_pass(controller)
        (sent,) = double.bodies(STATUS)
        assert (sent["status"]["attempt"], sent["metadata"]["resourceVersion"]) == (1, "7")


async def test_a_status_of_another_operator_counts_more_than_ours() -> None:
    async with served(accepting()) as api:
        controller = make_controller(api)
        await began(controller, unwritten())
        theirs = unwritten()
        theirs["metadata"]["resourceVersion"] = "7"
        controller.job_changed({**theirs, "status": {"attempt": 3, "phase": "Running"}})
        held = controller.jobs.get(KEY)
        assert held is not None
        assert (held["status"]["attempt"], controller.jobs.has_unwritten_status(UID)) == (3, False)


async def test_a_job_of_the_same_name_inherits_nothing() -> None:
    async with served(accepting()) as api:
        controller = make_controller(api)
        await began(controller, unwritten())
        controller.job_deleted(unwritten())
        following = unwritten()
        following["metadata"]["uid"] = "other-uid"
        controller.job_changed(following)
        held = controller.jobs.get(KEY)
        assert held is not None
        assert "status" not in held


async def test_a_gang_is_written_before_its_pods() -> None:
    """An operator that found its pods could not tell which group they are in."""
    double, groups = accepting(), "/apis/scheduling.k8s.io/v1beta1/namespaces/ml/podgroups"
    double.on(f"POST {groups}", (201, {"metadata": {"uid": "g"}}))
    async with served(double) as api:
        controller = make_controller(api)
        controller.job_states.apis = ClusterApis(at=NOW, gangs={Gang.NATIVE: "scheduling.k8s.io/v1beta1"})
        await began(controller, unwritten(spec={"scheduling": {"gang": "Native"}}))
        (sent,) = double.bodies(STATUS)
        assert sent["status"]["shape"]["gang"] == "scheduling.k8s.io/v1beta1"


@pytest.mark.parametrize("edited", [False, True], ids=["since before", "by an event of now"])
async def test_a_job_known_from_before_this_operator_led_is_written_first(edited: bool) -> None:
    """The former leader may be attempts ahead; the version in the write shows it."""
    double = accepting()
    async with served(double) as api:
        controller = make_controller(api)
        controller.job_changed(unwritten())
        controller.jobs.mark_uncertain()
        if edited:
            controller.job_changed(later())
        await run_pass(controller)
        assert double.asked(STATUS) == (not edited)
        assert double.asked(f"POST {CORE}/pods") == 2


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
        await began(controller, unwritten())
        controller.job_changed(later("other-uid"))
        assert not controller.jobs.has_unwritten_status(UID)
        controller.job_changed(unwritten(resourceVersion="5"))
        controller.job_deleted(unwritten(resourceVersion="6"))
        held = controller.jobs.get(KEY)
        assert held is not None
        assert held["metadata"]["uid"] == "other-uid"
