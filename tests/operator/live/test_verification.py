"""The verification of a live job: one pod whatever happens to the operator, its outcome in status and event,
and a time to live that waits for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.operator.kubelet_double import kubelet
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster

CHECKPOINT = {
    "volume": {"persistentVolumeClaim": {"claimName": "ckpt"}},
    "everySteps": 20,
    "verify": "OnCompletion",
}


def test_one_pod_reads_the_checkpoint_and_the_time_to_live_waits_for_it(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path) as process, kubelet(api, namespace, KEY, steps=20):
        damaged = LiveJob(control_plane, namespace, name="damaged", checkpoint=CHECKPOINT)
        passing = LiveJob(
            control_plane,
            namespace,
            name="passing",
            checkpoint=CHECKPOINT,
            runPolicy={"ttlSecondsAfterFinished": 0},
        )
        for job in (damaged, passing):
            job.wait_for("Completed")
        pods = {job.name: helper(api, namespace, job.name) for job in (damaged, passing)}
        process.kill()
        process.start()
        end(api, pods["damaged"], code=66, log="step-20: damaged\n  rank-0.safetensors lacks 3 bytes\n")
        found = wait_until(lambda: outcome(damaged), "the outcome")
        assert (found["state"], found["pod"], found["tries"]) == ("Damaged", "damaged-1-verify-1", 1)
        assert damaged.condition("CheckpointDurable")["reason"] == "CheckpointDamaged"
        messages = [
            message
            for reason, message in damaged.events("CheckpointDamaged")
            if reason == "CheckpointDamaged"
        ]
        assert messages == ["checkpoint 20 of step 20: rank-0.safetensors lacks 3 bytes"]
        same = helper(api, namespace, "passing")
        assert same["metadata"]["uid"] == pods["passing"]["metadata"]["uid"]
        assert passing.status()["checkpoint"]["verification"]["state"] == "Running"
        end(api, same, code=0, log="")
        wait_until(lambda: gone(control_plane, namespace, "passing"), "the time to live")
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector=zerotrain.dev/job=passing"
        wait_until(lambda: not api.get(path)["items"], "its pods to go")


def helper(api: KubeJson, namespace: str, job: str) -> dict[str, Any]:
    """Return the job's one pod that is no worker."""
    path = f"/api/v1/namespaces/{namespace}/pods?labelSelector=zerotrain.dev/helper,zerotrain.dev/job={job}"

    def only() -> Any:
        found = api.get(path)["items"]
        assert len(found) <= 1, [item["metadata"]["name"] for item in found]
        return found[0] if found else None

    return dict(wait_until(only, f"the pod that verifies {job}"))


def end(api: KubeJson, pod: dict[str, Any], *, code: int, log: str) -> None:
    """Report the end of the pod's program, as its kubelet does."""
    meta = pod["metadata"]
    ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "message": log}
    container = {"name": "verify", "image": "i", "imageID": "", "restartCount": 0, "ready": False}
    container |= {"state": {"terminated": ended}}
    status = {"phase": "Succeeded" if code == 0 else "Failed", "containerStatuses": [container]}
    path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
    api.patch(path, {"metadata": {"uid": meta["uid"]}, "status": status})


def outcome(job: LiveJob) -> dict[str, Any] | None:
    found = job.status()["checkpoint"]["verification"]
    return dict(found) if found["state"] != "Running" else None


def gone(cluster: Cluster, namespace: str, name: str) -> bool:
    return cluster.kubectl("get", "ztj", name, "-n", namespace, check=False).returncode != 0
