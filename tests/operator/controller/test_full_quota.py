"""A full quota rejects also the creation of objects that exist, so they are read first."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from tests.operator.api_double import ApiDouble, Json, failure, pod_json, served
from tests.operator.cluster.test_executor import CORE, CREATE, POLICIES, accept_all, job, make_executor, mine
from tests.operator.controller.test_controller import KEY, make_controller, run_pass, stored
from tests.operator.reconcile_builders import UID
from tests.support.jobs import make_job
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions import workers
from zerotrain.operator.cluster.executor import ActionRefused, Executor
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.constants import Reason
from zerotrain.operator.controller import job_pass
from zerotrain.operator.controller import work_queue as queue_module
from zerotrain.operator.reconcile import CreateWorkers, KeepShared, Plan, SaveLog
from zerotrain.operator.resources import ResourceOptions, network_policy, service_name
from zerotrain.operator.resources.diagnostics import failures_config_map

pytestmark = pytest.mark.ranks


SERVICES, SECRETS, PODS = f"{CORE}/services", f"{CORE}/secrets", f"{CORE}/pods"
FULL = failure(403, "Forbidden", "exceeded quota: team, used: 1, limited: 1")
GONE = failure(404, "NotFound")
NAME = service_name(ZeroTrainingJob.parse(job()))
KEEP = KeepShared(attempt=1)


@pytest.fixture(autouse=True)
def long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the time slice of a pass, so that a machine of any speed makes all pods in one pass."""
    monkeypatch.setattr(workers, "CREATION_WINDOW_S", 600.0)
    monkeypatch.setattr(workers, "SHARED_S", 600.0)


@pytest.mark.parametrize("there", [True, False])
async def test_a_service_of_the_job_is_found_though_no_more_may_be_made(there: bool) -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {SERVICES}", FULL)
    double.on(f"GET {SERVICES}/{NAME}", (200, mine({})) if there else GONE)
    async with served(double) as api:
        if there:
            await make_executor(api).perform(job(), [CreateWorkers(attempt=2, indices=(0, 1))])
        else:
            with pytest.raises(ActionRefused) as caught:
                await make_executor(api).perform(job(), [CREATE])
            assert caught.value.problem.reason == "QuotaExceeded"
    assert double.asked(f"GET {SERVICES}/{NAME}") == 1
    assert double.asked(f"POST {PODS}") == (2 if there else 0)


async def test_a_service_of_another_owner_is_no_way_around_a_quota() -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {SERVICES}", FULL)
    double.on(f"GET {SERVICES}/{NAME}", (200, {"metadata": {"name": NAME}}))
    async with served(double) as api:
        with pytest.raises(ActionRefused, match="belongs to another owner"):
            await make_executor(api).perform(job(), [CREATE])


async def test_what_is_refused_for_another_reason_is_not_looked_for() -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {SERVICES}", failure(403, "Forbidden", "denied by policy"))
    double.on(f"GET {SERVICES}/{NAME}", (200, mine({})))
    async with served(double) as api:
        with pytest.raises(ActionRefused, match="denied by policy"):
            await make_executor(api).perform(job(), [CREATE])
    assert not double.asked(f"GET {SERVICES}/{NAME}")


async def test_a_secret_that_took_the_last_place_holds_up_no_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SHARED_FRESH", timedelta())
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {SECRETS}", (201, {}), FULL)
    async with served(double) as api:
        executor = make_executor(api)
        await executor.perform(job(), [CREATE, CREATE])
        assert double.asked(f"POST {PODS}") == 4
        with pytest.raises(ActionRefused, match="exceeded quota"):  # the next attempt has one of its own
            await executor.perform(job(), [CreateWorkers(attempt=2, indices=(0, 1))])
    assert not [path for verb, path, _ in double.requests if verb == "GET" and "secrets" in path]


