"""The lease is taken when it is free or expired, kept from others, and given back; failed reads only delay
it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.operator.api_double import Answer, ApiDouble, failure, served
from zerotrain.operator.cluster.election import LEASE_S, RENEW_S, RETRY_S, ApiLease, Leadership

LEASES = "/apis/coordination.k8s.io/v1/namespaces/system/leases"
OURS = f"{LEASES}/operator"


def lease(holder: str) -> Answer:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"}
    return 200, {"metadata": {"name": "operator", "resourceVersion": "1"}, "spec": spec}


async def campaign(double: ApiDouble, *, seconds: float = 60.0) -> list[str]:
    """Campaign for the lease until it is held, or for so many seconds; return the events in order."""
    happened: list[str] = []
    async with served(double) as api:
        own = ApiLease(api, namespace="system", name="operator", identity="me")
        leadership = Leadership(
            own, gained=lambda: happened.append("gained"), lost=lambda: happened.append("lost")
        )
        task = asyncio.create_task(leadership.run())
        try:
            async with asyncio.timeout(seconds):
                await leadership.held.wait()
        except TimeoutError:
            happened.append("waited")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return happened


def written(double: ApiDouble, verb: str, path: str) -> list[dict[str, Any]]:
    return [body["spec"] for body in double.bodies(f"{verb} {path}")]


@pytest.mark.ranks
async def test_makes_the_lease_where_there_is_none() -> None:
    double = ApiDouble()
    double.on(f"POST {LEASES}", (201, lease("me")[1]))
    assert await campaign(double) == ["gained", "lost"]
    (spec,) = written(double, "POST", LEASES)
    assert spec["holderIdentity"] == "me"
    assert spec["leaseDurationSeconds"] == 15


@pytest.mark.ranks
async def test_takes_over_its_own_lease_at_once() -> None:
    double = ApiDouble()
    double.on(f"GET {OURS}", lease("me"))
    double.on(f"PUT {OURS}", lease("me"))
    assert await campaign(double) == ["gained", "lost"]


@pytest.mark.ranks
async def test_takes_what_was_given_back() -> None:
    double = ApiDouble()
    double.on(f"GET {OURS}", lease(""))
    double.on(f"PUT {OURS}", lease("me"))
    assert await campaign(double) == ["gained", "lost"]


@pytest.mark.ranks
async def test_keeps_off_a_lease_that_another_holds() -> None:
    double = ApiDouble()
    double.on(f"GET {OURS}", lease("another"))
    assert await campaign(double, seconds=0.5) == ["waited"]
    assert written(double, "PUT", OURS) == []


@pytest.mark.ranks
async def test_gives_the_lease_back_at_the_end() -> None:
    double = ApiDouble()
    double.on(f"GET {OURS}", lease("me"))
    double.on(f"PUT {OURS}", lease("me"))
    await campaign(double)
    assert written(double, "PUT", OURS)[-1]["holderIdentity"] == ""


@pytest.mark.ranks
async def test_does_not_give_back_what_another_took_meanwhile() -> None:
    double = ApiDouble()
    double.on(f"GET {OURS}", lease("me"), lease("another"))
    double.on(f"PUT {OURS}", lease("me"))
    await campaign(double)
    assert all(spec["holderIdentity"] == "me" for spec in written(double, "PUT", OURS))


@pytest.mark.ranks
async def test_an_error_is_a_reason_to_wait_not_to_end() -> None:
    double = ApiDouble()
    double.on(f"GET {OURS}", failure(500, "Down"), lease("me"))
    double.on(f"PUT {OURS}", lease("me"))
    assert await campaign(double) == ["gained", "lost"]


@pytest.mark.ranks
async def test_a_missing_namespace_is_reported_with_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    double = ApiDouble()
    double.on(f"POST {LEASES}", failure(404, "NotFound", 'namespaces "system" not found'))
    assert await campaign(double, seconds=3.0) == ["waited"]
    assert "create the namespace system or set ZEROTRAIN_OPERATOR_NAMESPACE" in caplog.text


class Clock:
    """Clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ScriptedLease(ApiLease):
    """Lease that is read and written as the test says; no API server is involved."""

    def __init__(self, holder: str = "", *, answers: bool = True) -> None:
        self.name, self.namespace, self.identity = "operator", "system", "me"
        self._body = lease(holder)[1]
        self.renewal, self.answers = 0, answers

    def renew(self, holder: str) -> None:
        """Write the lease as another holder."""
        self.renewal += 1
        self._body = {"spec": {"holderIdentity": holder, "renewTime": str(self.renewal)}}

    async def read(self) -> bool:
        return self.answers

    async def write(self, holder: str) -> bool:
        if self.answers and self.holder in ("", self.identity, "dead"):
            self.renew(holder)
            return True
        return False


def leadership(lease_: ScriptedLease, clock: Clock) -> Leadership:
    return Leadership(lease_, gained=lambda: None, lost=lambda: None, clock=clock)


@pytest.mark.unit
async def test_a_dead_holder_is_followed_within_the_lease_and_one_retry() -> None:
    """The worst case is a renewal right after a read: it is seen one pause later."""
    clock, kept = Clock(), ScriptedLease("dead")
    standby = leadership(kept, clock)
    await standby.campaign()
    kept.renew("dead")
    died_at = clock.now
    pause = RETRY_S
    while not standby.held.is_set():
        clock.now += pause
        pause = await standby.campaign()
    assert clock.now - died_at <= LEASE_S + RETRY_S + 0.001
    assert LEASE_S + RETRY_S < 20


@pytest.mark.unit
async def test_a_holder_that_renews_is_never_robbed() -> None:
    clock, kept = Clock(), ScriptedLease("another")
    standby = leadership(kept, clock)
    for _ in range(100):
        kept.renew("another")
        await standby.campaign()
        clock.now += RENEW_S
    assert not standby.held.is_set()


@pytest.mark.unit
async def test_a_process_that_was_stopped_knows_before_its_first_request() -> None:
    clock, kept = Clock(), ScriptedLease()
    leader = leadership(kept, clock)
    await leader.campaign()
    assert (leader.held.is_set(), leader.fresh) == (True, True)
    clock.now += LEASE_S + 1
    assert (leader.held.is_set(), leader.fresh) == (True, False)
    await leader.campaign()
    assert (leader.held.is_set(), leader.fresh) == (True, True), "nobody took it meanwhile"


@pytest.mark.unit
async def test_a_leader_that_sees_another_holder_steps_down_at_once() -> None:
    clock, kept = Clock(), ScriptedLease()
    leader = leadership(kept, clock)
    await leader.campaign()
    kept.renew("another")
    clock.now += RETRY_S
    await leader.campaign()
    assert not leader.held.is_set()


@pytest.mark.unit
async def test_without_an_answer_the_lease_is_given_up_before_it_ends() -> None:
    clock, kept = Clock(), ScriptedLease()
    leader = leadership(kept, clock)
    await leader.campaign()
    kept.answers = False
    while leader.held.is_set():
        clock.now += await leader.campaign()
    assert RENEW_S <= clock.now - 1000.0 - RETRY_S < LEASE_S
