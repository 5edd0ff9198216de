"""A release beside a job that trains: the operator is upgraded, removed and installed anew; the pods go
on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.crd import CRD_NAME
from tests.support.devcluster import Cluster, wait_until
from tests.support.helm import RELEASE, Helm
from zerotrain.contract.worker_environment import WORKER_HTTP_PORT

NAMESPACE = "zerotrain-system"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
CLAIM: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "checkpoints"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}
JOB: dict[str, Any] = {
    "apiVersion": "zerotrain.dev/v1alpha1",
    "kind": "ZeroTrainingJob",
    "metadata": {"name": "gpt"},
    "spec": {
        "workers": 1,
        "image": "localhost/zerotrain:dev",
        "model": {"gpt": {"dModel": 32, "layers": 1, "heads": 2, "context": 32}},
        "data": {"path": "builtin:python-stdlib"},
        "steps": 10_000_000,
        "resources": {"cpu": "200m", "memory": "1Gi", "sharedMemory": "64Mi"},
        "checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "checkpoints"}}},
        "config": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}},
    },
}

# Six rollouts of real pods during a training: a minute on an idle machine, more on a busy one.
pytestmark = [pytest.mark.tools, pytest.mark.timeout(900)]


@pytest.fixture
def release(helm: Path, node_cluster: Cluster, tmp_path: Path) -> Iterator[Helm]:
    tool = Helm(program=helm, home=tmp_path, namespace=NAMESPACE, kubeconfig=node_cluster.kubeconfig)
    yield tool
    tool.attempt("uninstall", RELEASE, "--ignore-not-found", "--wait")
    node_cluster.kubectl("delete", "crd", CRD_NAME, "--ignore-not-found")
    node_cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")


class TrainingJob:
    """The job as the cluster shows it, and as its own pod does."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace

    @property
    def status(self) -> dict[str, Any]:
        found = self._cluster.get("ztj", "gpt", "-n", self._namespace)
        return dict(found.get("status", {}))

    @property
    def pods(self) -> dict[str, str]:
        """Return name and UID of the running pods."""
        items = self._cluster.get("pods", "-n", self._namespace, "-l", "zerotrain.dev/job=gpt")["items"]
        return {
            item["metadata"]["name"]: item["metadata"]["uid"]
            for item in items
            if item["status"]["phase"] == "Running"
        }

    def step_of_status(self) -> int:
        return int(self.status.get("progress", {}).get("step", 0))

    def step_of_pod(self) -> int:
        """Return the step from the worker itself, through the API server: no operator is needed."""
        (name,) = self.pods
        path = f"/api/v1/namespaces/{self._namespace}/pods/{name}:{WORKER_HTTP_PORT}/proxy/progress"
        report = json.loads(self._cluster.kubectl("get", "--raw", path).stdout)
        return int(max(rank["step"] for rank in report["ranks"]))

    def goes_on(self, *, by_status: bool = True) -> None:
        """Wait until the job makes new steps."""
        step = self.step_of_status if by_status else self.step_of_pod
        before = step()
        wait_until(lambda: step() > before, f"a step after {before}", timeout_s=180, every_s=0.5)


def test_a_job_trains_on_through_upgrade_rollback_uninstall_and_a_new_installation(
    node_cluster: Cluster, node_namespace: str, release: Helm
) -> None:
    release.install("--wait", "--timeout", "5m")
    node_cluster.kubectl("label", "namespace", NAMESPACE, RESTRICTED)
    node_cluster.apply(CLAIM, JOB, namespace=node_namespace)
    job = TrainingJob(node_cluster, node_namespace)
    wait_until(lambda: job.step_of_status() > 0, "the first steps", timeout_s=240, every_s=0.5)
    pods = job.pods
    assert len(pods) == 1

    release.upgrade("--wait", "--timeout", "5m", values={"operator": {"replicas": 2, "resyncSeconds": 60}})
    tested = release.run("test", RELEASE, "--logs", "--timeout", "2m")
    assert "2 of the operator's replicas are ready" in tested, "and exactly one of them leads"
    job.goes_on()
    release.run("rollback", RELEASE, "1", "--wait", "--timeout", "5m")
    assert job.pods == pods

    output = release.uninstall("--wait")
    assert CRD_NAME in output, "helm names what it keeps"
    assert node_cluster.get("deployments", "-n", NAMESPACE)["items"] == []
    job.goes_on(by_status=False)
    assert job.pods == pods

    # The new installation is for one namespace, without rights on cluster-scoped objects.
    values = {"watch": {"namespaces": [node_namespace]}, "rbac": {"clusterReads": False}}
    release.install("--wait", "--timeout", "5m", values=values)
    job.goes_on()
    assert job.pods == pods
    assert job.status["attempt"] == 1

    # The pods obey only requests that are signed with the key that they were started under.
    node_cluster.kubectl(
        "patch", "ztj", "gpt", "-n", node_namespace, "--type=merge", "-p", '{"spec": {"suspend": true}}'
    )
    wait_until(lambda: job.status["phase"] == "Suspended", "the job to be suspended", timeout_s=180)
    assert job.status["checkpoint"]["last"]["step"] > 0
