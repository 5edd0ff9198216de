"""A worker's pod that goes while no operator runs: the job is completed by what the other pods report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operator.kubelet_double import kubelet, wait_for_step
from tests.operator.live_job import LiveJob, check_attempts
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster
STEPS = 200


def test_the_pod_of_a_rank_that_was_done_is_deleted_before_the_operator_is_back(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    def ended() -> bool:
        items = control_plane.get("pods", "-n", namespace)["items"]
        return [item["status"].get("phase") for item in items] == ["Succeeded"] * 2

    with kubelet(api, namespace, KEY, steps=STEPS, held=True) as double:
        with operator(operator_kubeconfig, tmp_path):
            job = LiveJob(control_plane, namespace, steps=STEPS)
            wait_for_step(double, 5)
        double.may_end.set()
        wait_until(ended, "both pods to end")
        control_plane.kubectl("delete", "pod", "gpt-1-1", "-n", namespace)
        with operator(operator_kubeconfig, tmp_path):
            done = job.wait_for("Completed")
    check_attempts(double, attempts=1)
    assert done["restarts"]["total"] == 0
    assert done["checkpoint"]["last"]["step"] == STEPS
