"""Failures on a live API server: kept log lines, nodes that are avoided, nodes that are dead."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.operator.kubelet_double import NODE, ensure_node, kubelet, wait_for_step
from tests.operator.kubelet_logs import KubeletLogs, served_logs
from tests.operator.live_job import LiveJob, check_attempts
from tests.operator.operator_process import KEY, OperatorProcess, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster


@pytest.fixture
def node(control_plane: Cluster, api: KubeJson) -> Iterator[str]:
    """A node of the test's own."""
    name = f"double-{secrets.token_hex(3)}"
    ensure_node(api, name)
    yield name
    control_plane.kubectl("delete", "node", name, "--wait=false", check=False)


def kept(cluster: Cluster, namespace: str) -> dict[str, Any] | None:
    """Return the ConfigMap of the job's failures, or None."""
    found = cluster.get("configmaps", "-n", namespace)["items"]
    return next((item for item in found if item["metadata"]["name"] == "gpt-failures"), None)


def lines_of(rank: int, count: int) -> str:
    return "".join(f"[rank {rank}] line {number} of rank {rank}\n" for number in range(count))


def test_pods_that_do_not_start_end_their_attempt_at_the_start_deadline(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    """A node without a kubelet never starts a worker."""
    with operator(operator_kubeconfig, tmp_path):
        job = LiveJob(control_plane, namespace, runPolicy__startDeadlineSeconds=15)
        pods = f"/api/v1/namespaces/{namespace}/pods"
        wait_until(lambda: len(api.get(pods)["items"]) == 2, "both pods")
        for name in ("gpt-1-0", "gpt-1-1"):
            target = {"apiVersion": "v1", "kind": "Node", "name": "double"}
            body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            api.post(f"{pods}/{name}/binding", body)
        wait_until(lambda: job.status().get("attempt", 0) >= 2, "another attempt")
        status = job.status()
    assert status["restarts"]["infra"] >= 1
    failure = status["failures"][-1]
    assert (failure["reason"], failure["pod"]) == ("StartDeadlineExceeded", "gpt-1-0")
    assert failure["message"].startswith("not started within 15 s: ")
    assert "; also not started: worker 1 (pod gpt-1-1, " in failure["message"]
    assert [item["pod"] for item in failure["ranks"]] == ["gpt-1-0", "gpt-1-1"]


def test_the_last_lines_survive_a_kill_before_they_were_read(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    """The kubelet is slow, the operator dies meanwhile: the pod stays until the restarted operator has read
    its log.
    """
    process = OperatorProcess(operator_kubeconfig, tmp_path)
    node = f"double-{secrets.token_hex(3)}"
    try:
        process.start()
        with (
            served_logs(control_plane, api, node) as logs,
            kubelet(api, namespace, KEY, steps=60, held=True) as double,
        ):
            double.nodes = (node,)
            job = LiveJob(control_plane, namespace)
            _fail_with_a_slow_kubelet(job, double, logs)
            process.kill()  # at once: the operator does not wait for a slow log for ever
            assert job.status()["phase"] == "Restarting"
            pod = control_plane.get("pod", "gpt-1-1", "-n", namespace)
            assert "deletionTimestamp" not in pod["metadata"]
            assert kept(control_plane, namespace) is None
            logs.open.set()
            double.may_end.set()
            process.start()
            done = job.wait_for("Completed")
            check_attempts(double, attempts=2)
        failure = done["failures"][0]
        assert (failure["rank"], failure["log"]) == (2, "attempt-1.log")
        found = kept(control_plane, namespace)
        assert found is not None
        assert found["metadata"]["ownerReferences"][0]["name"] == "gpt"
        title, *lines = found["data"]["attempt-1.log"].splitlines()
        assert title == f"attempt 1, pod gpt-1-1, node {node}: Killed, exit code 137"
        assert lines == [f"[rank 2] line {number} of rank 2" for number in range(200, 300)]
        process.check_permissions()
    finally:
        process.kill()


def _fail_with_a_slow_kubelet(job: LiveJob, double: Any, logs: KubeletLogs) -> None:
    logs.texts["gpt-1-1"] = (lines_of(2, 300) + lines_of(3, 50) + lines_of(22, 50)).encode()
    logs.open.clear()
    wait_for_step(double, 5)
    double.end("gpt-1-1", 137)
    wait_until(lambda: logs.asked, "the operator to ask for the log", every_s=0.05)
    assert "tailLines=" in logs.asked[0]


def test_rules_exclude_a_node_and_then_fail_the_job(
    control_plane: Cluster,
    namespace: str,
    operator_kubeconfig: Path,
    api: KubeJson,
    node: str,
    tmp_path: Path,
) -> None:
    rules = [
        {
            "onMessagePatterns": [r"Xid (48|79)\b"],
            "onReasons": ["RankFailed"],
            "action": "ReplaceNodeAndRestart",
        },
        {"onExitCodes": [137], "onRanks": [2], "action": "FailJob"},
    ]
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=10**6) as double:
        double.nodes = (NODE, node)
        job = LiveJob(control_plane, namespace, failurePolicy__rules=rules)
        wait_for_step(double, 5)
        double.end("gpt-1-0", 3, exception="RuntimeError: NCCL error, Xid 79: GPU has fallen off the bus")
        wait_until(lambda: len(double.trainings()) == 2, "the second attempt to run")
        status = job.wait_for("Running")
        assert [item["name"] for item in status["excludedNodes"]] == [NODE]
        assert status["shape"]["excludedNodes"] == [NODE]
        pod = control_plane.get("pod", "gpt-2-1", "-n", namespace)
        terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        avoided = {"key": "metadata.name", "operator": "NotIn", "values": [NODE]}
        assert all(avoided in term["matchFields"] for term in terms["nodeSelectorTerms"])
        double.end("gpt-2-1", 137)
        failed = job.wait_for("Failed")
        assert [(item["rule"], item["action"]) for item in failed["failures"]] == [
            (1, "FailJob"),
            (0, "ReplaceNodeAndRestart"),
        ]
        reasons = [reason for reason, _ in job.events("RankFailed", "FailedByRule")]
        assert reasons.count("RankFailed") == reasons.count("FailedByRule") == 1


def test_no_job_waits_for_a_dead_node(
    control_plane: Cluster,
    namespace: str,
    node: str,
    operator_kubeconfig: Path,
    api: KubeJson,
    tmp_path: Path,
) -> None:
    """The dead node's kubelet would leave the pods Terminating for ever; the job's own timeout is ten
    minutes.
    """
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=10**6) as double:
        double.nodes = (NODE, node)
        job = LiveJob(control_plane, namespace, runPolicy__terminationTimeoutSeconds=600)
        wait_for_step(double, 5)
        double.nodes = (NODE,)
        double.dead = {node}
        control_plane.kubectl("taint", "node", node, "node.kubernetes.io/out-of-service=down:NoExecute")
        wait_until(lambda: len(double.trainings()) == 2, "the second attempt to run")
        status = job.wait_for("Running")
        assert status["failures"][0]["reason"] == "NodeLost"
        assert status["failures"][0]["node"] == node
        assert status["restarts"] == {**status["restarts"], "infra": 1, "app": 0}
        check_attempts(double, attempts=2)


