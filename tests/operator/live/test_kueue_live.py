"""A job in a queue of a real Kueue: how its scheduler and controllers react to the operator's writes.

The other half of `operator/live/test_kueue.py`, where a script plays Kueue and so may write anything at any
moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.operator.kubelet_double import KubeletDouble, kubelet, wait_for_step
from tests.operator.live_job import LiveJob, check_attempts
from tests.operator.operator_process import KEY, install, operator
from tests.support.devcluster import Cluster, Devcluster, wait_until
from tests.support.kueue import CERTS, GROUP, kueue_running, kueues, team_namespace
from tests.support.private_mount import can_mount

pytestmark = pytest.mark.tools
POOL = "zerotrain.dev/pool"
HASTY = {
    "waitForPodsReady": {
        "timeout": "6s",
        "requeuingStrategy": {"timestamp": "Eviction", "backoffBaseSeconds": 1, "backoffMaxSeconds": 1},
    }
}
"""Configuration in which a job whose pods are not ready soon loses its admission, and is soon requeued."""


@pytest.fixture(scope="module")
def own_cluster(devcluster: Devcluster) -> Iterator[Cluster]:
    """A cluster of the test's own: Kueue's kinds are cluster-wide, and other tests script them."""
    if (reason := can_mount()) is not None:
        pytest.skip(f"Kueue reads certificates in {CERTS} alone, and no private mount can be made: {reason}")
    with devcluster.lease("control-plane") as cluster:
        yield cluster


@pytest.fixture(scope="module", params=[{}], ids=["as shipped"])
def queues(
    own_cluster: Cluster,
    kueue: Path,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """Cluster with Kueue running, configured as the test says, one flavor and two priorities."""
    with kueue_running(kueue, own_cluster, tmp_path_factory.mktemp("kueue"), **request.param):
        flavor = {"nodeLabels": {POOL: "a100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
        own_cluster.apply(
            kueues("ResourceFlavor", "a100", flavor), priority("low", 10), priority("high", 1000)
        )
        yield own_cluster


@pytest.fixture(scope="module")
def kubeconfig(own_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kubeconfig with the rights of the operator's ServiceAccount."""
    return install(own_cluster, tmp_path_factory.mktemp("operator"))


@pytest.fixture
def space(queues: Cluster) -> Iterator[str]:
    """A namespace with a LocalQueue `team-a` of a ClusterQueue with quota for one job of two workers."""
    preemption = {"withinClusterQueue": "LowerPriority"}
    with team_namespace(queues, "a100", cpu=2, memory="4Gi", preemption=preemption) as name:
        yield name


@pytest.fixture
def double(queues: Cluster, kubeconfig: Path, space: str, tmp_path: Path) -> Iterator[KubeletDouble]:
    """Operator and workers; jobs go on until `may_end` is set."""
    with operator(kubeconfig, tmp_path), kubelet(queues.api, space, KEY, held=True) as workers:
        yield workers


def test_a_more_important_job_takes_the_capacity_through_a_checkpoint_and_gives_it_back(
    queues: Cluster, space: str, double: KubeletDouble
) -> None:
    first = queued(queues, space, "first", priorityClassName="low")
    wait_for_step(double, 20)
    pod = queues.get("pod", "first-1-0", "-n", space)
    assert pod["spec"]["nodeSelector"] == {POOL: "a100"}
    assert {"key": "gpu", "operator": "Exists"} in pod["spec"]["tolerations"]
    wait_until(lambda: condition(queues, space, "first", "PodsReady").get("status") == "True", "PodsReady")

    second = queued(queues, space, "second", priorityClassName="high")
    second.wait_for("Running")
    waiting = first.status()
    assert waiting["phase"] == "Queued"
    assert waiting["checkpoint"]["last"]["durable"]
    assert waiting["restarts"]["total"] == 0
    assert condition(queues, space, "first", "Requeued")["status"] == "True"
    assert condition(queues, space, "first", "PodsReady")["reason"] == "WaitForStart"
    wait_until(
        lambda: "insufficient unused quota" in first.condition("Admitted").get("message", ""),
        "Kueue's words on who has the quota",
    )

    second.patch('{"suspend": true}')
    second.wait_for("Suspended")
    first.wait_for("Running")
    double.may_end.set()
    first.wait_for("Completed")
    wait_until(
        lambda: condition(queues, space, "first", "Finished").get("reason") == "Succeeded", "its end in Kueue"
    )
    second.patch('{"suspend": false}')
    second.wait_for("Completed")
    uid = first.object()["metadata"]["uid"]
    of_first = [item for item in double.trainings() if item.job_uid == uid]
    assert [item.attempt for item in of_first] == [1, 2]
    assert of_first[1].first == of_first[0].durable > 0


