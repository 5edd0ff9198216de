"""What the pods of a running attempt share, on a live API server: whatever of it is deleted comes back within
the attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operator.kube_json import KubeJson
from tests.operator.kubelet_double import kubelet
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster, wait_until

pytestmark = pytest.mark.cluster
OFTEN = {"ZEROTRAIN_OPERATOR_RESYNC_SECONDS": "1"}


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "Secret"])
def test_what_is_deleted_under_a_running_attempt_comes_back(
    control_plane: Cluster,
    namespace: str,
    operator_kubeconfig: Path,
    api: KubeJson,
    tmp_path: Path,
    kind: str,
) -> None:
    with operator(operator_kubeconfig, tmp_path, OFTEN), kubelet(api, namespace, KEY, steps=10_000):
        job = LiveJob(control_plane, namespace)
        job.wait_for("Running")
        before = job.owned()
        (name,) = [item.partition("/")[2] for item in before if item.startswith(f"{kind}/")]
        uid = control_plane.get(kind, name, "-n", namespace)["metadata"]["uid"]
        control_plane.kubectl("delete", kind, name, "-n", namespace)
        wait_until(lambda: job.owned() == before, f"the {kind}")
        assert control_plane.get(kind, name, "-n", namespace)["metadata"]["uid"] != uid
        assert (job.status()["phase"], job.status()["attempt"]) == ("Running", 1)
