"""Objects that the pods of a running attempt share, on a live API server: a deleted one comes back within the
attempt.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operator.kubelet_double import kubelet
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster
OFTEN = {"ZEROTRAIN_OPERATOR_RESYNC_SECONDS": "1"}


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "Secret", "PodDisruptionBudget"])
def test_what_is_deleted_under_a_running_attempt_comes_back(
    control_plane: Cluster,
    namespace: str,
    operator_kubeconfig: Path,
    api: KubeJson,
    tmp_path: Path,
    kind: str,
) -> None:
    def found() -> dict[str, str]:
        """Return the UIDs by name."""
        mine = "app.kubernetes.io/name=zerotrain" if kind == "Service" else "zerotrain.dev/job=gpt"
        items = control_plane.get(kind, "-n", namespace, "-l", mine)["items"]
        return {item["metadata"]["name"]: item["metadata"]["uid"] for item in items}

    with operator(operator_kubeconfig, tmp_path, OFTEN), kubelet(api, namespace, KEY, steps=10_000):
        job = LiveJob(control_plane, namespace)
        job.wait_for("Running")
        wait_until(lambda: len(found()) == 1, f"the {kind}")
        before = found()
        control_plane.kubectl("delete", kind, *before, "-n", namespace)
        wait_until(lambda: found().keys() == before.keys() and found() != before, f"another {kind}")
        assert (job.status()["phase"], job.status()["attempt"]) == ("Running", 1)