@pytest.mark.parametrize(
    ("stop", "start", "reason"),
    [
        pytest.param(
            ("clusterqueue", {"stopPolicy": "HoldAndDrain"}),
            ("clusterqueue", {"stopPolicy": "None"}),
            "ClusterQueueStopped",
            id="the queue is stopped and started",
        ),
        pytest.param(
            ("workload", {"active": False}),
            ("workload", {"active": True}),
            "Deactivated",
            id="the job's Workload is deactivated and activated",
        ),
    ],
)
def test_a_job_that_was_stopped_comes_back_when_it_is_resumed(
    queues: Cluster,
    space: str,
    double: KubeletDouble,
    stop: tuple[str, dict[str, Any]],
    start: tuple[str, dict[str, Any]],
    reason: str,
) -> None:
    job = queued(queues, space, "gpt")
    wait_for_step(double, 10)
    uid = workload(queues, space, "gpt")["metadata"]["uid"]
    edit(queues, space, *stop)
    wait_until(
        lambda: condition(queues, space, "gpt", "QuotaReserved").get("status") == "False", "the quota back"
    )
    evicted = job.wait_for("Queued")
    assert evicted["checkpoint"]["last"]["durable"]
    assert queues.get("pods", "-n", space)["items"] == [], "the quota went back before the pods did"
    assert condition(queues, space, "gpt", "Requeued")["status"] == "False"
    assert reason in job.condition("Admitted")["message"]

    edit(queues, space, *start)
    job.wait_for("Running")
    double.may_end.set()
    job.wait_for("Completed")
    check_attempts(double, attempts=2)
    assert workload(queues, space, "gpt")["metadata"]["uid"] == uid, "Kueue counts evictions in it"


@pytest.mark.parametrize("queues", [HASTY], ids=["hasty"], indirect=True)
def test_pods_that_do_not_start_in_time_lose_their_place_at_every_admission(
    queues: Cluster, space: str, double: KubeletDouble
) -> None:
    """Kueue's limit for a start holds anew after a job ran, was evicted and is admitted again."""
    job = queued(queues, space, "gpt")
    wait_for_step(double, 10)
    double.start_up = False
    edit(queues, space, "clusterqueue", {"stopPolicy": "HoldAndDrain"})
    job.wait_for("Queued")
    edit(queues, space, "clusterqueue", {"stopPolicy": "None"})
    wait_until(
        lambda: condition(queues, space, "gpt", "Evicted").get("reason") == "PodsReadyTimeout", "the time-out"
    )
    double.start_up = True
    job.wait_for("Running")
    double.may_end.set()
    job.wait_for("Completed")
    last = double.trainings()[-1]
    assert (last.first > 0, last.exit_code) == (True, 0)


def queued(cluster: Cluster, space: str, name: str, **scheduling: Any) -> LiveJob:
    """Return a job that takes all of the quota."""
    resources = {"cpu": "1", "memory": "1Gi"}
    return LiveJob(
        cluster, space, name, resources=resources, scheduling={"queueName": "team-a", **scheduling}
    )


def workload(cluster: Cluster, space: str, job: str) -> dict[str, Any]:
    (found,) = cluster.get(f"workloads.{GROUP}", "-n", space, "-l", f"zerotrain.dev/job={job}")["items"]
    return dict(found)


def condition(cluster: Cluster, space: str, job: str, kind: str) -> dict[str, Any]:
    """Return a condition of the job's Workload; empty where there is none of that type."""
    found = workload(cluster, space, job).get("status", {}).get("conditions", ())
    return next((dict(item) for item in found if item["type"] == kind), {})


def edit(cluster: Cluster, space: str, kind: str, spec: dict[str, Any]) -> None:
    """Edit an object of Kueue as an administrator does."""
    name = space if kind == "clusterqueue" else workload(cluster, space, "gpt")["metadata"]["name"]
    patch = json.dumps({"spec": spec})
    cluster.kubectl("patch", f"{kind}s.{GROUP}", name, "-n", space, "--type=merge", "-p", patch)


def priority(name: str, value: int) -> dict[str, Any]:
    meta = {"name": name}
    return {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": meta, "value": value}
