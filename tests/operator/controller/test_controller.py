"""State of queue and memory after a pass to which the cluster did not answer as planned."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, Json, failure, served
from tests.operator.reconcile_builders import NOW, UID, job
from zerotrain.operator.api import Phase, ZeroTrainingJobStatus
from zerotrain.operator.cluster.api import Api
from zerotrain.operator.cluster.channel import SilentChannel
from zerotrain.operator.cluster.events import EventWriter
from zerotrain.operator.cluster.executor import ActionRefused, Executor, Unfinished
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.jobs import JobCache, JobClient
from zerotrain.operator.cluster.limits import Creations
from zerotrain.operator.cluster.store import JobKey, PodStore
from zerotrain.operator.cluster.telemetry import Telemetry
from zerotrain.operator.constants import Reason
from zerotrain.operator.controller import controller as module
from zerotrain.operator.controller import job_pass, start_slots
from zerotrain.operator.controller.controller import Controller
from zerotrain.operator.controller.start_slots import LARGE, MAX_LARGE_OF_ONE, StartSlots
from zerotrain.operator.controller.work_queue import WorkQueue
from zerotrain.operator.reconcile import (
    Action,
    CreateWorkers,
    DeleteWorkers,
    Observed,
    Plan,
    Problem,
    ProtectWorkers,
)
from zerotrain.operator.resources import ResourceOptions

pytestmark = pytest.mark.ranks


KEY = JobKey("ml", "gpt")
PATH = "/apis/zerotrain.dev/v1alpha1/namespaces/ml/zerotrainingjobs/gpt"


def make_controller(api: Api) -> Controller:
    store, job_states, may_act = PodStore(), JobStates(), asyncio.Event()
    may_act.set()
    store.sight.gained(None, now=NOW)
    executor = Executor(
        api=api,
        store=store,
        job_states=job_states,
        channel=SilentChannel(),
        options=ResourceOptions(),
        operator_key=b"k" * 32,
        creations=Creations(10),
    )
    return Controller(
        queue=WorkQueue[JobKey](),
        jobs=JobCache(),
        store=store,
        job_states=job_states,
        client=JobClient(api),
        executor=executor,
        events=EventWriter(api, instance="test"),
        telemetry=Telemetry(),
        may_act=may_act,
        leads=lambda: True,
        clock=lambda: datetime.now(UTC),
    )


def stored() -> Json:
    return job(resourceVersion="1")


async def run_pass(controller: Controller) -> None:
    """Run one pass over the next key."""
    async with asyncio.timeout(60):
        key = await controller.queue.get()
    await controller._pass(key)
    controller.queue.done(key)


async def test_a_job_that_exists_is_tried_again_after_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BACKOFF_S", 0.01)
    double = ApiDouble()
    double.on(f"GET {PATH}", (200, stored()))
    double.on(f"PUT {PATH}/status", failure(404, "NotFound"))
    async with served(double) as api:
        controller = make_controller(api)
        controller.job_changed(stored())
        await run_pass(controller)
        await run_pass(controller)


async def test_a_problem_ends_with_the_action_that_caused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> Plan:
        return Plan(status=None, events=(), actions=(), wake_at=None)

    monkeypatch.setattr(job_pass, "reconcile", nothing)
    async with served(ApiDouble()) as api:
        controller = make_controller(api)
        controller.job_states.of(UID).problem = Problem(reason="QuotaExceeded", message="no")
        controller.job_changed(stored())
        await run_pass(controller)
        await run_pass(controller)
        assert controller.job_states.of(UID).problem is None


def elsewhere(uid: str, namespace: str = "open") -> Json:
    found = job(resourceVersion="1")
    name = "gpt" if namespace == "open" else uid
    found["metadata"] = {**found["metadata"], "namespace": namespace, "name": name, "uid": uid}
    return found


async def test_a_job_whose_pods_cannot_be_read_gets_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = []

    def nothing(body: Json, *_: object) -> Plan:
        decided.append(body["metadata"]["namespace"])
        return Plan(status=None, events=(), actions=(), wake_at=None)

    monkeypatch.setattr(job_pass, "reconcile", nothing)
    async with served(ApiDouble()) as api:
        controller = make_controller(api)
        controller.store.sight.lost(None)
        controller.store.sight.gained("open", now=NOW)
        controller.job_changed(stored())
        controller.job_changed(elsewhere("other-uid"))
        await run_pass(controller)
        await run_pass(controller)
        assert decided == ["open"]
        # The list that brings its pods triggers the pass, and none in another namespace.
        controller.store.sight.gained("ml", now=NOW)
        controller.all_changed("ml")
        await run_pass(controller)
        assert decided == ["open", "ml"]


async def test_a_namespace_that_is_refused_is_no_end_of_the_resync() -> None:
    double, of = ApiDouble(), "GET /apis/zerotrain.dev/v1alpha1/namespaces/{}/zerotrainingjobs"
    double.on(of.format("ml"), failure(403, "Forbidden"))
    listed = {"metadata": {}, "items": [elsewhere("other-uid")]}
    double.on(of.format("open"), (200, listed))
    async with served(double) as api:
        controller = replace(make_controller(api), client=JobClient(api, ("ml", "open")))
        controller.jobs.put(stored())
        resync = asyncio.create_task(controller.resync(0.01))
        async with asyncio.timeout(60):
            assert await controller.queue.get() == KEY  # after both lists
        resync.cancel()
        assert controller.jobs.get(JobKey("open", "gpt")) is not None
        # No pass looked for the job that the refused list could not show.
        assert controller.jobs.get(KEY) is not None
        assert not double.asked(f"GET {PATH}")


async def test_nothing_is_remembered_of_a_job_that_goes_in_the_middle_of_its_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(*_: object) -> Plan:
        return Plan(status=ZeroTrainingJobStatus(phase=Phase.SUSPENDING, attempt=1))

    monkeypatch.setattr(job_pass, "reconcile", write)
    double, path = ApiDouble(), "/apis/zerotrain.dev/v1alpha1/zerotrainingjobs"
    double.on(f"GET {path}", (200, {"metadata": {}, "items": [elsewhere("other-uid")]}))
    async with served(double) as api:
        controller = make_controller(api)

        async def going(_: web.Request) -> web.Response:
            controller.job_deleted(stored())
            return web.json_response(stored())

        double.on(f"PUT {PATH}/status", going)
        controller.job_changed(stored())
        await run_pass(controller)
        assert controller.jobs.get(KEY) is None
        resync = asyncio.create_task(controller.resync(0.01))
        async with asyncio.timeout(60):
            assert await controller.queue.get() == JobKey("open", "gpt")  # after the list
        resync.cancel()
        assert not controller.job_states.jobs


async def test_a_refusal_that_names_another_pod_each_time_is_tried_with_a_backoff(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pod that is refused first, and the quota that other jobs use, differ from pass to pass."""
    waits: list[float] = []
    async with served(ApiDouble()) as api:
        controller = make_controller(api)
        monkeypatch.setattr(controller.queue, "add_after", lambda key, delay_s: waits.append(delay_s))
        for number in range(6):
            refusal = ActionRefused(Reason.QUOTA_EXCEEDED, f"exceeded quota: team, used: pods={number}")
            controller._retry(KEY, stored(), refusal)
        assert len(controller.queue) == 1, "once at once, to say so in the conditions"
        assert waits == [2.0, 4.0, 8.0, 16.0, 32.0]
        assert controller.job_states.of(UID).problem == Problem(reason="QuotaExceeded", message=str(refusal))
        controller._retry(
            KEY, stored(), ActionRefused(Reason.NAME_TAKEN, "Service gpt belongs to another owner")
        )
        assert len(waits) == 5, "other news are told at once"


