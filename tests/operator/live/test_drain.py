"""A node is drained under a live job: evictions are refused, the job moves once, through a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.operator.kubelet_double import NODE, ensure_node, kubelet, wait_for_step
from tests.operator.live_job import LiveJob, check_attempts
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster

OTHER = "double-drained"


def budgets(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    return list(cluster.get("pdb", "-n", namespace)["items"])


def test_a_drained_node_moves_the_whole_job_once(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    ensure_node(api, OTHER)
    with (
        operator(operator_kubeconfig, tmp_path) as process,
        kubelet(api, namespace, KEY, steps=10**6) as double,
    ):
        double.nodes = (NODE, OTHER)
        job = LiveJob(control_plane, namespace, steps=10**6)
        wait_for_step(double, 5)

        def protected() -> bool:
            found = budgets(control_plane, namespace)
            return bool(found) and found[0].get("status", {}).get("currentHealthy") == 2

        wait_until(protected, "the budget to count both workers")
        assert budgets(control_plane, namespace)[0]["metadata"]["name"] == "gpt-1"
        process.kill()  # a restarted operator recognises the budget as its own
        process.start()
        double.nodes = (NODE,)
        drained = control_plane.kubectl(
            *("drain", OTHER, "--force", "--delete-emptydir-data", "--timeout=400s"), timeout_s=430
        )
        assert "gpt-1-1" in drained.stdout
        assert "Cannot evict pod" in drained.stderr + drained.stdout, "the budget refuses while ranks train"
        moved = job.wait_for("Running")
        assert moved["attempt"] == 2
        assert moved["restarts"] == {**moved["restarts"], "preemption": 1, "app": 0, "infra": 0, "total": 1}
        first = double.trainings()[0]
        assert moved["checkpoint"]["last"]["step"] >= first.durable == first.step
        check_attempts(double, attempts=2)
        reasons = [reason for reason, _ in job.events("Draining", "Yielded")]
        assert reasons.count("Draining") == reasons.count("Yielded") == 1
        wait_until(
            lambda: [item["metadata"]["name"] for item in budgets(control_plane, namespace)] == ["gpt-2"],
            "the budget of the next attempt, and of it alone",
        )
    control_plane.kubectl("delete", "node", OTHER)
