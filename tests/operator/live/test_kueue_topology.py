"""A job in a queue of a real Kueue that chooses the node of every worker (topology-aware scheduling)."""

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
RACK, HOST = "zerotrain.dev/rack", "kubernetes.io/hostname"
NODES = {"rack-a-1": "a", "rack-a-2": "a", "rack-b-1": "b", "rack-b-2": "b"}
"""Node -> rack. Each node holds two workers, beside what belongs to the cluster."""
REQUIRED = {"kueue.x-k8s.io/podset-required-topology": RACK}
UNCONSTRAINED = "kueue.x-k8s.io/podset-unconstrained-topology"


@pytest.fixture(scope="module")
def racks(devcluster: Devcluster, kueue: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two racks of two nodes, and a Kueue that knows them."""
    if (reason := can_mount()) is not None:
        pytest.skip(f"Kueue reads certificates in {CERTS} alone, and no private mount can be made: {reason}")
    with devcluster.lease("control-plane") as cluster:
        for name, rack in NODES.items():
            cluster.apply(node(name, rack))
        with kueue_running(kueue, cluster, tmp_path_factory.mktemp("kueue")):
            levels = [{"nodeLabel": RACK}, {"nodeLabel": HOST}]
            flavor = {"nodeLabels": {"zerotrain.dev/pool": "racks"}, "topologyName": "racks"}
            cluster.apply(
                kueues("Topology", "racks", {"levels": levels}), kueues("ResourceFlavor", "racks", flavor)
            )
            yield cluster


@pytest.fixture(scope="module")
def kubeconfig(racks: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kubeconfig with the rights of the operator's ServiceAccount."""
    return install(racks, tmp_path_factory.mktemp("operator"))


@pytest.fixture
def space(racks: Cluster) -> Iterator[str]:
    """A namespace with a LocalQueue `team-a` that may use all nodes."""
    with team_namespace(racks, "racks", cpu=8, memory="8Gi") as name:
        yield name


@pytest.fixture
def double(racks: Cluster, kubeconfig: Path, space: str, tmp_path: Path) -> Iterator[KubeletDouble]:
    """Operator and workers; jobs go on until `may_end` is set."""
    with operator(kubeconfig, tmp_path), kubelet(racks.api, space, KEY, held=True) as workers:
        workers.nodes = tuple(NODES)
        yield workers


def test_workers_are_where_kueue_wants_them_neighbouring_ranks_next_to_each_other(
    racks: Cluster, space: str, double: KubeletDouble
) -> None:
    job = queued(racks, space, podTemplate__annotations=REQUIRED)
    wait_for_step(double, 10)
    first = places(racks, space, attempt=1)
    assert {NODES[name] for name in first} in ({"a"}, {"b"}), "all on one rack"
    assert first[0] == first[1] != first[2] == first[3]
    assert first == chosen(racks, space)
    assert job.status()["shape"]["schedulingGates"] == ["kueue.x-k8s.io/topology"]

    double.end("gpt-1-1", 137)
    runs_again(job)
    assert places(racks, space, attempt=2) == first, "the admission outlives an attempt"
    double.may_end.set()
    job.wait_for("Completed")
    check_attempts(double, attempts=2, workers=4)


def test_a_node_that_the_job_keeps_off_is_not_chosen_again(
    racks: Cluster, space: str, double: KubeletDouble
) -> None:
    rules = [{"onExitCodes": [42], "action": "ReplaceNodeAndRestart"}]
    job = queued(racks, space, podTemplate__annotations=REQUIRED, failurePolicy__rules=rules)
    wait_for_step(double, 10)
    first = places(racks, space, attempt=1)
    double.end("gpt-1-3", 42)
    runs_again(job)
    second = places(racks, space, attempt=2)
    assert first[3] not in second
    assert {NODES[name] for name in second}.isdisjoint(NODES[name] for name in first), (
        "a rack has four places"
    )
    annotations = workload(racks, space)["metadata"]["annotations"]
    assert annotations["zerotrain.dev/excluded-nodes"] == first[3]
    double.may_end.set()
    job.wait_for("Completed")
    check_attempts(double, attempts=2, workers=4)


def test_a_drained_node_is_left_for_another_one(racks: Cluster, space: str, double: KubeletDouble) -> None:
    job = queued(racks, space)
    wait_for_step(double, 10)
    left = places(racks, space, attempt=1)[3]
    racks.kubectl("cordon", left)
    try:
        runs_again(job)
        status = job.status()
        assert (status["restarts"]["preemption"], status["restarts"]["total"]) == (1, 1)
        assert left not in places(racks, space, attempt=status["attempt"])
    finally:
        racks.kubectl("uncordon", left)
    double.may_end.set()
    job.wait_for("Completed")


def test_a_job_that_asks_for_nothing_has_its_places_chosen_too(
    racks: Cluster, space: str, double: KubeletDouble
) -> None:
    job = queued(racks, space)
    wait_for_step(double, 10)
    assert places(racks, space, attempt=1) == chosen(racks, space)
    pod = racks.get("pod", "gpt-1-0", "-n", space)
    assert pod["metadata"]["annotations"][UNCONSTRAINED] == "true", "else Kueue counts its room twice"
    double.may_end.set()
    job.wait_for("Completed")


def test_a_node_that_fails_is_replaced_by_another_one(
    racks: Cluster, space: str, double: KubeletDouble
) -> None:
    """The last test of the file, since the node stays out of service."""
    job = queued(racks, space)
    wait_for_step(double, 10)
    first = places(racks, space, attempt=1)
    lost = first[3]
    double.dead, double.silent = {lost}, {lost}
    racks.kubectl("taint", "node", lost, "node.kubernetes.io/out-of-service=down:NoExecute")
    down = {"type": "Ready", "status": "False", "reason": "Down"}
    patch = json.dumps({"status": {"conditions": [down]}})
    racks.kubectl("patch", "node", lost, "--subresource=status", "--type=strategic", "-p", patch)
    runs_again(job)
    status = job.status()
    assert lost not in places(racks, space, attempt=status["attempt"])
    assert status["failures"][-1]["reason"] == "NodeLost"
    double.may_end.set()
    job.wait_for("Completed")


def queued(cluster: Cluster, space: str, **spec: Any) -> LiveJob:
    resources = {"cpu": "1", "memory": "1Gi"}
    scheduling = {"queueName": "team-a"}
    return LiveJob(cluster, space, workers=4, resources=resources, scheduling=scheduling, **spec)


def runs_again(job: LiveJob) -> None:
    def there() -> bool:
        status = job.status()
        return bool(status["attempt"] > 1 and status["phase"] == "Running")

    try:
        wait_until(there, "another attempt to run", every_s=0.25)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; status is {job.status()}") from None


def places(cluster: Cluster, space: str, *, attempt: int) -> list[str]:
    """Return the nodes of the workers of one attempt, by rank."""
    items = cluster.get("pods", "-n", space, "-l", f"zerotrain.dev/attempt={attempt}")["items"]
    found = sorted(items, key=lambda pod: int(pod["metadata"]["labels"]["zerotrain.dev/rank"]))
    for pod in found:
        assert not pod["spec"].get("schedulingGates")
        assert pod["spec"]["nodeSelector"][HOST] == pod["spec"]["nodeName"]
    return [pod["spec"]["nodeName"] for pod in found]


def chosen(cluster: Cluster, space: str) -> list[str]:
    """Return the node that Kueue assigned to each worker, by rank."""
    (pods,) = workload(cluster, space)["status"]["admission"]["podSetAssignments"]
    nodes = []
    for part in pods["topologyAssignment"]["slices"]:
        (names,) = part["valuesPerLevel"]
        counts = part["podCounts"]
        for number in range(part["domainCount"]):
            count = counts["universal"] if "universal" in counts else counts["individual"][number]
            nodes += [_value(names, number)] * count
    return nodes


def _value(names: dict[str, Any], number: int) -> str:
    if "universal" in names:
        return str(names["universal"])
    parts = names["individual"]
    return f"{parts.get('prefix', '')}{parts['roots'][number]}{parts.get('suffix', '')}"


def workload(cluster: Cluster, space: str) -> dict[str, Any]:
    (found,) = cluster.get(f"workloads.{GROUP}", "-n", space)["items"]
    return dict(found)


def node(name: str, rack: str) -> dict[str, Any]:
    """Return a node as its kubelet registers it."""
    capacity = {"cpu": "2900m", "memory": "4Gi", "pods": "10"}
    labels = {RACK: rack, HOST: name, "zerotrain.dev/pool": "racks"}
    conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
    status = {"capacity": capacity, "allocatable": capacity, "conditions": conditions}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": status,
    }