async def test_a_configuration_that_cannot_be_written_for_the_attempt_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gate checks it before; what the gate let through must be reported in the status, not only in the
    log.
    """
    spec = {"workers": 3, "elastic": {"minWorkers": 1, "maxWorkers": 8}}
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}
    state = {"attempt": 2, "shape": {"workers": 3}, "elastic": {"baseWorkers": 4, "requestedWorkers": 3}}
    body = job(spec={**spec, "config": config}, status=state, resourceVersion="1")
    plan = Plan(status=None, events=(), actions=(CreateWorkers(attempt=2, indices=(0, 1, 2)),), wake_at=None)
    monkeypatch.setattr(job_pass, "reconcile", lambda *_: plan)
    async with served(ApiDouble()) as api:
        controller = make_controller(api)
        controller.job_changed(body)
        await run_pass(controller)
        assert len(controller.queue) == 1, "once more at once, to say so in the conditions"
    problem = controller.job_states.of(UID).problem
    assert problem is not None
    assert problem.reason == "InvalidSpec"
    assert problem.message.startswith("spec.config: train_batch_size: must be a multiple of")
    assert problem.message.endswith("are 1, 2, 4, 8. It can be changed while spec.suspend is true.")


async def test_a_job_that_has_pods_left_goes_on_at_once_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(
        status=None, events=(), actions=(CreateWorkers(attempt=1, indices=(0, 1, 2, 3)),), wake_at=None
    )
    performed, problems, done = list[str](), list[bool](), asyncio.Event()
    observed, making = list[bool](), list[bool]()

    async def perform(_: Executor, body: Json, __: object) -> None:
        performed.append(body["metadata"]["name"])
        problems.append(controller.job_states.of(UID).problem is not None)
        making.append(observed[-1])
        if performed[-1] == "other":
            done.set()
        elif len(performed) <= 2:
            raise Unfinished(made=len(performed) - 1)

    def decide(_: object, seen: Observed, *__: object) -> Plan:
        observed.append(seen.creating)
        return plan

    monkeypatch.setattr(job_pass, "reconcile", decide)
    monkeypatch.setattr(Executor, "perform", perform)
    async with served(ApiDouble()) as api:
        monkeypatch.setattr(start_slots, "MAX_SMALL", 1)
        controller = make_controller(api)
        other = stored()
        other["metadata"] = {**other["metadata"], "name": "other", "uid": "other"}
        controller.job_changed(stored())
        controller.job_changed(other)
        job_state = controller.job_states.of(UID)
        job_state.failures, job_state.problem = 3, Problem(reason="QuotaExceeded", message="no")
        problems.clear()
        worker = asyncio.create_task(controller.work())
        async with asyncio.timeout(60):
            await done.wait()
        worker.cancel()
    assert performed == ["gpt", "gpt", "gpt", "other"]
    assert job_state.failures == 0
    assert making == [False, True, True, False]
    assert problems[:3] == [True, True, False], "some were let in"


@pytest.mark.parametrize("pods", [2, LARGE + 1], ids=["small", "large"])
async def test_passes_that_hang_in_some_namespaces_keep_no_pass_of_others(
    pods: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hanging passes are more than may run at once; the webhook that they wait for never answers."""
    hanging, done = list[str](), asyncio.Event()

    async def perform(_: Executor, body: Json, __: object) -> None:
        namespace = body["metadata"]["namespace"]
        if namespace == "other":
            done.set()
            return
        hanging.append(namespace)
        await asyncio.Event().wait()

    create = CreateWorkers(attempt=1, indices=tuple(range(pods)))
    plan = Plan(status=None, events=(), actions=(create,), wake_at=None)
    monkeypatch.setattr(job_pass, "reconcile", lambda *_: plan)
    monkeypatch.setattr(module, "LATE_S", 0.01)
    monkeypatch.setattr(Executor, "perform", perform)
    async with served(ApiDouble()) as api:
        queue = WorkQueue[JobKey](lambda key: key.namespace)
        controller = replace(make_controller(api), starts=StartSlots(queue.passes.are_late), queue=queue)
        for number in range(80):
            controller.job_changed(elsewhere(f"gpt-{number}", f"slow-{number % 10}"))
        controller.job_changed(elsewhere("last", "other"))
        worker = asyncio.create_task(controller.work(2))
        async with asyncio.timeout(60):
            await done.wait()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    assert len(hanging) > 2


