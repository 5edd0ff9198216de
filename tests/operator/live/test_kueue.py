"""A job in a queue of Kueue: one Workload, pods only while it is admitted, a checkpoint before they go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operator.kubelet_double import kubelet, wait_for_step
from tests.operator.kueue_double import KueueDouble
from tests.operator.live_job import LiveJob, check_attempts
from tests.operator.operator_process import KEY, operator
from tests.support.crd import wait_established
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster
CRDS = Path(__file__).parents[1] / "crds" / "kueue.yaml"
FLAVOR = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "ResourceFlavor",
    "metadata": {"name": "a100"},
    "spec": {"nodeLabels": {"pool": "a100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
}


@pytest.fixture(scope="module")
def queues(control_plane: Cluster) -> Cluster:
    """The cluster with Kueue's kinds and no controller behind them."""
    control_plane.kubectl("apply", "-f", str(CRDS))
    wait_established(control_plane, "workloads.kueue.x-k8s.io", "resourceflavors.kueue.x-k8s.io")
    control_plane.apply(FLAVOR)
    return control_plane


def test_admitted_evicted_through_a_checkpoint_admitted_again_and_finished(
    queues: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    script = KueueDouble(queues, namespace)
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, held=True) as double:
        job = LiveJob(queues, namespace, scheduling={"queueName": "team-a"})
        made = script.the_workload()
        (pods,) = made["spec"]["podSets"]
        assert (made["spec"]["queueName"], pods["count"]) == ("team-a", 2)
        assert "env" not in pods["template"]["spec"]["containers"][0]
        script.refuse("insufficient unused quota for cpu")
        wait_until(
            lambda: "unused quota" in job.condition("Admitted").get("message", ""), "the queue's words"
        )
        assert (job.status()["phase"], double.created) == ("Queued", [])

        script.admit(flavor="a100")
        wait_for_step(double, 20)
        pod = queues.get("pod", "gpt-1-0", "-n", namespace)
        assert pod["spec"]["nodeSelector"] == {"pool": "a100"}
        assert {"key": "gpu", "operator": "Exists"} in pod["spec"]["tolerations"]
        wait_until(lambda: script.condition("PodsReady").get("status") == "True", "PodsReady")

        script.evict("Preempted", "to make room for ml/other")
        wait_until(lambda: script.condition("QuotaReserved").get("status") == "False", "the quota to go back")
        evicted = job.status()
        assert evicted["phase"] == "Queued"
        assert evicted["checkpoint"]["last"]["durable"]
        assert queues.get("pods", "-n", namespace)["items"] == [], "the quota went back before the pods did"
        assert script.condition("Requeued")["status"] == "True"
        assert "admission" not in script.the_workload()["status"]

        double.may_end.set()
        script.admit(flavor="a100")
        done = job.wait_for("Completed")
        check_attempts(double, attempts=2)
        assert done["restarts"]["total"] == 0
        wait_until(
            lambda: script.condition("Finished").get("reason") == "Succeeded", "the Workload to finish"
        )


def test_a_suspended_job_leaves_its_queue_and_a_new_operator_follows_it(
    queues: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    script = KueueDouble(queues, namespace)
    with kubelet(api, namespace, KEY, steps=100_000) as double:
        with operator(operator_kubeconfig, tmp_path):
            job = LiveJob(queues, namespace, scheduling={"queueName": "team-a"})
            script.admit(flavor="a100")
            wait_for_step(double, 10)
        # No operator runs while the queue revokes the admission.
        script.evict("ClusterQueueStopped", "stopped by its owner")
        with operator(operator_kubeconfig, tmp_path):
            wait_until(lambda: script.condition("QuotaReserved").get("status") == "False", "the quota")
            assert script.condition("Requeued")["status"] == "False"
            job.patch('{"suspend": true}')
            job.wait_for("Suspended")
            wait_until(lambda: script.workloads() == [], "the Workload to go")
    check_attempts(double, attempts=1)


def test_a_queue_left_without_an_operator_keeps_no_quota(
    queues: Cluster, namespace: str, operator_kubeconfig: Path, tmp_path: Path
) -> None:
    """No other job is in a queue, and this one no longer names one."""
    script = KueueDouble(queues, namespace)
    with operator(operator_kubeconfig, tmp_path):
        job = LiveJob(queues, namespace, scheduling={"queueName": "team-a"})
        script.the_workload()
    job.patch('{"suspend": true, "scheduling": null}')
    with operator(operator_kubeconfig, tmp_path):
        job.wait_for("Suspended")
        wait_until(lambda: script.workloads() == [], "the Workload to go")
