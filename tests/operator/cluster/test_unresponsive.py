"""Workers that run and do not answer: the job reports them, and so does the metric of the alerts."""

from __future__ import annotations

import pytest

from tests.operator.api_double import pod_json
from tests.operator.cluster.test_progress_poller import NOW, RUNNING, Bench, Workers, stored
from zerotrain.operator.cluster.channel import SilentChannel
from zerotrain.operator.cluster.progress_poller import UNRESPONSIVE_S
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.cluster.telemetry import Telemetry

pytestmark = pytest.mark.unit


GPT = JobKey("ml", "gpt")


async def test_an_unresponsive_worker_is_reported_once_and_until_it_answers() -> None:
    bench = Bench(Workers({}))
    await bench.after(0)
    await bench.after(UNRESPONSIVE_S - 1)
    assert (bench.poller.unresponsive, bench.job_state.unresponsive) == (0, False)
    bench.changed.clear()
    await bench.after(3)
    assert (bench.poller.unresponsive, bench.job_state.unresponsive) == (1, True)
    assert GPT in bench.changed
    bench.workers.steps = {"gpt-1-0": 7}
    bench.changed.clear()
    await bench.after(3)
    assert (bench.poller.unresponsive, bench.job_state.unresponsive) == (0, False)
    assert GPT in bench.changed


async def test_one_answer_begins_the_count_anew() -> None:
    bench = Bench(Workers({}))
    for _ in range(5):
        bench.workers.steps = {}
        await bench.after(UNRESPONSIVE_S / 2)
        bench.workers.steps = {"gpt-1-0": 7}
        await bench.after(UNRESPONSIVE_S / 2)
    assert bench.poller.unresponsive == 0


async def test_an_answer_without_ranks_is_one() -> None:
    """The launcher answers alone while ranks start and after they ended."""
    bench = Bench(Workers({"gpt-1-0": 7}))
    bench.workers.empty = True
    await bench.after(0)
    await bench.after(UNRESPONSIVE_S + 3)
    assert bench.poller.unresponsive == 0


async def test_a_worker_that_does_not_run_is_not_waited_for() -> None:
    bench = Bench(Workers({}))
    await bench.after(0)
    for version, state in ((2, {"terminated": {"exitCode": 0}}), (3, {"waiting": {}})):
        bench.store.put(
            pod_json(
                0, version=version, phase="Running", containerStatuses=[{"name": "worker", "state": state}]
            ),
            now=NOW,
        )
        await bench.after(UNRESPONSIVE_S + 3)
        assert bench.poller.unresponsive == 0
    bench.store.put(pod_json(0, version=4, phase="Running", containerStatuses=RUNNING), now=NOW)
    await bench.after(3)
    assert bench.poller.unresponsive == 0, "the count begins with the program"


async def test_a_job_that_is_not_asked_any_more_does_not_count() -> None:
    bench = Bench(Workers({}))
    await bench.after(0)
    await bench.after(UNRESPONSIVE_S + 3)
    assert bench.poller.unresponsive == 1
    bench.cache.put(stored("gpt", "job-uid", "Pending", version="2"))
    bench.changed.clear()
    await bench.after(3)
    assert (bench.poller.unresponsive, bench.job_state.unresponsive) == (0, False), (
        "its next attempt was not asked yet"
    )
    assert GPT in bench.changed


async def test_where_pods_run_nothing_no_worker_is_unresponsive() -> None:
    bench = Bench(Workers({}))
    bench.poller._channel = SilentChannel()
    await bench.after(0)
    await bench.after(UNRESPONSIVE_S + 3)
    assert (bench.poller.unresponsive, bench.job_state.unresponsive) == (0, False)


def test_the_metric_is_counted_at_a_scrape() -> None:
    telemetry, count = Telemetry(), 0
    telemetry.count_unresponsive(lambda: count)
    assert telemetry.registry.get_sample_value("zerotrain_operator_unresponsive_jobs") == 0
    count = 3
    assert telemetry.registry.get_sample_value("zerotrain_operator_unresponsive_jobs") == 3