async def test_a_job_without_a_slot_still_looks_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline ends also a job that waits for its slot."""
    waits = list[float]()

    def decide(*_: object) -> Plan:
        later = controller.clock() + timedelta(seconds=60 if waits else 1)
        return Plan(status=None, events=(), actions=(CREATE_LARGE,), wake_at=later)

    monkeypatch.setattr(job_pass, "reconcile", decide)
    async with served(ApiDouble()) as api:
        controller = replace(make_controller(api), starts=full_of_large_jobs())
        monkeypatch.setattr(controller.queue, "add_after", lambda key, delay_s: waits.append(delay_s))
        controller.job_changed(stored())
        await run_pass(controller)
        controller.queue.add(KEY)
        await run_pass(controller)
    assert waits == [job_pass.QUEUE_RECHECK_S, 0.0, pytest.approx(60, abs=10)]


async def test_the_status_of_a_large_job_shows_that_it_is_queued() -> None:
    double = ApiDouble()
    double.on(f"PUT {PATH}/status", (200, stored()))
    large = stored()
    large["spec"] = {**large["spec"], "workers": LARGE + 1}
    async with served(double) as api:
        controller = replace(make_controller(api), starts=full_of_large_jobs())
        controller.job_changed(large)
        await run_pass(controller)
        assert not double.requests, "pods of an attempt are not announced before their turn"
        await run_pass(controller)
    (written,) = (body["status"] for body in double.bodies(f"PUT {PATH}/status"))
    messages = {item["type"]: item["message"] for item in written["conditions"]}
    assert "large ones one at a time" in messages["Reconciling"]
    assert not written.get("attempt")


async def test_a_refusal_is_reported_before_the_next_job_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = list[Problem | None]()

    async def refuse(_: Executor, __: Json, ___: object) -> None:
        messages.append(controller.job_states.of(UID).problem)
        raise ActionRefused(Reason.QUOTA_EXCEEDED, "exceeded quota: team")

    plan = Plan(status=None, events=(), actions=(CREATE_LARGE,), wake_at=None)
    monkeypatch.setattr(job_pass, "reconcile", lambda *_: plan)
    monkeypatch.setattr(Executor, "perform", refuse)
    async with served(ApiDouble()) as api:
        starts = full_of_large_jobs(but=1)
        controller = replace(make_controller(api), starts=starts)
        controller.job_changed(stored())
        for _ in range(2):
            key = await controller.queue.get()
            await controller._pass(key)
            assert not starts.enter(JobKey("ml", "next"), pods=LARGE + 1) or len(messages) == 2
            starts.leave(key)
            controller.queue.done(key)
    assert [problem is not None for problem in messages] == [False, True]
    assert starts.enter(JobKey("ml", "next"), pods=LARGE + 1), "who was refused twice has left"


async def test_a_job_that_is_deleted_stands_in_no_line() -> None:
    async with served(ApiDouble()) as api:
        starts = full_of_large_jobs()
        controller = replace(make_controller(api), starts=starts)
        controller.job_changed(stored())
        assert not starts.enter(KEY, pods=LARGE + 1)
        controller.job_deleted(stored())
    assert starts.leave(JobKey("ml", "large-0")) == []


CREATE_LARGE = CreateWorkers(attempt=1, indices=tuple(range(LARGE + 1)))


def full_of_large_jobs(*, but: int = 0) -> StartSlots:
    """Return slots full of large jobs of the job's namespace, with `but` slots left."""
    starts = StartSlots()
    for number in range(MAX_LARGE_OF_ONE - but):
        assert starts.enter(JobKey("ml", f"large-{number}"), pods=1000)
    return starts


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize(
    ("action", "waits"),
    [
        (ProtectWorkers(attempt=1, workers=2), True),
        (CreateWorkers(attempt=1, indices=(0,)), True),
        (DeleteWorkers(attempt=1, grace_s=1), False),
    ],
)
async def test_creations_have_a_pass_of_their_own_where_the_server_is_busy(
    action: Action, waits: bool, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that waits twice for a busy server is among the longest. What it leaves comes at once."""
    status, acts = ZeroTrainingJobStatus(attempt=1, phase=Phase.RUNNING), list[object]()
    statuses = iter([status])

    def wanted(*_: object) -> Plan:
        return Plan(status=next(statuses, None), events=(), actions=(action,), wake_at=None)

    async def perform(_: Executor, __: Json, actions: object) -> None:
        acts.append(actions)

    monkeypatch.setattr(job_pass, "reconcile", wanted)
    monkeypatch.setattr(job_pass, "BUSY_S", -1.0 if busy else 600.0)
    monkeypatch.setattr(Executor, "perform", perform)
    double = ApiDouble()
    written = {**stored(), "status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}
    double.on(f"PUT {PATH}/status", (200, written))
    async with served(double) as api:
        controller = make_controller(api)
        controller.job_changed(stored())
        await run_pass(controller)
        assert len(acts) == (0 if busy and waits else 1)
        if busy and waits:
            monkeypatch.setattr(job_pass, "BUSY_S", 600.0)
            await run_pass(controller)
        assert acts == [(action,)]


async def test_new_jobs_wait_without_a_pass_and_say_so_when_it_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    double = ApiDouble()
    double.on(f"PUT {PATH}/status", (200, stored()))
    async with served(double) as api:
        controller = make_controller(api)
        for number in range(start_slots.MAX_SMALL_OF_ONE):
            assert controller.starts.enter(JobKey("ml", f"other-{number}"), pods=4)
        new = stored()
        new.pop("status", None)
        controller.job_changed(new)
        with monkeypatch.context() as patched:
            patched.setattr(job_pass, "reconcile", None)  # no pass decides anything
            await run_pass(controller)
        assert not double.requests
        monkeypatch.setattr(start_slots, "QUIET_S", 0.0)
        controller.queue.add(KEY)
        await run_pass(controller)
        (written,) = (body["status"] for body in double.bodies(f"PUT {PATH}/status"))
        reasons = {item["type"]: item["reason"] for item in written["conditions"]}
        assert (reasons["Reconciling"], written.get("attempt")) == ("CreatingPods", 0)
        assert controller.starts.leave(JobKey("ml", "other-0")) == [KEY], "its place in line is kept"
