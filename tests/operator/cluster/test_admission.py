"""Admission by the cluster: which APIs it serves, and what a Workload's conditions mean."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.operator.api_double import ApiDouble, Json, served
from tests.operator.cluster.test_executor import job, make_executor
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.scheduling import Gang
from zerotrain.operator.cluster.discovery import Priorities, discover
from zerotrain.operator.cluster.executor import ActionRefused
from zerotrain.operator.cluster.workload_status import (
    Flavor,
    StatusChange,
    advanced,
    flavors_of,
    queue_view,
)
from zerotrain.operator.reconcile.observe import ClusterApis, QueueView
from zerotrain.operator.reconcile.plan import QueueStep

NOW = datetime(2026, 1, 1, tzinfo=UTC)
UID = job()["metadata"]["uid"]
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"


def serve(double: ApiDouble, group: str, **versions: list[str]) -> None:
    listed = [{"version": version} for version in versions]
    double.on(f"GET /apis/{group}", (200, {"versions": listed}))
    for version, resources in versions.items():
        found = {"resources": [{"name": name} for name in resources]}
        double.on(f"GET /apis/{group}/{version}", (200, found))


@pytest.mark.ranks
async def test_the_newest_version_that_has_the_group_is_taken() -> None:
    double = ApiDouble()
    serve(double, "scheduling.k8s.io", v1=["priorityclasses"], v1alpha2=["podgroups"], v1beta1=["podgroups"])
    serve(double, "kueue.x-k8s.io", v1beta1=["workloads"], v1beta2=["workloads", "resourceflavors"])
    async with served(double) as api:
        found = await discover(api)
    assert found.gangs == {Gang.NATIVE: "scheduling.k8s.io/v1beta1"}
    assert found.kueue == "kueue.x-k8s.io/v1beta2"


@pytest.mark.ranks
async def test_a_group_that_cannot_be_written_is_not_found() -> None:
    double = ApiDouble()
    serve(double, "scheduling.k8s.io", v1=["priorityclasses"], v1alpha1=["workloads"], v1beta1=[])
    async with served(double) as api:
        found = await discover(api)
    assert (found.gangs, found.kueue) == ({}, None)


@pytest.mark.ranks
async def test_jobs_that_ask_together_list_the_priorities_once() -> None:
    double, plain = ApiDouble(), ZeroTrainingJob.parse(job())
    high = {"metadata": {"name": "high"}, "value": 7, "globalDefault": True}
    double.on(f"GET {PRIORITIES}", (200, {"items": [high]}))
    async with served(double) as api:
        priorities = Priorities()
        assert set(await asyncio.gather(*(priorities.of(api, plain) for _ in range(5)))) == {7}
        assert double.asked(f"GET {PRIORITIES}") == 1
        double.on(f"GET {PRIORITIES}", (200, {"items": [{"metadata": {"name": "new"}, "value": 9}]}))
        scheduling = {"priorityClassName": "new"}
        body = job()
        named = ZeroTrainingJob.parse({**body, "spec": {**body["spec"], "scheduling": scheduling}})
        found = await priorities.of(api, named)
        assert found == 9, "a class that is younger than the list was not found"


def item(status: Json, **spec: Any) -> Json:
    pods = [{"name": "workers", "count": 2}]
    return {"spec": {"podSets": pods, "queueName": "q", **spec}, "status": status}


def conditions(**words: str) -> list[Json]:
    """Return conditions from texts of the form `True Reason message`, by type."""
    found = []
    for kind, text in words.items():
        value, reason, *message = text.split(" ", 2)
        found.append({"type": kind, "status": value, "reason": reason, "message": " ".join(message)})
    return found


@pytest.mark.unit
def test_a_workload_as_it_was_made() -> None:
    made = item({})
    assert queue_view(made, []) == QueueView(exists=True, workers=2, queue="q")
    going = {**made, "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert queue_view(going, []) == QueueView(exists=True, deleting=True, workers=2, queue="q")


@pytest.mark.unit
def test_an_admission_with_flavors_and_the_updates_of_its_checks() -> None:
    checks = [
        {
            "podSetUpdates": [
                {"name": "workers", "labels": {"l": "1"}, "nodeSelector": {"pool": "x", "zone": "z"}}
            ]
        }
    ]
    status = {
        "conditions": conditions(QuotaReserved="True Reserved", Admitted="True Admitted"),
        "admission": {
            "clusterQueue": "all",
            "podSetAssignments": [{"name": "workers", "flavors": {"cpu": "f", "nvidia.com/gpu": "f"}}],
        },
        "admissionChecks": checks,
    }
    assert flavors_of(status) == ("f",)
    view = queue_view(item(status), [Flavor(node_labels={"pool": "a100"})])
    assert (view.admitted, view.holds_quota, view.cluster_queue) == (True, True, "all")
    assert view.node_selector == {"pool": "a100", "zone": "z"}
    assert view.labels == {"l": "1"}


@pytest.mark.unit
def test_a_toleration_of_a_newer_kueue_is_a_problem_and_no_crash() -> None:
    update = {"name": "workers", "tolerations": [{"key": "a", "operator": "Newer"}]}
    view = queue_view(item({"admissionChecks": [{"podSetUpdates": [update]}]}), [])
    assert view.problem is not None
    assert "admission check" in view.problem


@pytest.mark.unit
@pytest.mark.parametrize(
    ("reason", "requeued"),
    [
        ("Preempted", "True"),
        ("AdmissionCheck", "True"),
        ("PodsReadyTimeout", "False"),
        ("Deactivated", "False"),
    ],
)
def test_a_release_clears_the_reservation_and_keeps_what_is_not_ours(reason: str, requeued: str) -> None:
    before = {
        "conditions": conditions(
            Evicted=f"True {reason} why", QuotaReserved="True R", Admitted="True A", Other="True O"
        ),
        "admission": {"clusterQueue": "all"},
        "requeueState": {"count": 1},
    }
    change = StatusChange(step=QueueStep.RELEASE, message="why", at=NOW, generation=4)
    after = advanced(before, change)
    words = {each["type"]: each["status"] for each in after["conditions"]}
    assert words == {
        "Evicted": "True",
        "QuotaReserved": "False",
        "Admitted": "False",
        "Other": "True",
        "Requeued": requeued,
    }
    assert "admission" not in after
    assert after["requeueState"] == {"count": 1}
    assert before["admission"] == {"clusterQueue": "all"}, "the body of the watch was changed"
    again = advanced(after, change)
    assert again["conditions"] == after["conditions"], "a second release moves no time"


@pytest.mark.unit
@pytest.mark.parametrize(("phase", "reason"), [("Completed", "Succeeded"), ("Failed", "Failed")])
def test_finished(phase: str, reason: str) -> None:
    after = advanced(
        {}, StatusChange(step=QueueStep.FINISH, message=f"the job is {phase}", at=NOW, generation=1)
    )
    (condition,) = after["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Finished", "True", reason)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "version", "reason", "way_out"),
    [
        (
            "PodGroup",
            "scheduling.k8s.io/v1alpha2",
            "GangMissing",
            "set spec.suspend to true, choose another spec.scheduling.gang",
        ),
        ("Workload", "kueue.x-k8s.io/v1beta1", "QueueMissing", "remove the queue's name"),
    ],
)
async def test_an_api_that_went_away_is_reported_and_discovered_again(
    kind: str, version: str, reason: str, way_out: str
) -> None:
    double = ApiDouble()
    async with served(double) as api:
        executor = make_executor(api)
        executor.job_states.apis = ClusterApis(at=NOW)
        item = {"apiVersion": version, "kind": kind, "metadata": {"name": "x", "namespace": "ml"}}
        with pytest.raises(ActionRefused) as caught:
            await executor.post(item)
    problem = caught.value.problem
    assert problem.reason == reason
    assert f"no longer serves {kind.lower()}s of {version}" in problem.message
    assert way_out in problem.message
    assert problem.lasting
    assert executor.job_states.apis is None
