"""The pod store and its reflector: pages, watches, versions that are too old or overtake each other."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from tests.operator.api_double import ApiDouble, Json, failure, pod_json, served
from tests.support.devcluster import PATIENCE_S
from zerotrain.contract.progress import Termination
from zerotrain.operator.cluster.reflectors import PODS_PATH, PodReflector
from zerotrain.operator.cluster.store import HELPERS, JobKey, PodStore, owner_key
from zerotrain.operator.constants import MAX_WORKERS

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = JobKey("ml", "gpt")
OWNER = owner_key("ml", "job-uid")


def present(store: PodStore) -> list[tuple[int, str]]:
    return sorted((pod.index, pod.phase) for pod in store.of_job(OWNER)[0])


def gone(store: PodStore) -> list[int]:
    return sorted(pod.index for pod in store.of_job(OWNER)[1])


@pytest.mark.unit
def test_an_older_view_never_replaces_a_newer_one() -> None:
    store = PodStore()
    assert store.put(pod_json(0, version=5, phase="Running"), now=NOW) == KEY
    assert store.put(pod_json(0, version=4, phase="Pending"), now=NOW) is None
    assert present(store) == [(0, "Running")]


@pytest.mark.unit
def test_the_answer_to_a_creation_does_not_bring_a_deleted_pod_back() -> None:
    store = PodStore()
    store.remove(pod_json(0, version=6), now=NOW)
    assert store.put(pod_json(0, version=4), now=NOW) is None
    assert present(store) == []
    assert gone(store) == [0]


@pytest.mark.unit
def test_a_full_list_buries_what_it_lacks_but_not_what_is_newer() -> None:
    store = PodStore()
    store.put(pod_json(0, version=3), now=NOW)
    store.put(pod_json(1, version=9), now=NOW)
    assert store.retain(set(), version=5) == {KEY}
    assert present(store) == [(1, "Pending")]
    assert gone(store) == [0]


@pytest.mark.unit
def test_the_last_view_of_a_pod_shows_how_it_ended() -> None:
    store = PodStore()
    state = {"terminated": {"exitCode": 75, "finishedAt": "2026-01-01T00:00:00Z"}}
    containers = [{"name": "worker", "state": state}]
    store.put(pod_json(0, version=1), now=NOW)
    store.remove(pod_json(0, version=2, phase="Failed", containerStatuses=containers), now=NOW)
    assert store.of_job(OWNER)[1][0].exit_code == 75


@pytest.mark.unit
@pytest.mark.parametrize("seed", range(5))
def test_jobs_are_found_by_the_nodes_of_their_pods(seed: int) -> None:
    chance, store = random.Random(seed), PodStore()
    jobs, nodes = [f"job-{number}" for number in range(4)], [f"node-{number}" for number in range(5)]
    alive: dict[str, tuple[str, Json]] = {}
    for version in range(1, 400):
        job, what = (
            chance.choice(jobs),
            chance.choice(("create", "create", "bind", "remove", "forget", "prune")),
        )
        own = [uid for uid, (other, _) in alive.items() if other == job]
        if what == "create":
            pod = pod_json(chance.randrange(3), version=version, uid=job)
            pod["metadata"] |= {"uid": f"pod-{version}", "name": f"{job}-1-{pod['metadata']['name'][-1]}"}
            pod["metadata"]["labels"]["zerotrain.dev/job"] = job
            alive[f"pod-{version}"] = job, pod
            store.put(pod, now=NOW)
        elif what in ("bind", "remove") and own:
            _, pod = alive[chance.choice(own)]
            pod["metadata"]["resourceVersion"] = str(version)
            if what == "bind":
                pod["spec"] = {"nodeName": pod.get("spec", {}).get("nodeName") or chance.choice(nodes)}
                store.put(pod, now=NOW)
            else:
                del alive[pod["metadata"]["uid"]]
                store.remove(pod, now=NOW)
        elif what == "forget" and chance.random() < 0.2:
            store.forget(owner_key("ml", job))
            for uid in own:
                del alive[uid]
        elif what == "prune":
            store.prune({owner_key("ml", job) for job in jobs})
        for node in nodes:
            there = {job for job, pod in alive.values() if pod.get("spec", {}).get("nodeName") == node}
            assert store.on_node(node) == {JobKey("ml", job) for job in there}


@pytest.mark.unit
def test_nodes_that_hold_no_pod_any_more_are_forgotten() -> None:
    store = PodStore()
    for number in range(10):
        pod = pod_json(0, version=2 * number + 1)
        pod["metadata"]["uid"], pod["spec"] = f"pod-{number}", {"nodeName": f"node-{number}"}
        store.put(pod, now=NOW)
        if number:
            pod["metadata"]["resourceVersion"] = str(2 * number + 2)
            store.remove(pod, now=NOW)
    store.prune({OWNER})
    assert store._on_node == {"node-0": {OWNER}}


@pytest.mark.unit
def test_a_pod_that_the_job_does_not_control_is_no_pod_of_the_job() -> None:
    store = PodStore()
    stranger = pod_json(0, version=1)
    stranger["metadata"]["ownerReferences"][0]["uid"] = "another-job"
    assert store.put(stranger, now=NOW) is None
    assert present(store) == []


def named(index: int, name: str, *, version: int = 1, attempt: int = 1) -> Json:
    """Return a pod that a tenant made, with the job's labels and its owner."""
    forged = pod_json(index, version=version)
    forged["metadata"] |= {"name": name, "uid": name}
    forged["metadata"]["labels"]["zerotrain.dev/attempt"] = str(attempt)
    return forged