def test_a_node_that_falls_silent_is_waited_for_and_then_left(
    control_plane: Cluster,
    namespace: str,
    node: str,
    operator_kubeconfig: Path,
    api: KubeJson,
    tmp_path: Path,
) -> None:
    """The control plane gets no heartbeat of the node; its workers count as alive while steps come."""
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=10**6) as double:
        double.nodes = (NODE, node)
        policy = {"nodeNotReadySeconds": 10}
        job = LiveJob(control_plane, namespace, failurePolicy=policy, runPolicy__terminationTimeoutSeconds=5)
        wait_for_step(double, 5)
        double.silent = double.dead = {node}
        fell_silent_long_ago(api, node)
        reached = double.trainings()[0].step
        wait_for_step(double, reached + round((policy["nodeNotReadySeconds"] + 3) / 0.05))
        assert job.status()["attempt"] == 1, "its workers take part in every step"
        double.nodes, double.off = (NODE,), {node}  # now no steps come
        wait_until(lambda: len(double.trainings()) == 2, "the second attempt to run")
        status = job.wait_for("Running")
        (failure,) = status["failures"]
        assert (failure["reason"], failure["node"], failure["pod"]) == ("NodeLost", node, "gpt-1-1")
        assert status["restarts"] == {**status["restarts"], "infra": 1, "app": 0}
        check_attempts(double, attempts=2)


def fell_silent_long_ago(api: KubeJson, node: str) -> None:
    """Set the node's condition as the node controller does after its grace period."""
    since = "2026-01-01T00:00:00Z"
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    condition = {**unknown, "lastHeartbeatTime": since, "lastTransitionTime": since}
    api.patch(f"/api/v1/nodes/{node}/status", {"status": {"conditions": [condition]}})
