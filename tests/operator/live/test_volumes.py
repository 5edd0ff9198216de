"""Live jobs whose volumes must be encrypted, and whose pods a namespace rejects, on a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.operator.kubelet_double import kubelet
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster

LEVEL = "pod-security.kubernetes.io/enforce"


@pytest.fixture
def plain_class(control_plane: Cluster) -> Iterator[str]:
    """A StorageClass that does not declare encryption."""
    name = f"plain-{uuid4().hex[:8]}"
    meta = {"name": name}
    control_plane.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": meta,
            "provisioner": "topolvm.io",
        }
    )
    yield name
    control_plane.kubectl("delete", "storageclass", name)


def stalled(job: LiveJob, reason: str) -> str:
    """Return the message of Stalled once it is true for this reason."""

    def there() -> str | None:
        found: dict[str, Any] = job.condition("Stalled")
        return (
            str(found["message"]) if (found.get("status"), found.get("reason")) == ("True", reason) else None
        )

    return str(wait_until(there, f"Stalled to say {reason}", every_s=0.25))


def test_no_pod_before_the_class_declares_its_encryption(
    control_plane: Cluster,
    namespace: str,
    operator_kubeconfig: Path,
    api: KubeJson,
    tmp_path: Path,
    plain_class: str,
) -> None:
    def nvme(name: str) -> dict[str, Any]:
        return {"size": "1Gi", "storageClassName": name, "requireEncryptedVolume": True}

    with operator(operator_kubeconfig, tmp_path) as process, kubelet(api, namespace, KEY, steps=10) as double:
        job = LiveJob(control_plane, namespace, nvme=nvme(plain_class))
        assert f"kubectl annotate storageclass {plain_class}" in stalled(job, "VolumeNotEncrypted")
        missing = LiveJob(control_plane, namespace, "missing", nvme=nvme("no-such-class"))
        assert "not found" in stalled(missing, "StorageClassUnknown")
        assert not double.created
        assert job.owned() == []
        control_plane.kubectl("annotate", "storageclass", plain_class, "zerotrain.dev/encrypted-volumes=true")
        process.kill()  # a restarted operator reads the class at once, the running one after a minute
        process.start()
        job.wait_for("Completed")
        assert missing.status()["attempt"] == 0


def test_no_pod_before_the_class_of_the_checkpoints_claim_declares_its_encryption(
    control_plane: Cluster,
    namespace: str,
    operator_kubeconfig: Path,
    api: KubeJson,
    tmp_path: Path,
    plain_class: str,
) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "ckpt"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": plain_class,
        },
    }
    volume = {"persistentVolumeClaim": {"claimName": "ckpt"}}
    checkpoint = {"volume": volume, "everySteps": 20, "requireEncryptedVolume": True}
    with operator(operator_kubeconfig, tmp_path) as process, kubelet(api, namespace, KEY, steps=10) as double:
        job = LiveJob(control_plane, namespace, checkpoint=checkpoint)
        assert "claim ckpt cannot be read" in stalled(job, "StorageClassUnknown")
        api.post(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", claim)
        process.kill()  # a restarted operator reads the claim at once, the running one after a minute
        process.start()
        assert f"StorageClass {plain_class} of claim ckpt" in stalled(job, "VolumeNotEncrypted")
        assert not double.created
        control_plane.kubectl("annotate", "storageclass", plain_class, "zerotrain.dev/encrypted-volumes=true")
        process.kill()
        process.start()
        job.wait_for("Completed")


def test_rdma_in_a_namespace_that_refuses_it_is_a_stall_with_a_way_out(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    control_plane.kubectl("label", "namespace", namespace, f"{LEVEL}=restricted")
    rdma = {"rdma": {"resourceName": "rdma/hca", "count": 1}}
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=10) as double:
        # Nodes of this cluster have no such device, and the job would wait for capacity.
        job = LiveJob(control_plane, namespace, resources=rdma, scheduling={"gang": "None"})
        message = stalled(job, "PodSecurity")
        assert 'violates PodSecurity "restricted:latest"' in message
        assert f"kubectl label namespace {namespace} {LEVEL}=privileged" in message
        assert not double.created
        control_plane.kubectl("label", "namespace", namespace, f"{LEVEL}=privileged", "--overwrite")
        job.wait_for("Completed")
        assert job.status()["attempt"] == 1, "a refusal is no failed attempt"
        reasons = [reason for reason, _ in job.events("IpcLockAdded", "PodSecurity")]
        assert reasons.count("IpcLockAdded") == 1
        assert reasons.count("PodSecurity") == 1