@pytest.mark.unit
@pytest.mark.parametrize(
    ("index", "attempt", "name"),
    [(0, 1, "mine"), (0, 1, "gpt-1-00"), (0, 2, "gpt-1-0"), (-1, 1, "gpt-1--1"), (0, 0, "gpt-0-0")],
)
def test_a_pod_without_the_name_of_its_labels_is_no_worker(index: int, attempt: int, name: str) -> None:
    """Names are unique: no pod can be a second worker 0, and report progress in its place."""
    store = PodStore()
    assert store.put(named(index, name, attempt=attempt), now=NOW) is None
    assert present(store) == []


@pytest.mark.unit
def test_pods_of_a_tenants_own_making_cannot_fill_the_memory() -> None:
    store = PodStore()
    store.put(pod_json(0, version=1), now=NOW)
    store.expect(OWNER, attempt=1, workers=2)
    for index in range(5, 500):
        store.put(named(index, f"gpt-1-{index}"), now=NOW)
        store.put(named(index, f"gpt-7-{index}", attempt=7), now=NOW)
    most = 2 * 2 + HELPERS
    assert len(present(store)) == most
    # The job's own pods are stored however many others there are.
    store.put(pod_json(1, version=9), now=NOW)
    assert [index for index, _ in present(store)][:2] == [0, 1]
    for index in range(5, 500):
        store.remove(named(index, f"gpt-1-{index}", version=10), now=NOW)
        store.remove(named(index + 1000, f"gpt-1-{index + 1000}", version=10), now=NOW)
    assert len(gone(store)) <= most


@pytest.mark.unit
def test_all_workers_of_the_largest_job_are_kept_before_its_size_is_known() -> None:
    store = PodStore()
    for index in range(MAX_WORKERS):
        store.put(pod_json(index, version=1), now=NOW)
    assert len(present(store)) == MAX_WORKERS


@pytest.mark.unit
def test_a_pod_of_another_namespace_is_no_pod_of_the_job() -> None:
    store = PodStore()
    forged = pod_json(0, version=1)
    forged["metadata"]["namespace"] = "elsewhere"
    store.put(forged, now=NOW)
    store.remove(forged, now=NOW)
    assert (present(store), gone(store)) == ([], [])


@pytest.mark.unit
def test_a_late_event_of_a_job_that_is_gone_is_pruned() -> None:
    store = PodStore()
    store.remove(pod_json(0, version=1), now=NOW)
    store.prune({OWNER})
    assert gone(store) == [0]
    store.prune(set())
    assert gone(store) == []
    store.put(pod_json(1, version=1), now=NOW)
    store.prune(set())
    assert present(store) == [(1, "Pending")]


@pytest.mark.unit
@pytest.mark.parametrize("code", [2, 75, 143])
def test_a_code_of_an_init_container_is_no_word_of_the_worker(code: int) -> None:
    store = PodStore()
    ended = [{"name": "fetch", "state": {"terminated": {"exitCode": code}}}]
    store.put(pod_json(0, version=1, phase="Failed", initContainerStatuses=ended), now=NOW)
    view = store.of_job(OWNER)[0][0]
    assert (view.state.value, view.exit_code, view.failed_container) == ("Failed", code, "fetch")


@pytest.mark.unit
def test_the_first_refusal_of_the_scheduler_is_remembered() -> None:
    store = PodStore()

    def unschedulable_since(version: int, s: float, **more: Any) -> datetime | None:
        refusal = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        body = pod_json(0, version=version, conditions=[refusal], **more)
        store.put(body, now=NOW + timedelta(seconds=s))
        return store.of_job(OWNER)[0][0].refused_seen_at

    assert unschedulable_since(1, 5) == unschedulable_since(2, 50) == NOW + timedelta(seconds=5)
    assert unschedulable_since(3, 55, nominatedNodeName="node-1") is None
    assert unschedulable_since(4, 60) == NOW + timedelta(seconds=60)


