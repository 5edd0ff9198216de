"""Status writes that are batched, models that are read once, one pass for many pods that start."""

from __future__ import annotations

import asyncio

import pytest

from tests.operator.api_double import Json, pod_json
from tests.operator.reconcile_builders import NOW, job, pending, ready, running, seen, settled, status
from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.cluster.store import PodStore, owner_key
from zerotrain.operator.controller.status_debounce import (
    MAX_WAIT_S,
    WAIT_PER_JOB_S,
    StatusDebounce,
    is_patient,
)
from zerotrain.operator.controller.work_queue import WorkQueue
from zerotrain.operator.reconcile import CreateWorkers, Known, Observed, reconcile

pytestmark = pytest.mark.unit


OWNER = owner_key("ml", "job-uid")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_job_alone_hardly_waits_and_a_thousand_wait_together() -> None:
    clock = Clock()
    statuses = StatusDebounce(clock)
    assert statuses.wait_s("a") == pytest.approx(WAIT_PER_JOB_S)
    clock.now = WAIT_PER_JOB_S
    assert statuses.wait_s("a") == 0
    for number in range(1000):
        statuses.wait_s(f"job-{number}")
    assert statuses.wait_s("job-0") == pytest.approx(MAX_WAIT_S)
    clock.now += MAX_WAIT_S
    assert statuses.wait_s("job-0") == 0


def test_a_written_job_leaves_the_crowd() -> None:
    clock = Clock()
    statuses = StatusDebounce(clock)
    for name in ("a", "b"):
        statuses.wait_s(name)
    statuses.settled("b")
    assert statuses.wait_s("a") == pytest.approx(WAIT_PER_JOB_S)


def test_the_first_pods_that_exist_do_not_bring_a_write() -> None:
    """The time at which the job started waits with them."""
    stored = settled(job(status=status("Pending", podsCreated=False, startTime=None)), seen())
    plan = reconcile(stored, seen(pending(0), pending(1)), NOW)
    before = ZeroTrainingJobStatus.model_validate(stored["status"])
    assert plan.status is not None
    assert before.start_time is None is not plan.status.start_time
    assert is_patient(before, plan)


def test_counts_of_starting_pods_are_patient() -> None:
    stored = settled(job(status=status("Pending", podsCreated=False)), seen(pending(0), pending(1)))
    plan = reconcile(stored, seen(ready(0), pending(1)), NOW)
    assert plan.status is not None
    assert is_patient(ZeroTrainingJobStatus.model_validate(stored["status"]), plan)


def test_pods_that_are_left_from_the_last_pass_do_not_bring_a_write() -> None:
    stored = settled(job(status=status("Pending", podsCreated=False)), seen(pending(0)))
    plan = reconcile(stored, seen(ready(0)), NOW)
    assert [type(action) for action in plan.actions] == [CreateWorkers]
    assert plan.status is not None
    assert is_patient(ZeroTrainingJobStatus.model_validate(stored["status"]), plan)


@pytest.mark.parametrize(
    ("stored", "observed"),
    [
        pytest.param(job(), seen(), id="the attempt, before its pods"),
        pytest.param(
            job(status=status("Restarting", attempt=1)), seen(), id="the next attempt, before its pods"
        ),
        pytest.param(job(status=status("Pending")), seen(ready(0), ready(1)), id="all ranks joined"),
        pytest.param(
            settled(job(status=status("Pending")), seen(pending(0), pending(1))),
            seen(running(0), running(1)),
            id="a phase without event",
        ),
        pytest.param(
            job(spec={"suspend": True}, status=status("Running")), seen(ready(0), ready(1)), id="suspend"
        ),
    ],
)
def test_what_a_client_waits_for_is_written_at_once(stored: Json, observed: Observed) -> None:
    plan = reconcile(stored, observed, NOW)
    assert plan.status is not None
    assert not is_patient(ZeroTrainingJobStatus.model_validate(stored["status"]), plan)


def test_known_models_lead_to_the_same_plan_and_are_read_again_when_the_job_changes() -> None:
    known = Known()
    stored = job(status=status("Running"), resourceVersion="7")
    observed = seen(ready(0), ready(1))
    for _ in range(2):
        assert reconcile(stored, observed, NOW, known) == reconcile(stored, observed, NOW)
    spec = known.spec
    assert spec is known.read_spec(stored)
    edited = job(spec={"suspend": True}, status=status("Running"), resourceVersion="8", generation=2)
    assert reconcile(edited, observed, NOW, known) == reconcile(edited, observed, NOW)
    assert known.read_spec(edited) is not spec


def test_a_store_knows_when_nothing_but_a_start_goes_on() -> None:
    store = PodStore()
    condition: Json = {"conditions": [{"type": "Ready", "status": "True"}]}
    assert not store.all_start_well(OWNER)
    store.put(pod_json(0, version=1), now=NOW)
    store.put(pod_json(1, version=2, phase="Running", **condition), now=NOW)
    assert store.all_start_well(OWNER)
    store.put(pod_json(0, version=3, phase="Running", **condition), now=NOW)
    assert not store.all_start_well(OWNER), "the last one is ready: that is news"
    store.put(pod_json(2, version=4), now=NOW)
    assert store.all_start_well(OWNER)
    store.put(pod_json(1, version=5, phase="Failed"), now=NOW)
    assert not store.all_start_well(OWNER), "one ended"
    store.remove(pod_json(1, version=6, phase="Failed"), now=NOW)
    assert not store.all_start_well(OWNER), "one went"


async def test_one_key_wakes_one_of_many_that_wait() -> None:
    queue = WorkQueue[str]()
    woken: list[str] = []
    both = asyncio.Event()

    async def work() -> None:
        while True:
            woken.append(await queue.get())
            if len(woken) == 2:
                both.set()

    workers = [asyncio.create_task(work()) for _ in range(8)]
    await asyncio.sleep(0)
    queue.add("a")
    assert len(queue._takers) == 7, "seven sleep on"
    queue.add_after("b", 0.01)
    async with asyncio.timeout(60):
        await both.wait()
    assert woken == ["a", "b"]
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


async def test_a_key_survives_the_cancellation_of_the_one_that_was_woken() -> None:
    queue = WorkQueue[str]()
    first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    first.cancel()
    async with asyncio.timeout(60):
        assert await second == "a"
