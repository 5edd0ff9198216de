"""Simulated nodes: their resources, and pods that run, end and hang as their annotations say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.devcluster import Cluster, wait_until

pytestmark = pytest.mark.cluster
PREFIX = "devcluster.zerotrain.dev/"


def pod(name: str, *, gpus: int = 0, **annotations: str) -> dict[str, Any]:
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "annotations": {PREFIX + key.replace("_", "-"): value for key, value in annotations.items()},
        },
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "simulated", "resources": resources}],
        },
    }


@pytest.fixture(scope="module")
def cluster(simulated_cluster: Callable[[int], Cluster]) -> Cluster:
    return simulated_cluster(4)


@pytest.fixture
def space(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace() as name:
        yield name


def test_nodes_offer_gpus_storage_and_zones(cluster: Cluster) -> None:
    nodes = cluster.get("nodes")["items"]
    assert len(nodes) == 4
    assert {n["status"]["allocatable"]["nvidia.com/gpu"] for n in nodes} == {"8"}
    assert {n["status"]["allocatable"]["ephemeral-storage"] for n in nodes} == {"3500Gi"}
    zones = {n["metadata"]["labels"]["topology.kubernetes.io/zone"] for n in nodes}
    assert zones == {"zone-a", "zone-b", "zone-c"}


def test_gpus_are_counted(cluster: Cluster, space: str) -> None:
    cluster.apply(*(pod(f"whole-{i}", gpus=8) for i in range(5)), namespace=space)

    def phases() -> list[str]:
        return sorted(p["status"]["phase"] for p in cluster.get("pods", "-n", space)["items"])

    wait_until(lambda: phases() == ["Pending", *["Running"] * 4], "four of five pods on four nodes")

    def refusal() -> str:
        pods = cluster.get("pods", "-n", space)["items"]
        (waiting,) = [pod["status"] for pod in pods if pod["status"]["phase"] == "Pending"]
        return " ".join(item.get("message", "") for item in waiting.get("conditions", ()))

    assert "Insufficient nvidia.com/gpu" in wait_until(refusal, "the scheduler's refusal of the fifth")


def test_a_rank_ends_with_the_chosen_code(cluster: Cluster, space: str) -> None:
    cluster.apply(
        pod("done", exit_code="0"),
        pod("killed", exit_code="137", exit_after="1s", exit_reason="OOMKilled", exit_message='{"rank": 3}'),
        pod("runs"),
        pod("waits", never_start="true"),
        namespace=space,
    )

    def phases() -> dict[str, str]:
        return {
            p["metadata"]["name"]: p["status"]["phase"] for p in cluster.get("pods", "-n", space)["items"]
        }

    expected = {"done": "Succeeded", "killed": "Failed", "runs": "Running", "waits": "Pending"}
    wait_until(lambda: phases() == expected, f"the phases {expected}")
    status = cluster.get("pod", "killed", "-n", space)["status"]["containerStatuses"][0]["state"][
        "terminated"
    ]
    assert (status["exitCode"], status["reason"], status["message"]) == (137, "OOMKilled", '{"rank": 3}')
    # An annotation can make a running pod fail later.
    cluster.kubectl("annotate", "pod", "runs", "-n", space, f"{PREFIX}exit-code=75")
    wait_until(lambda: phases()["runs"] == "Failed", "the pod that was told to fail")


def test_a_pod_hangs_in_terminating_until_it_may_go(cluster: Cluster, space: str) -> None:
    cluster.apply(pod("stuck", hang_terminating="true"), pod("goes"), namespace=space)
    wait_until(
        lambda: all(p["status"]["phase"] == "Running" for p in cluster.get("pods", "-n", space)["items"]),
        "both pods to run",
    )
    cluster.kubectl("delete", "pod", "stuck", "goes", "-n", space, "--wait=false")

    def names() -> set[str]:
        return {p["metadata"]["name"] for p in cluster.get("pods", "-n", space)["items"]}

    wait_until(lambda: names() == {"stuck"}, "the other pod to go")
    assert cluster.get("pod", "stuck", "-n", space)["metadata"]["deletionTimestamp"]
    cluster.kubectl("annotate", "pod", "stuck", "-n", space, f"{PREFIX}hang-terminating-")
    wait_until(lambda: not names(), "the pod to go")


def test_a_node_can_become_not_ready_and_recover(cluster: Cluster) -> None:
    def ready() -> str:
        conditions = cluster.get("node", "node-3")["status"]["conditions"]
        return str(next(c["status"] for c in conditions if c["type"] == "Ready"))

    cluster.kubectl("annotate", "node", "node-3", f"{PREFIX}not-ready=true")
    try:
        wait_until(lambda: ready() == "False", "the node to be not ready")
    finally:
        cluster.kubectl("annotate", "node", "node-3", f"{PREFIX}not-ready-")
    wait_until(lambda: ready() == "True", "the node to be ready")
