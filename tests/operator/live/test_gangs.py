"""Gangs, all workers or none, on a real scheduler with its gang plugin, and a size that follows the
cluster's.

Simulated nodes of 8 GPUs; a pod that fills one of two nodes leaves capacity for one worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.operator.live_job import LiveJob
from tests.operator.operator_process import OperatorProcess, install, operator
from tests.support.crd import wait_established
from tests.support.devcluster import Cluster, Devcluster, wait_until
from tests.support.jobs import ABSENT

pytestmark = pytest.mark.cluster
CRDS = Path(__file__).parents[1] / "crds"
GATES = ("--feature-gates", "GenericWorkload=true,GangScheduling=true,TopologyAwareWorkloadScheduling=true")
NATIVE = ("--runtime-config", "scheduling.k8s.io/v1alpha2=true")
GROUPS = "podgroups.scheduling.k8s.io"


@pytest.fixture(scope="module")
def gang_cluster(simulated_cluster: object) -> Iterator[Cluster]:
    with Devcluster().lease("simulated", "--nodes", "2", *GATES, *NATIVE) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def process(gang_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    folder = tmp_path_factory.mktemp("gangs")
    with operator(install(gang_cluster, folder), folder, {"ZEROTRAIN_OPERATOR_CHANNEL": "silent"}) as process:
        yield process


@pytest.fixture
def space(gang_cluster: Cluster) -> Iterator[str]:
    with gang_cluster.namespace() as name:
        yield name
        # The nodes are shared: the next test must find them free.
        gang_cluster.kubectl("delete", "pods,ztj", "--all", "-n", name, "--grace-period=0", "--force")


def two_whole_nodes(cluster: Cluster, space: str, **scheduling: Any) -> LiveJob:
    return LiveJob(
        cluster,
        space,
        workers=2,
        checkpoint=ABSENT,
        resources={"gpus": {"count": 8}, "cpu": "1", "memory": "1Gi"},
        scheduling=scheduling,
    )


def block_a_node(cluster: Cluster, space: str) -> None:
    """Fill one node with a pod, and return when it runs."""
    resources = {"limits": {"nvidia.com/gpu": "8"}}
    containers = [{"name": "main", "image": "simulated", "resources": resources}]
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "blocker"},
            "spec": {"containers": containers},
        },
        namespace=space,
    )
    cluster.kubectl("wait", "--for=condition=Ready", "pod/blocker", "-n", space, "--timeout=100s")


def nodes_of(cluster: Cluster, space: str) -> list[str | None]:
    pods = cluster.get("pods", "-n", space, "-l", "zerotrain.dev/job")["items"]
    return [pod["spec"].get("nodeName") for pod in pods]


def test_the_scheduler_binds_all_workers_or_none(
    gang_cluster: Cluster, process: OperatorProcess, space: str
) -> None:
    block_a_node(gang_cluster, space)
    job = two_whole_nodes(gang_cluster, space, gang="Auto", topologyKey="topology.kubernetes.io/region")
    refused = wait_until(
        lambda: (found := job.condition("PodsScheduled")).get("reason") == "Unschedulable" and found,
        "the scheduler's refusal",
    )
    assert "gpu" in refused["message"] or "group" in refused["message"]
    assert nodes_of(gang_cluster, space) == [None, None]
    (group,) = gang_cluster.get(GROUPS, "-n", space)["items"]
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 2}}
    assert group["spec"]["schedulingConstraints"]["topology"][0]["key"] == "topology.kubernetes.io/region"
    assert job.status()["shape"]["gang"] == "scheduling.k8s.io/v1alpha2"
    gang_cluster.kubectl("delete", "pod", "blocker", "-n", space, "--grace-period=0", "--force")
    job.wait_for("Running")
    assert sorted(map(str, nodes_of(gang_cluster, space))) == ["node-0", "node-1"]
    policy: dict[str, Any] = {"schedulingPolicy": {"basic": {}}}
    with foreign_group(gang_cluster, space, "scheduling.k8s.io/v1alpha2", "gpt-2", policy):
        fail = "devcluster.zerotrain.dev/exit-code=1"
        gang_cluster.kubectl("annotate", "pod", "gpt-1-1", "-n", space, fail)
        wait_until(lambda: job.condition("Reconciling").get("reason") == "NameTaken", "the refusal")
    job.wait_for("Running")
    assert job.status()["attempt"] == 2
    assert names_of(gang_cluster, space, GROUPS) == ["gpt-2"]


def test_a_job_gets_smaller_with_its_cluster_and_grows_back(
    gang_cluster: Cluster, process: OperatorProcess, space: str
) -> None:
    """One of the two nodes is lost, and comes back under the same name."""
    job = LiveJob(
        gang_cluster,
        space,
        workers=2,
        elastic={"minWorkers": 1, "maxWorkers": 2, "shrinkAfterSeconds": 2, "growAfterSeconds": 5},
        checkpoint={"volume": {"nfs": {"server": "files", "path": "/"}}, "gracePeriodSeconds": 1},
        resources={"gpus": {"count": 8}, "cpu": "1", "memory": "1Gi"},
    )
    whole = job.wait_for("Running")
    assert whole["workers"]["desired"] == 2
    node = gang_cluster.get("node", "node-1")
    gang_cluster.kubectl("delete", "node", "node-1")
    try:
        small = wait_until(lambda: running_with(job, 1), "the smaller attempt")
        assert small["elastic"]["reason"] == "Capacity"
        assert small["failures"][-1]["reason"] == "NodeLost"
        assert set(nodes_of(gang_cluster, space)) == {"node-0"}
    finally:
        for field in ("uid", "resourceVersion", "creationTimestamp"):
            del node["metadata"][field]
        gang_cluster.apply(node)
    grown = wait_until(lambda: running_with(job, 2), "the attempt with both nodes again")
    assert "workers" not in grown["elastic"], "as many as the spec asks for"
    assert sorted(map(str, nodes_of(gang_cluster, space))) == ["node-0", "node-1"]
    messages = [text for reason, text in job.events("Resizing", "Resizing") if reason == "Resizing"]
    assert len(messages) == 2, messages
    assert grown["restarts"]["total"] == grown["restarts"]["infra"] == 1, "a resize is none"


def running_with(job: LiveJob, workers: int) -> dict[str, Any] | None:
    """Return the status once all workers of an attempt of this size run."""
    status = job.status()
    found = status.get("phase") == "Running" and status["workers"]["running"] == workers
    return status if found and status["workers"]["desired"] == workers else None


def test_the_pod_groups_of_other_schedulers_are_found_and_written(
    gang_cluster: Cluster, process: OperatorProcess, space: str
) -> None:
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 5}
    gang_cluster.apply({**priority, "metadata": {"name": "high"}})
    gang_cluster.kubectl("apply", "-f", str(CRDS / "pod_groups.yaml"))
    wait_established(gang_cluster, "podgroups.scheduling.volcano.sh", "podgroups.scheduling.x-k8s.io")
    job = two_whole_nodes(gang_cluster, space, gang="Volcano", priorityClassName="high")
    other = LiveJob(
        gang_cluster,
        space,
        "other",
        checkpoint=ABSENT,
        resources={"gpus": {"count": 2}, "cpu": "500m"},
        scheduling={"gang": "Coscheduling"},
    )
    coscheduled = _group_of(gang_cluster, space, "podgroups.scheduling.x-k8s.io", "other-1")
    assert coscheduled["spec"] == {
        "minMember": 2,
        "minResources": {"cpu": "1", "nvidia.com/gpu": "4"},
    }
    volcano = _group_of(gang_cluster, space, "podgroups.scheduling.volcano.sh", "gpt-1")
    assert (volcano["spec"]["minMember"], volcano["spec"]["priorityClassName"]) == (2, "high")
    assert volcano["spec"]["minResources"]["nvidia.com/gpu"] == "16"
    wait_until(lambda: len(nodes_of(gang_cluster, space)) == 4, "the pods of both")
    pods = {pod["metadata"]["name"]: pod for pod in gang_cluster.get("pods", "-n", space)["items"]}
    assert pods["gpt-1-0"]["spec"]["schedulerName"] == "volcano"
    assert pods["gpt-1-0"]["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "gpt-1"
    assert pods["other-1-1"]["spec"]["schedulerName"] == "scheduler-plugins-scheduler"
    assert pods["other-1-1"]["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "other-1"
    assert other.status()["shape"]["gang"] == "scheduling.x-k8s.io/v1alpha1"
    for each, version in ((job, "scheduling.volcano.sh/v1beta1"), (other, "scheduling.x-k8s.io/v1alpha1")):
        with foreign_group(gang_cluster, space, version, f"{each.name}-2", {"minMember": 1}):
            gang_cluster.kubectl("delete", "pod", f"{each.name}-1-0", "-n", space, "--wait=false")
            wait_until(
                lambda each=each: each.condition("Reconciling").get("reason") == "NameTaken", "the refusal"
            )
        resource = f"podgroups.{version.partition('/')[0]}"
        wait_until(
            lambda each=each, resource=resource: (
                names_of(gang_cluster, space, resource) == [f"{each.name}-2"]
                and each.condition("Reconciling")["reason"] != "NameTaken"
            ),
            "the group of the next attempt, alone",
        )


@contextmanager
def foreign_group(cluster: Cluster, space: str, version: str, name: str, spec: Any) -> Iterator[None]:
    """Keep another owner's group under the name of ours, until the end of the block."""
    item = {"apiVersion": version, "kind": "PodGroup", "metadata": {"name": name}, "spec": spec}
    cluster.apply(item, namespace=space)
    yield
    cluster.kubectl("delete", f"podgroups.{version.partition('/')[0]}", name, "-n", space)


def names_of(cluster: Cluster, space: str, resource: str) -> list[str]:
    return [item["metadata"]["name"] for item in cluster.get(resource, "-n", space)["items"]]


def _group_of(cluster: Cluster, space: str, resource: str, name: str) -> dict[str, Any]:
    def there() -> dict[str, Any] | None:
        items = cluster.get(resource, "-n", space)["items"]
        return next((item for item in items if item["metadata"]["name"] == name), None)

    return dict(wait_until(there, f"pod group {name}"))
