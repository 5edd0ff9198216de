"""The operator's memory of nodes, and what it keeps of a log: nothing of healthy nodes, nothing unbounded."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, failure, served
from tests.operator.reconcile_builders import NOW, running
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions import diagnostics
from zerotrain.operator.cluster.actions.diagnostics import MAX_KEPT_BYTES, last_lines, read_tail
from zerotrain.operator.cluster.nodes import MAX_GONE, NodeStore
from zerotrain.operator.resources.diagnostics import failures_config_map, outdated_keys


def node(
    name: str = "node-0", *, ready: str | None = "True", reason: str = "x", **spec: Any
) -> dict[str, Any]:
    since = "2026-01-01T12:00:00Z"
    condition = {"type": "Ready", "status": ready, "reason": reason, "lastTransitionTime": since}
    return {"metadata": {"name": name}, "spec": spec, "status": {"conditions": [condition] if ready else []}}


def taint(key: str, effect: str) -> dict[str, Any]:
    return {"taints": [{"key": key, "effect": effect}]}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("item", "kept"),
    [
        (node(), False),
        (node(ready=None), False),
        (node(ready="False"), True),
        (node(ready="Unknown"), True),
        (node(ready="Unknown", reason="NodeStatusNeverUpdated"), False),
        (node(unschedulable=True), True),
        (node(**taint("nvidia.com/gpu", "NoSchedule")), False),
        (node(**taint("node.kubernetes.io/unreachable", "NoExecute")), True),
        (node(**taint("node.kubernetes.io/out-of-service", "NoSchedule")), True),
        (node(**taint("ToBeDeletedByClusterAutoscaler", "NoSchedule")), True),
    ],
)
def test_only_nodes_with_something_to_say_are_kept(item: dict[str, Any], kept: bool) -> None:
    changed: list[str] = []
    store = NodeStore(changed.append)
    store.put(item)
    assert ("node-0" in store.of([running(0)])) is kept
    store.put(item)
    assert len(changed) == int(kept), "a heartbeat wakes nobody"


@pytest.mark.unit
def test_a_silence_counts_from_its_report_and_from_its_own_beginning() -> None:
    minutes = iter(NOW + timedelta(minutes=number) for number in range(9))
    store = NodeStore(now=lambda: next(minutes))

    def learned_at() -> datetime | None:
        return store.of([running(0)])["node-0"].learned_at

    store.put(node(ready="Unknown"))
    store.put(node(ready="Unknown"))
    assert learned_at() == NOW, "a heartbeat is no news"
    store.put(node(ready="Unknown", unschedulable=True))
    assert learned_at() == NOW, "nor is another change of the same silence"
    assert store.any_silent()
    again = node(ready="Unknown")
    again["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T12:09:00Z"
    store.put(again)
    assert learned_at() == NOW + timedelta(minutes=1), "it came back in between, unseen"
    store.put(node())
    assert not store.any_silent()
    store.put(node(ready="Unknown"))
    assert learned_at() == NOW + timedelta(minutes=2)


@pytest.mark.unit
def test_nodes_that_come_and_go_for_ever_are_not_all_remembered() -> None:
    store = NodeStore()
    for number in range(MAX_GONE + 50):
        store.put(node(f"node-{number}"))
        store.remove(node(f"node-{number}"))
    found = store.of([running(index) for index in range(MAX_GONE + 50)])
    assert sorted(int(name.removeprefix("node-")) for name in found) == list(range(50, MAX_GONE + 50))


@pytest.mark.unit
def test_a_deleted_node_is_reported_until_its_name_comes_back() -> None:
    store = NodeStore()
    for name in ("node-0", "node-1", "node-2"):
        store.put(node(name))
    store.remove(node("node-0"))
    store.listed({"node-2"}, 2)  # node-1 went while the watch was down
    found = store.of([running(0), running(1), running(2)])
    assert {name: view.gone for name, view in found.items()} == {"node-0": True, "node-1": True}
    assert not store.any_silent(), "nobody is left to listen to"
    store.put(node("node-0"))
    assert set(store.of([running(0), running(1)])) == {"node-1"}


LOG = "".join(f"[rank {number % 3}] {number}\n" if number % 3 else f"{number}\n" for number in range(900))


@pytest.mark.unit
def test_the_last_hundred_lines_of_one_rank() -> None:
    assert last_lines(LOG, 2).splitlines() == [f"[rank 2] {number}" for number in range(602, 900, 3)]
    assert last_lines(LOG, 0).splitlines() == [str(number) for number in range(600, 900, 3)]
    assert last_lines(LOG, None).splitlines() == LOG.splitlines()[-100:]
    assert last_lines("launcher: no rank started\n", 5) == "launcher: no rank started\n"


@pytest.mark.unit
def test_what_a_program_writes_is_bounded_and_printable() -> None:
    assert last_lines("10%\r20%\r30%\r\n\x1b[31mred\x00\x9b1m\n", None) == "30%\nred?\n"
    kept = last_lines(("\u20ac" * 10**5 + "\n") * 200 + "the end\n", None)
    assert len(kept.encode()) <= MAX_KEPT_BYTES
    assert kept.endswith("the end\n")


@pytest.mark.ranks
async def test_only_the_end_of_a_long_log_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        assert request.query["container"] == "worker"
        answer = web.StreamResponse()
        await answer.prepare(request)
        for number in range(400):
            await answer.write(f"{number} ".encode() + b"x" * 50_000 + b"\n")
        return answer

    double = ApiDouble()
    double.on("GET /api/v1/namespaces/ml/pods/gpt-1-0/log", endless)
    double.on("GET /api/v1/namespaces/ml/pods/gpt-1-1/log", failure(500, "InternalError", "no kubelet"))
    async with served(double) as api:
        text = await read_tail(api, namespace="ml", pod="gpt-1-0")
        assert len(text) < 2 << 20
        assert text.endswith("the rest was not read)\n")
        refused = await read_tail(api, namespace="ml", pod="gpt-1-1")
    assert refused.startswith("(the log cannot be read: 500")


@pytest.mark.ranks
async def test_where_that_is_too_much_the_newest_lines_are_read_alone() -> None:
    """The log is a progress bar without line ends, and the traceback after it."""

    async def long(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(200 if request.query["tailLines"] != "100" else 2):
            await answer.write(b"#" * 50_000 + b"\r")
        await answer.write(b"\nRuntimeError: the cause\n")
        return answer

    double = ApiDouble()
    double.on("GET /api/v1/namespaces/ml/pods/gpt-1-0/log", long)
    async with served(double) as api:
        text = await read_tail(api, namespace="ml", pod="gpt-1-0")
    assert last_lines(text, None).splitlines()[-1] == "RuntimeError: the cause"


@pytest.mark.ranks
async def test_what_came_before_the_time_was_up_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "LOG_TIMEOUT_S", 0.3)

    async def slow(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"RuntimeError: the cause")
        await asyncio.sleep(5)
        return answer

    double = ApiDouble()
    double.on("GET /api/v1/namespaces/ml/pods/gpt-1-0/log", slow)
    async with served(double) as api:
        text = await read_tail(api, namespace="ml", pod="gpt-1-0")
    assert text.startswith("RuntimeError: the cause\n(the log cannot be read: ")


@pytest.mark.unit
def test_the_failures_of_ten_attempts_fit_a_config_map(simple_job: ZeroTrainingJob) -> None:
    keys = [f"attempt-{number}.log" for number in range(1, 31)] + ["notes"]
    assert outdated_keys([*keys[:10], "notes"], "attempt-11.log") == ["attempt-1.log"]
    assert outdated_keys(keys, "attempt-30.log") == sorted(keys[:20])
    assert outdated_keys([], "attempt-1.log") == []
    item = failures_config_map(simple_job, dict.fromkeys(keys[:10], "x" * MAX_KEPT_BYTES))
    assert sum(map(len, item["data"].values())) < 1 << 20
    assert item["metadata"]["ownerReferences"][0]["uid"] == simple_job.uid


@pytest.fixture
def simple_job() -> ZeroTrainingJob:
    from tests.operator.reconcile_builders import job

    return ZeroTrainingJob.parse(job())
