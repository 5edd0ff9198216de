"""Workers that let calls time out: they delay neither other jobs nor a yield, and calls do not pile up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, pod_json, served
from tests.operator.cluster.test_executor import job, make_executor
from tests.operator.cluster.test_progress_poller import LIMIT_S, NOW, RUNNING, Bench, Workers
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster import channel as channel_module
from zerotrain.operator.cluster.actions import workers as workers_module
from zerotrain.operator.cluster.channel import (
    CONNECTIONS,
    CallKind,
    ChannelError,
    ChannelKind,
    HttpChannel,
    NotAsked,
    WorkerAddress,
    share_of,
)
from zerotrain.operator.cluster.progress_poller import (
    INSPECTION_INTERVAL_S,
    MAX_UNREACHABLE_INTERVAL_S,
    MIN_INTERVAL_S,
    UNRESPONSIVE_S,
)
from zerotrain.operator.reconcile import RequestYield

LOST = ChannelError("no answer", timed_out=True)


class CutOff(Workers):
    """Workers of two jobs; those of the second job do not answer."""

    def __init__(self, steps: dict[str, int]) -> None:
        super().__init__(steps)
        self.error = LOST
        self.endless: set[CallKind] = set()
        """Kinds of calls in which calls do not even time out."""
        self.reached = ""
        """The worker that answers all the same."""
        self.open = 0
        self.call_kinds: list[CallKind] = []
        """Kinds of the polls."""

    async def report(self, worker: WorkerAddress) -> WorkerReport:
        if not worker.pod.startswith("gpt1-"):
            return await super().report(worker)
        self.asked.append(worker.pod)
        if worker.pod == self.reached:
            return replace(await super().report(worker), job_uid="uid-1")
        if worker.pod != "gpt1-1-0":
            self.call_kinds.append(worker.call_kind)
        self.open += 1
        if worker.call_kind in self.endless:
            await asyncio.Event().wait()
        self.open -= 1
        raise self.error


def bench_of(workers: Workers, size: int) -> Bench:
    """Return a bench of two jobs; the second has so many workers."""
    bench = Bench(workers, jobs=2)
    for index in range(size):
        pod = pod_json(index, version=1, uid="uid-1", phase="Running", containerStatuses=RUNNING)
        pod["metadata"] |= {"name": f"gpt1-1-{index}", "uid": f"gpt1-{index}"}
        pod["metadata"]["labels"]["zerotrain.dev/job"] = "gpt1"
        bench.store.put(pod, now=NOW)
    return bench


@pytest.mark.unit
@pytest.mark.parametrize("endless", [{CallKind.POLL}, {CallKind.INSPECT}])
async def test_what_is_under_way_for_a_job_stays_bounded_and_the_others_are_asked(
    endless: set[CallKind],
) -> None:
    workers = CutOff({"gpt-1-0": 7})
    workers.endless = endless
    bench, left = bench_of(workers, 1000), set[asyncio.Task[None]]()
    for number in range(100):
        bench.now += MIN_INTERVAL_S
        workers.asked.clear()
        left |= bench.poller.start_due()
        for _ in range(50):
            await asyncio.sleep(0)
        left = {task for task in left if not task.done()}
        assert "gpt-1-0" in workers.asked
        assert ("gpt1-1-0" in workers.asked) == (number == 0 or CallKind.POLL not in endless)
        assert len(left) <= 1
        assert workers.open <= share_of(CallKind.INSPECT)
    assert workers.open > 0
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


@pytest.mark.unit
async def test_inspections_that_reach_no_worker_poll_a_sample_and_ever_later() -> None:
    workers = CutOff({"gpt-1-0": 7})
    bench, looks = bench_of(workers, 300), list[tuple[float, int]]()
    begun = bench.now
    while bench.now < begun + 1200:
        asked = await bench.after(MIN_INTERVAL_S)
        if (calls := sum(pod.startswith("gpt1-") for pod in asked)) > 1:
            looks.append((bench.now, calls - 1))
    pauses = [second[0] - first[0] for first, second in pairwise(looks)]
    assert pauses == sorted(pauses)
    assert pauses[0] >= 2 * INSPECTION_INTERVAL_S
    assert pauses[-1] == MAX_UNREACHABLE_INTERVAL_S
    assert max(calls for _, calls in looks) <= share_of(CallKind.INSPECT)
    assert workers.call_kinds[0] is CallKind.INSPECT
    assert workers.call_kinds[-1] is CallKind.SAMPLE, "such jobs wait among themselves"


@pytest.mark.unit
async def test_every_worker_is_sampled_by_such_inspections() -> None:
    workers = CutOff({"gpt-1-0": 7})
    bench = bench_of(workers, 40)
    asked = set[str]()
    for _ in range(20):
        asked |= set(await bench.after(MAX_UNREACHABLE_INTERVAL_S))
    assert len(asked & {f"gpt1-1-{index}" for index in range(40)}) == 40


@pytest.mark.unit
async def test_a_worker_that_got_no_slot_is_not_silent() -> None:
    workers = CutOff({"gpt-1-0": 7})
    bench = bench_of(workers, 2)
    await bench.after(0)
    workers.error = NotAsked("all slots are taken")
    workers.asked.clear()
    for _ in range(5):
        asked = await bench.after(UNRESPONSIVE_S)
        assert "gpt1-1-1" not in asked, "nor is it looked at"
    assert bench.poller.unresponsive == 0
    workers.error = LOST
    await bench.after(UNRESPONSIVE_S)
    assert bench.poller.unresponsive == 0, "in between it was not asked"
    await bench.after(UNRESPONSIVE_S)
    assert bench.poller.unresponsive == 1


@pytest.mark.unit
async def test_a_look_goes_on_with_the_workers_that_answered() -> None:
    """The poll that confirms a hang must reach the workers that the first one reached."""
    workers = CutOff({"gpt-1-0": 7, "gpt1-1-25": 7})
    workers.reached = "gpt1-1-25"
    workers.idle_s = LIMIT_S
    bench = bench_of(workers, 40)
    job_state, seen = bench.job_states.of("uid-1"), 0
    for _ in range(20):
        await bench.after(MAX_UNREACHABLE_INTERVAL_S)
        reached = job_state.inspection is not None and job_state.inspection.step == 7
        assert reached or not seen
        seen += reached
    assert seen > 5


@pytest.mark.unit
async def test_a_look_whose_first_workers_get_no_slot_asks_no_more() -> None:
    class Full(Workers):
        async def report(self, worker: WorkerAddress) -> WorkerReport:
            self.asked.append(worker.pod)
            if worker.pod.startswith("gpt1-") and worker.pod != "gpt1-1-0":
                raise NotAsked("all slots are taken")
            if worker.pod.startswith("gpt1-"):
                raise ChannelError("refused")
            return await super().report(worker)

    bench = bench_of(Full({"gpt-1-0": 7}), 1000)
    for _ in range(5):
        asked = await bench.after(MAX_UNREACHABLE_INTERVAL_S)
        assert sum(pod.startswith("gpt1-") for pod in asked) <= 1 + share_of(CallKind.INSPECT)


@pytest.mark.unit
async def test_a_look_in_which_a_worker_was_not_asked_is_none() -> None:
    """The worker that was not polled may be the one that moves."""

    class Short(Workers):
        async def report(self, worker: WorkerAddress) -> WorkerReport:
            if worker.pod == "gpt-1-1" and self.short:
                raise NotAsked("all slots are taken")
            return await super().report(worker)

        short = True

    workers = Short({"gpt-1-0": 7, "gpt-1-1": 7})
    workers.idle_s = LIMIT_S
    bench = Bench(workers)
    await bench.after(0)
    assert bench.job_state.inspection is None
    workers.short = False
    await bench.after(INSPECTION_INTERVAL_S)
    assert bench.job_state.inspection is not None


@pytest.mark.ranks
async def test_a_yield_asks_all_workers_unless_these_take_too_long_to_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(workers_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    class Yielding(Workers):
        reached = True

        async def request_yield(self, worker: WorkerAddress, *, attempt: int, token: str) -> None:
            nonlocal now_s
            self.asked.append(worker.pod)
            if worker.pod == "gpt-3-2":
                raise ChannelError("connection refused")
            if not self.reached:
                now_s += 5.0
                raise LOST

    channel, others = Yielding({}), tuple((f"gpt-3-{index}", "10.0.0.1") for index in range(1, 1000))
    action = RequestYield(attempt=3, pod="gpt-3-0", pod_ip="10.0.0.1", others=others)
    async with served(ApiDouble()) as api:
        executor = make_executor(api, channel)  # type: ignore[arg-type]
        await executor.perform(job(), [action])
        assert len(channel.asked) == 1000
        channel.asked.clear()
        channel.reached = False
        await executor.perform(job(), [action])
        state = executor.job_states.of(job()["metadata"]["uid"]).yielding
    assert len(channel.asked) <= share_of(CallKind.YIELD)
    assert state is not None
    assert (state.acked_at, state.refused) == (None, False)


def worker(index: int, call_kind: CallKind = CallKind.POLL) -> WorkerAddress:
    return WorkerAddress(namespace="ml", pod=f"gpt-1-{index}", ip="10.0.0.1", call_kind=call_kind)


@asynccontextmanager
async def silent_workers() -> AsyncIterator[tuple[HttpChannel, asyncio.Semaphore]]:
    """Yield a channel over real sockets: progress is never answered, a yield at once. The semaphore counts
    the calls held.
    """
    double, held, end = ApiDouble(), asyncio.Semaphore(0), asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        held.release()
        await end.wait()
        return web.Response()

    async def accepted(request: web.Request) -> web.Response:
        return web.Response(status=202)

    for index in range(100):
        proxy = f"/api/v1/namespaces/ml/pods/gpt-1-{index}:8471/proxy"
        double.on(f"GET {proxy}/progress", never)
        double.on(f"POST {proxy}/yield", accepted)
    async with served(double) as api, api.connection.session(CONNECTIONS) as session:
        yield HttpChannel(api, session, ChannelKind.PROXY, operator_key=b"k" * 32), held
        end.set()


@pytest.mark.ranks
async def test_a_yield_goes_out_at_once_whoever_holds_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "TIMEOUT_S", 600.0)
    async with silent_workers() as (channel, held):
        call_kinds = (CallKind.POLL, CallKind.INSPECT, CallKind.PROBE, CallKind.UNRESPONSIVE, CallKind.SAMPLE)
        calls = [
            asyncio.create_task(channel.report(worker(number, call_kind)))
            for call_kind in call_kinds
            for number in range(99)
        ]
        for _ in range(20 + 20 + 24 + 10 + 10):  # all slots of these kinds
            await held.acquire()
        await channel.request_yield(worker(99), attempt=1, token="t")
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.ranks
async def test_a_poll_gets_its_slot_despite_unresponsive_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "TIMEOUT_S", 600.0)
    async with silent_workers() as (channel, held):
        calls = [
            asyncio.create_task(channel.report(worker(number, CallKind.UNRESPONSIVE))) for number in range(50)
        ]
        for _ in range(10):
            await held.acquire()
        calls.append(asyncio.create_task(channel.report(worker(99))))
        await held.acquire()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.ranks
async def test_the_wait_for_a_slot_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "TIMEOUT_S", 600.0)
    limits = channel_module._CallLimits(calls=1, of_job=1, wait_s=0.01)
    monkeypatch.setitem(channel_module._CALL_LIMITS, CallKind.POLL, limits)
    async with silent_workers() as (channel, held):
        first = asyncio.create_task(channel.report(worker(0)))
        await held.acquire()
        with pytest.raises(NotAsked, match=r"gpt-1-1 was not called: all 1 slots of kind poll are in use"):
            await channel.report(worker(1))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.ranks
async def test_a_call_that_timed_out_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "TIMEOUT_S", 0.05)
    async with silent_workers() as (channel, _):
        with pytest.raises(ChannelError) as caught:
            await channel.report(worker(0))
    assert caught.value.timed_out
    assert not isinstance(caught.value, NotAsked)
