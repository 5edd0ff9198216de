"""The first attempt of a small job does not wait for a status write, and none is lost by that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.operator.api_double import ApiDouble, Json, served
from tests.operator.reconcile_builders import UID, job
from tests.operator.test_operator_controller import KEY, PATH, controller, turn
from zerotrain.operator.handlers.controller import Controller

CORE = "/api/v1/namespaces/ml"
STATUS = f"PUT {PATH}/status"
WRITTEN = (200, {"metadata": {"name": "gpt", "namespace": "ml", "uid": UID, "resourceVersion": "9"}})


def unwritten(**changes: Any) -> Json:
    body = job(resourceVersion="1", **changes)
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


async def began(hands: Controller, body: Json) -> None:
    hands.job_changed(body)
    await turn(hands)


async def test_pods_come_first_and_the_status_soon_after() -> None:
    double = accepting()
    async with served(double) as api:
        hands = controller(api)
        await began(hands, unwritten())
        assert (double.asked(f"POST {CORE}/pods"), double.asked(STATUS)) == (2, 0)
        await turn(hands)  # nothing has changed, but the write is due
        (sent,) = double.bodies(STATUS)
        assert sent["status"]["attempt"] == 1
        assert not hands.jobs.owes(UID)


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
        hands = controller(api)
        body = unwritten()
        body["spec"] = {**body["spec"], **spec}
        await began(hands, body)
        assert double.asked(STATUS) == 1


async def test_an_edit_of_the_job_does_not_take_the_status_away() -> None:
    double = accepting()
    async with served(double) as api:
        hands = controller(api)
        await began(hands, unwritten())
        edited = unwritten()
        edited["metadata"]["resourceVersion"] = "7"
        edited["metadata"]["labels"] = {"team": "a"}
        hands.job_changed(edited)
        held = hands.jobs.get(KEY)
        assert held is not None
        assert (held["status"]["attempt"], held["metadata"]["labels"]) == (1, {"team": "a"})
        await asyncio.sleep(0.2)
        await turn(hands)
        (sent,) = double.bodies(STATUS)
        assert (sent["status"]["attempt"], sent["metadata"]["resourceVersion"]) == (1, "7")


async def test_a_status_of_another_operator_counts_more_than_ours() -> None:
    async with served(accepting()) as api:
        hands = controller(api)
        await began(hands, unwritten())
        theirs = unwritten()
        theirs["metadata"]["resourceVersion"] = "7"
        hands.job_changed({**theirs, "status": {"attempt": 3, "phase": "Running"}})
        held = hands.jobs.get(KEY)
        assert held is not None
        assert (held["status"]["attempt"], hands.jobs.owes(UID)) == (3, False)


async def test_a_job_of_the_same_name_inherits_nothing() -> None:
    async with served(accepting()) as api:
        hands = controller(api)
        await began(hands, unwritten())
        hands.job_deleted(unwritten())
        following = unwritten()
        following["metadata"]["uid"] = "other-uid"
        hands.job_changed(following)
        held = hands.jobs.get(KEY)
        assert held is not None
        assert "status" not in held
