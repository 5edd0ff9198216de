"""SIGTERM in the middle of a large creation: the pass comes to its end, then the lease is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operator.kube_json import KubeJson
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import NAMESPACE, operator
from tests.support.devcluster import Cluster, wait_until

pytestmark = pytest.mark.cluster

WORKERS = 60


def test_a_replica_that_ends_finishes_what_it_began_and_gives_the_lease_back(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    slow = {"ZEROTRAIN_OPERATOR_REQUESTS_PER_SECOND": "20", "ZEROTRAIN_OPERATOR_REQUEST_BURST": "20"}
    with operator(operator_kubeconfig, tmp_path, slow) as process:
        LiveJob(control_plane, namespace, workers=WORKERS)
        wait_until(lambda: len(names(api, namespace)) > 5, "the creation to begin")
        assert process.terminate() == 0
        made = names(api, namespace)
        assert sorted(made) == sorted(f"gpt-1-{index}" for index in range(WORKERS))
        assert "no pass runs any more" in process.log.read_text()
        lease = api.get(f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/zerotrain-operator")
        assert lease["spec"]["holderIdentity"] == ""


def names(api: KubeJson, namespace: str) -> list[str]:
    return [item["metadata"]["name"] for item in api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]]
