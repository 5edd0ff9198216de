"""Standby replicas, and the knowledge of a replica that begins to lead."""

from __future__ import annotations

import pytest

from tests.operator.api_double import ApiDouble, pod_json, served
from tests.operator.cluster.test_executor import CORE, accept_all
from tests.operator.controller.test_controller import PATH, make_controller, run_pass
from tests.operator.reconcile_builders import NOW, UID, Row, Want, ago, check, job, stamp, status
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.jobs import status_body
from zerotrain.operator.cluster.store import PodStore, owner_key
from zerotrain.operator.reconcile import reconcile

OWNER = owner_key("ml", UID)


def of_attempt(number: int, index: int, version: int, phase: str = "Running") -> dict[str, object]:
    pod = pod_json(index, version=version, uid=UID, phase=phase)
    pod["metadata"] |= {"name": f"gpt-{number}-{index}", "uid": f"u-{number}-{index}"}
    pod["metadata"]["labels"] |= {"zerotrain.dev/attempt": str(number)}
    return pod


@pytest.mark.ranks
async def test_one_that_stands_by_forgets_the_pods_of_attempts_that_are_over() -> None:
    async with served(ApiDouble()) as api:
        controller, version = make_controller(api), 10
        controller.may_act.clear()
        for attempt in range(1, 20):
            for index in range(8):
                version += 2
                pod = of_attempt(attempt, index, version, "Failed")
                controller.store.put(pod, now=NOW)
                controller.store.remove(pod, now=NOW)
            stored = status("Running", attempt, workers={"desired": 2, "running": 2, "ready": 2})
            controller.job_changed(job(status=stored, resourceVersion=str(version)))
            await run_pass(controller)
        assert {pod.attempt for pod in controller.store.of_job(OWNER)[1]} == {19}


@pytest.mark.ranks
@pytest.mark.parametrize("is_old", [True, False])
async def test_pods_of_a_later_attempt_say_that_the_job_must_be_read_again(is_old: bool) -> None:
    """The actions of an outdated view need not conflict with anything. Forged pods block nothing for good."""
    double = ApiDouble()
    accept_all(double)
    shape = {"workers": 2, "gracePeriodSeconds": 60, "generation": 1}
    waiting = status("Pending", 3, podsCreated=False, attemptStartTime=stamp(ago(300)), shape=shape)
    async with served(double) as api:
        controller = make_controller(api)
        for index in (0, 1):
            controller.store.put(of_attempt(4, index, 50 + index), now=NOW)
        observed = controller.job_states.observe("ml", UID, controller.store)
        plan = reconcile(job(status=waiting), observed, controller.clock())
        assert plan.status is not None
        stale = job(status=status_body(plan.status), resourceVersion="30")
        newer = job(status=status("Running", 4), resourceVersion="60")
        double.on(f"GET {PATH}", (200, newer if is_old else stale))
        double.on(f"PUT {PATH}/status", (200, {"metadata": {**newer["metadata"], "resourceVersion": "61"}}))
        controller.job_changed(stale)
        await run_pass(controller)
    made = [body["metadata"]["name"] for body in double.bodies(f"POST {CORE}/pods")]
    assert made == ([] if is_old else ["gpt-3-0", "gpt-3-1"])


@pytest.mark.ranks
async def test_a_status_that_was_reset_starts_no_attempt_beside_the_one_that_has_pods() -> None:
    double = ApiDouble()
    accept_all(double)
    async with served(double) as api:
        controller = make_controller(api)
        for index in (0, 1):
            controller.store.put(of_attempt(4, index, 50 + index), now=NOW)
        reset = job(status={}, resourceVersion="60")
        double.on(f"GET {PATH}", (200, reset))
        double.on(f"PUT {PATH}/status", (200, {"metadata": {**reset["metadata"], "resourceVersion": "61"}}))
        controller.job_changed(reset)
        await run_pass(controller)
    (written,) = double.bodies(f"PUT {PATH}/status")
    assert written["status"]["attempt"] == 4
    assert not double.bodies(f"POST {CORE}/pods")


@pytest.mark.unit
def test_time_without_a_leader_is_none_in_which_pods_could_start() -> None:
    store, job_states = PodStore(), JobStates()
    store.sight.gained(None, now=ago(86_400))
    assert job_states.observe("ml", UID, store).synced_at == ago(86_400)
    job_states.acting_since = ago(30)
    assert job_states.observe("ml", UID, store).synced_at == ago(30)
    job_states.acting_since = ago(90_000)
    assert job_states.observe("ml", UID, store).synced_at == ago(86_400)
    assert job_states.observe("elsewhere", UID, PodStore()).synced_at is None


@pytest.mark.unit
@pytest.mark.parametrize(("acts_s", "ends"), [(30, 0), (700, 1)])
def test_a_start_deadline_counts_from_when_a_leader_acts(acts_s: float, ends: int) -> None:
    shape = {"workers": 2, "gracePeriodSeconds": 60, "generation": 1}
    stored = status("Pending", 2, podsCreated=True, attemptStartTime=stamp(ago(1200)), shape=shape)
    job_states = JobStates(acting_since=ago(acts_s))
    store = PodStore()
    store.sight.gained(None, now=ago(86_400))
    for index in (0, 1):  # bound to their nodes, where their containers do not start
        pod = of_attempt(2, index, 50 + index, "Pending")
        conditions = [{"type": "PodScheduled", "status": "True"}]
        store.put({**pod, "status": {"phase": "Pending", "conditions": conditions}}, now=ago(1200))
    body = job(status=stored, spec={"runPolicy": {"startDeadlineSeconds": 600}})
    plan = reconcile(body, job_states.observe("ml", UID, store), NOW)
    assert plan.status is not None
    assert plan.status.restarts.total == ends


@pytest.mark.unit
def test_a_replica_that_begins_to_lead_waits_for_late_creations() -> None:
    """The previous leader's requests may still be carried out."""
    job_states, store = JobStates(acting_since=ago(1)), PodStore()
    store.sight.gained(None, now=ago(86_400))
    row = Row(
        id="late",
        job=job(status=status("Restarting", 1, podsCreated=False)),
        seen=job_states.observe("ml", UID, store),
        want=Want(phase="Restarting", attempt=1, actions=(), wake_in_s=1),
    )
    check(row)
