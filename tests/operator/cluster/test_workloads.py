"""The watch of Kueue's Workloads: which ones it accepts, what it keeps, and how often it sends requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.operator.reconcile_builders import NOW, UID
from tests.support.devcluster import PATIENCE_S
from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.api import Json, Request
from zerotrain.operator.cluster.errors import Forbidden, NotFound
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.kueue import MAX_PAUSE_S, WorkloadWatch, workload_watches
from zerotrain.operator.cluster.store import JobKey, PodStore
from zerotrain.operator.reconcile.observe import ClusterApis, QueueView

pytestmark = pytest.mark.ranks


VERSION = "kueue.x-k8s.io/v1beta1"


class Server:
    """Server that answers lists of Workloads, flavors and discovery, and counts requests."""

    def __init__(self, *items: Json) -> None:
        self.items = list(items)
        self.asked: Counter[str] = Counter()
        self.served = VERSION
        self.watched = asyncio.Event()

    @property
    def time(self) -> Server:
        return self

    def now(self) -> Any:
        return NOW

    async def call(self, request: Request) -> Json:
        self.asked[request.path] += 1
        if "/resourceflavors/" in request.path:
            return {"spec": {"nodeLabels": {"pool": "a"}}}
        if request.path == "/apis/kueue.x-k8s.io":
            return {"versions": [{"version": self.served.rsplit("/", 1)[-1]}]}
        if request.path == f"/apis/{self.served}":
            return {"resources": [{"name": "workloads"}]}
        if request.path.startswith(f"/apis/{self.served}/") and request.path.endswith("/workloads"):
            return {"metadata": {"resourceVersion": "5"}, "items": self.items}
        raise NotFound(request.path, status=404)

    async def stream(self, request: Request) -> AsyncIterator[bytes]:
        yield json_codec.write(await self.call(request))

    async def watch(self, path: str, params: Any, **_: Any) -> AsyncIterator[Json]:
        self.asked[f"watch {path}"] += 1
        if not path.startswith(f"/apis/{self.served}/"):
            raise NotFound(path, status=404)
        self.watched.set()
        await asyncio.Event().wait()
        yield {}


def workload(uid: str = UID, *, namespace: str = "ml", name: str | None = None) -> Json:
    conditions = [{"type": kind, "status": "True"} for kind in ("QuotaReserved", "Admitted")]
    admission = {"podSetAssignments": [{"flavors": {"cpu": "a", "gpu": "a"}}]}
    return {
        "apiVersion": VERSION,
        "metadata": {
            "name": name or f"zerotrain-gpt-{uid[:8]}",
            "namespace": namespace,
            "labels": {"zerotrain.dev/job": "gpt", "zerotrain.dev/job-uid": uid},
            "ownerReferences": [{"uid": uid}],
            "resourceVersion": "4",
        },
        "spec": {"queueName": "q", "podSets": [{"count": 2}]},
        "status": {"conditions": conditions, "admission": admission},
    }


def watch_of(server: Server) -> tuple[WorkloadWatch, JobStates, list[JobKey]]:
    job_states, changed = JobStates(apis=ClusterApis(at=NOW, kueue=VERSION)), list[JobKey]()
    return WorkloadWatch(server, job_states, changed.append), job_states, changed  # type: ignore[arg-type]


def queue_of(job_states: JobStates, uid: str = UID, namespace: str = "ml") -> QueueView | None:
    return job_states.observe(namespace, uid, PodStore()).queue


def test_the_list_may_come_before_the_first_pass_of_a_job() -> None:
    """A running job must not see its Workload as deleted because it was not in the operator's memory yet."""
    watch, job_states, changed = watch_of(Server(workload("early-uid"), workload()))
    job_states.of("early-uid")
    assert queue_of(job_states) is None
    asyncio.run(watch._list())
    found = queue_of(job_states)
    assert found is not None
    assert (found.exists, found.admitted) == (True, True)
    assert queue_of(job_states, "without-one") == QueueView()
    assert changed == [JobKey("ml", "gpt")] * 2


def test_the_age_begins_with_the_first_list_and_ends_with_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("zerotrain.operator.cluster.kueue.time", clock)
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "5"}}}

    class Streaming(Server):
        async def watch(self, path: str, params: Any, **_: Any) -> AsyncIterator[Json]:
            yield bookmark

    watch, _, _ = watch_of(Streaming(workload()))

    def age() -> float | None:
        return watch.age_s

    assert age() is None
    asyncio.run(watch._list())
    now = 160.0
    assert age() == 60.0
    asyncio.run(watch._watch())
    assert age() == 0.0

    async def pause(pause_s: float) -> None:
        assert pause_s == MAX_PAUSE_S

    monkeypatch.setattr(asyncio, "sleep", pause)
    asyncio.run(watch._be_refused(Forbidden("no role", status=403)))
    assert age() is None


def test_what_is_not_listed_any_more_is_gone() -> None:
    server = Server(workload())
    watch, job_states, _ = watch_of(server)
    asyncio.run(watch._list())
    server.items = []
    asyncio.run(watch._list())
    assert queue_of(job_states) == QueueView()