@pytest.mark.parametrize(("attempt", "refused"), [(1, False), (2, True)])
async def test_another_process_made_it_where_pods_of_the_attempt_exist(attempt: int, refused: bool) -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {SECRETS}", FULL)
    async with served(double) as api:
        executor = make_executor(api)
        uid = job()["metadata"]["uid"]
        executor.store.put(pod_json(0, version=1, uid=uid), now=datetime.now(UTC))
        action = CreateWorkers(attempt=attempt, indices=(1,))
        if refused:
            with pytest.raises(ActionRefused, match="exceeded quota"):
                await executor.perform(job(), [action])
        else:
            await executor.perform(job(), [action])
    assert double.asked(f"POST {PODS}") == (not refused)


async def test_a_running_attempt_is_not_refused_its_own_secret() -> None:
    double, wanted = ApiDouble(), network_policy(make_job(), ResourceOptions())["spec"]
    double.on(f"POST {SECRETS}", FULL)
    double.on(f"POST {SERVICES}", FULL)
    double.on(f"GET {SERVICES}/{NAME}", (200, mine({})))
    double.on(f"GET {POLICIES}/gpt", (200, mine({"spec": wanted})))
    async with served(double) as api:
        executor = make_executor(api)
        await executor.perform(job(), [KEEP])
        assert executor.job_states.of(job()["metadata"]["uid"]).shared_at is not None


@pytest.mark.parametrize("there", [True, False])
async def test_a_later_failures_lines_are_kept_in_addition_to_the_first_ones(there: bool) -> None:
    double = ApiDouble()
    kept = failures_config_map(ZeroTrainingJob.parse(job()), {"attempt-1.log": "first"})
    maps, path = f"{CORE}/configmaps", f"{CORE}/configmaps/{kept['metadata']['name']}"
    double.on(f"POST {maps}", FULL)
    found = {**kept, "metadata": {**kept["metadata"], "uid": "map-uid"}}
    double.on(f"GET {path}", (200, found) if there else GONE)
    double.on(f"PATCH {path}", (200, {}))
    action = SaveLog(attempt=2, pod="gpt-2-0", rank=0, key="attempt-2.log", title="second")
    async with served(double) as api:
        executor = make_executor(api)
        await executor.perform(job(), [action])
        known = executor.job_states.of(job()["metadata"]["uid"]).log
    assert known is not None
    if there:
        assert not known.error
        assert [body["data"].keys() for body in double.bodies(f"PATCH {path}")] == [{"attempt-2.log"}]
    else:
        assert "exceeded quota" in known.error


@pytest.mark.parametrize(
    ("wake_s", "waits"), [(10.0, [10.0, 16.0]), (100.0, [100.0, 16.0]), (0.0, [5.0, 16.0])]
)
async def test_a_deadline_holds_where_an_action_is_refused(
    wake_s: float, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one of deadline and backoff triggers the pass; one that is due now leaves a pause."""
    now, asked = datetime.now(UTC), list[float]()

    async def refuse(_: Executor, __: Json, ___: object) -> None:
        raise ActionRefused(Reason.QUOTA_EXCEEDED, "exceeded quota: team")

    plan = Plan(status=None, events=(), actions=(CREATE,), wake_at=now + timedelta(seconds=wake_s))
    monkeypatch.setattr(job_pass, "reconcile", lambda *_: plan)
    monkeypatch.setattr(Executor, "perform", refuse)
    monkeypatch.setattr(queue_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    async with served(ApiDouble()) as api:
        controller = replace(make_controller(api), clock=lambda: now)
        add_after = controller.queue.add_after

        def note(key: JobKey, wait_s: float) -> None:
            asked.append(wait_s)
            add_after(key, wait_s)

        monkeypatch.setattr(controller.queue, "add_after", note)
        memory = controller.job_states.of(UID)
        memory.failures, memory.problem = 4, ActionRefused(Reason.QUOTA_EXCEEDED, "before").problem
        controller.job_changed(stored())
        await run_pass(controller)
        assert asked == waits
        assert controller.queue._due[KEY] == min(waits)
