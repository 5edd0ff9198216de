"""The Services by which the ranks of a namespace's jobs find worker 0: who makes them, when they go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.operator.api_double import ApiDouble, failure, served
from tests.operator.kube_json import KubeJson
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import operator
from tests.operator.test_operator_executor import CORE, CREATE, EXISTS, accept_all, executor, job
from tests.support.devcluster import Cluster, wait_until
from tests.support.jobs import job_json
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions import rendezvous
from zerotrain.operator.cluster.executor import ActionRefused
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.constants import RENDEZVOUS_SERVICES
from zerotrain.operator.resources import own_service, rendezvous_name, rendezvous_service

Json = dict[str, Any]
LONG_AGO = "2026-01-01T00:00:00Z"
OFTEN = {"ZEROTRAIN_OPERATOR_RESYNC_SECONDS": "1"}
SERVICES = f"{CORE}/services"
NAME = rendezvous_name(job()["metadata"]["uid"])
SERVICE = f"{SERVICES}/{NAME}"
GONE = failure(404, "NotFound")


def ours(name: str = NAME, **spec: Any) -> Json:
    """The Service as the API server has it."""
    made = rendezvous_service(ZeroTrainingJob.parse(job()))
    assert made is not None
    meta = {**made["metadata"], "name": name, "uid": f"uid-of-{name}"}
    return {**made, "metadata": meta, "spec": {**made["spec"], **spec}}


def cache(*jobs: Json) -> JobCache:
    jobs_there = JobCache()
    for item in jobs:
        jobs_there.put(item)
    return jobs_there


def another(uid: str, namespace: str) -> Json:
    meta = {"resourceVersion": "7", "name": "another", "uid": uid, "namespace": namespace}
    return job_json({f"metadata.{name}": value for name, value in meta.items()})


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changes", "name", "selected"),
    [
        ({}, NAME, {"zerotrain.dev/rendezvous": NAME.rsplit("-", 1)[-1]}),
        ({"spec.command": ["python", "train.py"]}, "gpt", {"zerotrain.dev/job": "gpt"}),
        ({"spec.workers": 1}, None, None),
    ],
    ids=["the trainer meets at a shared one", "a program has its own, for any worker", "one worker has none"],
)
def test_which_service_names_the_workers(changes: Json, name: str | None, selected: Json | None) -> None:
    parsed = ZeroTrainingJob.parse(job_json(changes))
    found = [item for item in (own_service(parsed), rendezvous_service(parsed)) if item is not None]
    assert [item["metadata"]["name"] for item in found] == ([name] if name else [])
    assert all((selected or {}).items() <= item["spec"]["selector"].items() for item in found)


@pytest.mark.unit
def test_jobs_are_spread_over_all_of_them() -> None:
    assert {rendezvous_name(f"uid-{number}") for number in range(400)} == set(RENDEZVOUS_SERVICES)


@pytest.mark.ranks
async def test_it_is_made_before_the_pods_and_once_for_all_jobs() -> None:
    double = ApiDouble()
    accept_all(double)
    async with served(double) as api:
        hands = executor(api)
        await asyncio.gather(*(rendezvous.ensure(hands, ZeroTrainingJob.parse(job())) for _ in range(5)))
        await hands.perform(job(), [CREATE])
    posted = [path.rsplit("/", 1)[-1] for verb, path, _ in double.requests if verb == "POST"]
    assert posted.index("services") < posted.index("pods")
    assert (double.asked(f"POST {SERVICES}"), double.asked(f"GET {SERVICE}")) == (1, 0)


@pytest.mark.ranks
@pytest.mark.parametrize(("there", "made"), [((200, ours()), 1), (GONE, 2)], ids=["there", "deleted"])
async def test_it_is_looked_at_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, there: tuple[int, Json], made: int
) -> None:
    monkeypatch.setattr(rendezvous, "FRESH", rendezvous.FRESH * 0)
    double = ApiDouble()
    accept_all(double)
    double.on(f"GET {SERVICE}", there)
    async with served(double) as api:
        hands = executor(api)
        for _ in range(2):
            await rendezvous.ensure(hands, ZeroTrainingJob.parse(job()))
    assert (double.asked(f"GET {SERVICE}"), double.asked(f"POST {SERVICES}")) == (1, made)


@pytest.mark.ranks
async def test_one_that_an_operator_before_made_is_taken() -> None:
    double = ApiDouble()
    double.on(f"POST {SERVICES}", EXISTS)
    double.on(f"GET {SERVICE}", (200, ours()))
    async with served(double) as api:
        await rendezvous.ensure(executor(api), ZeroTrainingJob.parse(job()))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("there", "words"),
    [
        (ours(selector={"app": "other"}), f"Service {NAME} belongs to somebody else; delete it$"),
        (ours(clusterIP="10.0.0.1"), "delete it$"),
        (ours(publishNotReadyAddresses=False), "delete it$"),
        (
            {**ours(), "metadata": {"name": NAME, "deletionTimestamp": LONG_AGO}},
            "being deleted",
        ),
    ],
    ids=["other pods", "with an address of its own", "only for pods that are ready", "on its way out"],
)
async def test_one_that_is_not_as_it_should_be_is_told_before_any_pod(there: Json, words: str) -> None:
    double = ApiDouble()
    accept_all(double)
    double.on(f"POST {SERVICES}", EXISTS)
    double.on(f"GET {SERVICE}", (200, there))
    async with served(double) as api:
        with pytest.raises(ActionRefused, match=words):
            await executor(api).perform(job(), [CREATE])
    assert double.asked(f"POST {CORE}/pods") == 0


def listed(*services: Json) -> ApiDouble:
    double = ApiDouble()
    double.on("GET /api/v1/services", (200, {"metadata": {}, "items": list(services)}))
    for item in services:
        path = f"{SERVICES}/{item['metadata']['name']}"
        double.on(f"GET {path}", (200, item))
        double.on(f"DELETE {path}", (200, {}))
    return double


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("jobs", "deleted"),
    [
        ((), 1),
        ((job(),), 0),
        ((another(namespace="elsewhere", uid=job()["metadata"]["uid"]),), 1),
        ((job_json({"metadata.resourceVersion": "7", "status": {"phase": "Completed"}}),), 0),
    ],
    ids=["no job", "its job", "one of another namespace", "its job, at rest"],
)
async def test_it_goes_when_no_job_might_use_it(jobs: tuple[Json, ...], deleted: int) -> None:
    double = listed(ours())
    async with served(double) as api:
        hands = executor(api)
        await rendezvous.tidy(hands, None, cache(*jobs))
        assert bool(hands.places.seen) == (not deleted)
    assert double.asked(f"DELETE {SERVICE}") == deleted
    if deleted:
        (options,) = double.bodies(f"DELETE {SERVICE}")
        assert options["preconditions"] == {"uid": f"uid-of-{NAME}"}


@pytest.mark.ranks
async def test_services_of_others_stay() -> None:
    foreign = {**ours(), "metadata": {**ours()["metadata"], "labels": {}}}
    double = listed(ours("front"), foreign)
    async with served(double) as api:
        await rendezvous.tidy(executor(api), None, cache())
    assert not [path for verb, path, _ in double.requests if verb == "DELETE"]


@pytest.mark.ranks
async def test_they_are_listed_once_and_again_by_the_next_leader() -> None:
    double = listed()
    async with served(double) as api:
        hands = executor(api)
        for _ in range(3):
            await rendezvous.tidy(hands, None, cache())
        assert double.asked("GET /api/v1/services") == 1
        hands.places.doubt()
        await rendezvous.tidy(hands, None, cache())
    assert double.asked("GET /api/v1/services") == 2


@pytest.mark.ranks
async def test_a_job_that_comes_meanwhile_gets_another() -> None:
    """The Service is deleted under its lock; who asks for it waits, and makes it anew."""
    double, jobs = listed(ours()), cache()
    double.on(f"POST {SERVICES}", (201, {}))
    async with served(double) as api:
        hands = executor(api)
        await rendezvous.tidy(hands, None, cache(job()))  # it is known, and wanted
        double.requests.clear()
        gone = asyncio.create_task(rendezvous.tidy(hands, None, jobs))
        await asyncio.sleep(0)
        jobs.put(job())
        await rendezvous.ensure(hands, ZeroTrainingJob.parse(job()))
        await gone
    assert [verb for verb, _, _ in double.requests] == ["GET", "DELETE", "POST"]


@pytest.mark.ranks
async def test_one_that_could_not_be_deleted_is_tried_again() -> None:
    double = listed(ours())
    double.on(f"DELETE {SERVICE}", *[failure(503, "ServiceUnavailable")] * 4, (200, {}))
    async with served(double) as api:
        hands = executor(api)
        await rendezvous.tidy(hands, None, cache())
        assert hands.places.seen
        await rendezvous.tidy(hands, None, cache())
        assert not hands.places.seen
    assert double.asked(f"DELETE {SERVICE}") == 5


@pytest.mark.cluster
def test_worker_0_has_its_name_and_the_last_job_takes_the_service_along(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    path = f"/api/v1/namespaces/{namespace}/services"

    def behind() -> list[Json]:
        return [endpoint for item in api.get(slices)["items"] for endpoint in item["endpoints"] or ()]

    def services() -> list[str]:
        return [item["metadata"]["name"] for item in api.get(path)["items"]]

    def pods_of_a_new_job() -> LiveJob:
        live = LiveJob(control_plane, namespace)
        wait_until(lambda: {"Pod/gpt-1-0", "Pod/gpt-1-1"} <= set(live.owned()), "the pods")
        return live

    with operator(operator_kubeconfig, tmp_path, OFTEN):
        uid = pods_of_a_new_job().object()["metadata"]["uid"]
        for index in (0, 1):
            address = f"10.1.2.{index + 3}"
            status = {"podIP": address, "podIPs": [{"ip": address}]}
            api.patch(f"/api/v1/namespaces/{namespace}/pods/gpt-1-{index}/status", {"status": status})
        (found,) = wait_until(behind, "the endpoint of worker 0")
        assert (found["addresses"], found["hostname"]) == (["10.1.2.3"], "gpt-1-0")
        assert services() == [rendezvous_name(uid)]
        control_plane.kubectl("delete", "ztj", "gpt", "-n", namespace)
        wait_until(lambda: not services(), "the Service to go")
        pods_of_a_new_job()
    control_plane.kubectl("delete", "ztj", "gpt", "-n", namespace)
    assert services()
    with operator(operator_kubeconfig, tmp_path, OFTEN):
        wait_until(lambda: not services(), "the Service that was left behind to go")