@pytest.mark.parametrize("forged", [{"namespace": "evil"}, {"name": "another"}], ids=["namespace", "name"])
def test_a_forged_workload_admits_and_evicts_no_job(forged: dict[str, str]) -> None:
    watch, job_states, _ = watch_of(Server())

    async def take() -> None:
        await watch._list()
        await watch._take("ADDED", workload(**forged))
        assert queue_of(job_states) == QueueView()
        await watch._take("ADDED", workload())
        await watch._take("DELETED", workload(**forged))

    asyncio.run(take())
    assert queue_of(job_states) != QueueView()


def test_a_flavor_is_asked_for_once_for_many_workloads() -> None:
    server = Server(*(workload(f"{number:08}-uid") for number in range(50)))
    watch, job_states, _ = watch_of(server)
    asyncio.run(watch._list())
    assert server.asked[f"/apis/{VERSION}/resourceflavors/a"] == 1
    assert all(view.node_selector == {"pool": "a"} for view in job_states.queues.values())


def test_a_version_that_goes_away_is_looked_for_again() -> None:
    server = Server(workload())
    watch, job_states, _ = watch_of(server)
    job_states.queues_wanted.set()

    async def run_until_watched() -> None:
        server.watched.clear()
        running = asyncio.create_task(watch.run())
        await asyncio.wait_for(server.watched.wait(), PATIENCE_S)
        running.cancel()

    async def upgrade() -> None:
        await run_until_watched()
        server.served, watch._version = "kueue.x-k8s.io/v1beta2", None
        await run_until_watched()

    asyncio.run(upgrade())
    assert job_states.apis is not None
    assert job_states.apis.kueue == "kueue.x-k8s.io/v1beta2"


@pytest.mark.parametrize(
    ("server", "found"),
    [(Server(workload()), True), (Server(), False)],
    ids=["a workload is left", "none is left"],
)
def test_who_begins_to_lead_looks_for_what_was_left_behind(server: Server, found: bool) -> None:
    """A job whose `queueName` was removed while no operator ran does not request the watch itself."""
    watch, job_states, _ = watch_of(server)
    job_states.apis = None
    asyncio.run(watch.look())
    assert job_states.queues_wanted.is_set() is found
    assert server.asked[f"/apis/{VERSION}/workloads"] == 1


def test_nothing_is_looked_for_where_kueue_is_not_served() -> None:
    server = Server()
    server.served = "kueue.x-k8s.io/v1alpha1"
    watch, job_states, _ = watch_of(server)
    asyncio.run(watch.look())
    assert not job_states.queues_wanted.is_set()
    assert server.asked[f"/apis/{VERSION}/workloads"] == 0


def test_a_refusal_ends_the_look_and_an_error_does_not() -> None:
    class Refusing(Server):
        errors: ClassVar[list[Exception]] = [TimeoutError("no answer"), Forbidden("may not", status=403)]

        async def call(self, request: Request) -> Json:
            if request.path.endswith("/workloads"):
                self.asked["refused"] += 1
                raise self.errors[self.asked["refused"] - 1]
            return await super().call(request)

    server = Refusing(workload())
    watch, job_states, _ = watch_of(server)
    asyncio.run(watch.look())
    assert server.asked["refused"] == 2
    assert not job_states.queues_wanted.is_set()


def test_a_namespace_that_is_refused_keeps_no_others_jobs_waiting(caplog: pytest.LogCaptureFixture) -> None:
    job_states = JobStates(apis=ClusterApis(at=NOW, kueue=VERSION))
    server: Any = Server(workload())
    seen, lost = workload_watches(server, job_states, lambda key: None, ["ml", "lost"])
    asyncio.run(seen._list())
    assert queue_of(job_states, "without-one") == QueueView()
    assert queue_of(job_states, "without-one", "lost") is None
    asyncio.run(lost._list())
    assert queue_of(job_states, "without-one", "lost") == QueueView()

    async def refuse(pause_s: float) -> None:
        assert pause_s == MAX_PAUSE_S

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", refuse)
        for _ in range(3):
            asyncio.run(lost._be_refused(Forbidden("no role", status=403)))
    assert queue_of(job_states, "without-one", "lost") is None
    assert queue_of(job_states, "without-one") == QueueView()
    assert [record.levelname for record in caplog.records if "Workloads" in record.message] == ["WARNING"]


async def test_a_flavor_that_could_not_be_read_is_looked_at_again() -> None:
    """A role that is granted later gives no event of the Workload, which keeps its quota meanwhile."""

    class Guarded(Server):
        granted = False

        async def call(self, request: Request) -> Json:
            if "/resourceflavors/" in request.path and not self.granted:
                raise Forbidden("no role", status=403)
            return await super().call(request)

        async def watch(self, path: str, params: Any, **_: Any) -> AsyncIterator[Json]:
            self.granted = True
            self.watched.set()
            yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "6"}}}

    job_states, news = JobStates(apis=ClusterApis(at=NOW, kueue=VERSION)), asyncio.Queue[JobKey]()
    watch = WorkloadWatch(Guarded(workload()), job_states, news.put_nowait)  # type: ignore[arg-type]
    job_states.queues_wanted.set()
    await watch._list()
    await news.get()
    before = queue_of(job_states)
    assert before is not None
    assert before.problem is not None
    running = asyncio.create_task(watch.run())
    try:
        await asyncio.wait_for(news.get(), PATIENCE_S)
    finally:
        running.cancel()
    found = queue_of(job_states)
    assert found is not None
    assert (found.problem, found.node_selector) == (None, {"pool": "a"})