@pytest.mark.unit
def test_an_init_container_shows_what_the_worker_waits_for() -> None:
    store = PodStore()
    held = {"waiting": {"reason": "PodInitializing"}}
    before = [
        {"name": "done", "state": {"terminated": {"exitCode": 0}}},
        {"name": "fetch", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}},
    ]
    worker = [{"name": "worker", "state": held}]
    store.put(pod_json(0, version=1, initContainerStatuses=before, containerStatuses=worker), now=NOW)
    assert store.of_job(OWNER)[0][0].waiting == "init container fetch: ErrImagePull: no such tag"
    held.clear()
    held["running"] = {}
    store.put(pod_json(0, version=2, initContainerStatuses=before, containerStatuses=worker), now=NOW)
    assert store.of_job(OWNER)[0][0].waiting is None


@pytest.mark.unit
@pytest.mark.parametrize("message", ["\n", "[" * 4096, " \t\n", '{"attempt": 1, "code": 1, "step": []}'])
def test_no_termination_message_makes_a_pod_unreadable(message: str) -> None:
    store = PodStore()
    state = {"terminated": {"exitCode": 1, "message": message}}
    pod = pod_json(0, version=1, phase="Failed", containerStatuses=[{"name": "worker", "state": state}])
    assert store.put(pod, now=NOW) == KEY
    assert present(store) == [(0, "Failed")]


@pytest.mark.unit
def test_the_culprit_is_known_where_kubelet_cut_the_message() -> None:
    """The kubelet keeps one KiB for each container of a pod of twelve."""
    words = Termination(attempt=1, code=84, rank=3, step=7, exception="E" * 2000, last_line="L" * 2000)
    ended = {"exitCode": 84, "message": words.to_json()[:1024]}
    store = PodStore()
    container = {"name": "worker", "state": {"terminated": ended}}
    store.put(pod_json(0, version=1, phase="Failed", containerStatuses=[container]), now=NOW)
    read = store.of_job(OWNER)[0][0].termination
    assert read is not None
    assert (read.code, read.rank, read.step) == (84, 3, 7)
    assert (read.exception or "").startswith("EEE")


@pytest.mark.unit
def test_a_pod_that_cannot_be_read_is_passed_over() -> None:
    store = PodStore()
    broken = pod_json(0, version=1, containerStatuses=[{"name": "worker", "state": {"terminated": "?"}}])
    assert store.put(broken, now=NOW) is None
    assert store.put(pod_json(1, version=1), now=NOW) == KEY
    assert present(store) == [(1, "Pending")]


@pytest.mark.unit
def test_views_of_past_attempts_are_forgotten() -> None:
    store = PodStore()
    store.remove(pod_json(0, version=1), now=NOW)
    store.expect(OWNER, attempt=2, workers=2)
    assert gone(store) == []


def page(*pods: Json, version: int, more: str = "") -> tuple[int, Json]:
    return 200, {"metadata": {"resourceVersion": str(version), "continue": more}, "items": list(pods)}


class Cluster:
    """Scripted lists; each watch plays its events and then stays open."""

    def __init__(self, lists: list[tuple[int, Json]], watches: list[list[Json]]) -> None:
        self.lists, self.watches = lists, watches
        self.versions: list[str] = []
        """Version at which each watch began."""
        self.played = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            status, body = self.lists.pop(0)
            return web.json_response(body, status=status)
        self.versions.append(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        events = self.watches.pop(0) if self.watches else []
        for event in events:
            await response.write(json.dumps(event).encode() + b"\n")
        if not self.watches:
            self.played.set()
            await asyncio.sleep(60)
        return response


async def reflected(cluster: Cluster, watches: int) -> tuple[PodStore, list[JobKey]]:
    """Run a reflector until the script is played, and a moment longer for its last event."""
    double, store, changed = ApiDouble(), PodStore(), list[JobKey]()
    double.on(f"GET {PODS_PATH}", cluster.answer)
    async with served(double) as api:
        task = asyncio.create_task(PodReflector(api, store, changed.append).run())
        async with asyncio.timeout(PATIENCE_S):
            await cluster.played.wait()
            for _ in range(20):  # iterations of the loop, of which the last event needs a few
                await asyncio.sleep(0.005)
        task.cancel()
    assert len(cluster.versions) == watches
    return store, changed


@pytest.mark.ranks
async def test_reads_all_pages_then_watches_from_there() -> None:
    first = page(pod_json(0, version=2), version=7, more="next")
    cluster = Cluster([first, page(pod_json(1, version=3), version=7)], [])
    store, changed = await reflected(cluster, 1)
    assert present(store) == [(0, "Pending"), (1, "Pending")]
    assert cluster.versions == ["7"]
    assert set(changed) == {KEY}


@pytest.mark.ranks
async def test_goes_on_from_the_last_bookmark() -> None:
    events = [
        {"type": "ADDED", "object": pod_json(0, version=8)},
        {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "20"}}},
    ]
    cluster = Cluster([page(version=7)], [events, []])
    store, _ = await reflected(cluster, 2)
    assert cluster.versions == ["7", "20"]
    assert present(store) == [(0, "Pending")]


@pytest.mark.ranks
async def test_a_version_that_is_too_old_means_a_new_list() -> None:
    expired = {
        "type": "ERROR",
        "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "old"},
    }
    lists = [page(pod_json(0, version=2), version=7), page(pod_json(1, version=30), version=31)]
    store, _ = await reflected(Cluster(lists, [[expired], []]), 2)
    assert present(store) == [(1, "Pending")]
    assert gone(store) == [0]


@pytest.mark.ranks
async def test_a_deletion_on_the_watch() -> None:
    events = [{"type": "DELETED", "object": pod_json(0, version=9)}]
    store, changed = await reflected(Cluster([page(pod_json(0, version=2), version=7)], [events]), 1)
    assert present(store) == []
    assert gone(store) == [0]
    assert changed == [KEY, KEY]


class Roles:
    """Lists and watches of the pods of one namespace, while its role is there."""

    def __init__(self, *pods: Json, granted: bool) -> None:
        self.pods, self.granted, self.code, self.refused = pods, granted, 403, 0
        self.revoked = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not self.granted:
            self.refused += 1
            code, body = failure(self.code, "Forbidden", "no role")
            return web.json_response(body, status=code)
        if "watch" not in request.query:
            return web.json_response(page(*self.pods, version=7)[1])
        response = web.StreamResponse()
        await response.prepare(request)
        await self.revoked.wait()
        return response

    def revoke(self) -> None:
        """Take the role away. Open watches end, as they do every few minutes."""
        self.granted = False
        self.revoked.set()


@asynccontextmanager
async def watching(**spaces: Roles) -> AsyncIterator[tuple[PodReflector, PodStore, list[str | None]]]:
    """Run a reflector of these namespaces; the list shows which came into sight."""
    double, store, seen = ApiDouble(), PodStore(), list[str | None]()
    for name, roles in spaces.items():
        double.on(f"GET /api/v1/namespaces/{name}/pods", roles.answer)
    async with served(double) as api:
        reflector = PodReflector(api, store, lambda key: None, tuple(spaces), seen.append)
        task = asyncio.create_task(reflector.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield reflector, store, seen
        finally:
            task.cancel()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


@pytest.mark.ranks
@pytest.mark.parametrize("code", [403, 404])
async def test_a_namespace_that_is_refused_keeps_no_other_waiting(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    lost = Roles(granted=False)
    lost.code = code
    given = Roles(pod_json(0, version=2), granted=True)
    async with watching(ml=given, lost=lost) as (reflector, store, seen):
        await reflector.synced.wait()
        await until(lambda: lost.refused > 2)
        assert present(store) == [(0, "Pending")]
        assert (seen, reflector.refused) == (["ml"], {"ml": False, "lost": True})
        assert store.sight.since("ml") is not None
        assert store.sight.since("lost") is None
        # A watch that is forbidden says nothing about the health of those that are allowed.
        reflector._watches["lost"]._alive_at -= 1000
        assert reflector.age_s < 100
    assert caplog.text.count("pods cannot be watched") == 1


@pytest.mark.ranks
async def test_a_role_that_comes_back_is_noticed() -> None:
    space = Roles(pod_json(0, version=2), granted=False)
    async with watching(other=Roles(granted=True), ml=space) as (reflector, store, seen):
        await until(lambda: space.refused > 0 and "other" in seen)
        space.granted = True
        await until(lambda: "ml" in seen)
        assert present(store) == [(0, "Pending")]
        assert store.sight.since("ml") is not None
        assert not any(reflector.refused.values())


@pytest.mark.ranks
async def test_a_role_that_goes_ends_the_sight_until_a_new_list() -> None:
    space = Roles(pod_json(0, version=2), granted=True)
    async with watching(ml=space, other=Roles(granted=True)) as (reflector, store, seen):
        await reflector.synced.wait()
        space.revoke()
        await until(lambda: store.sight.since("ml") is None)
        assert store.sight.since("other") is not None
        space.pods, space.granted = (pod_json(1, version=3),), True
        await until(lambda: seen.count("ml") == 2)
        assert (present(store), gone(store)) == ([(1, "Pending")], [0])


@pytest.mark.ranks
async def test_an_operator_that_may_read_nothing_is_not_ready() -> None:
    one, two = Roles(granted=False), Roles(granted=False)
    async with watching(one=one, two=two) as (reflector, _, _):
        await until(lambda: min(one.refused, two.refused) > 1)
        assert not reflector.synced.is_set()
        assert reflector.refused == {"one": True, "two": True}
        reflector._watches["one"]._alive_at -= 1000
        assert reflector.age_s > 900
