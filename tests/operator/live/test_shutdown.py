"""SIGTERM in the middle of a large creation: the pass ends, the lease is free, and the next leader makes the
rest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operator.live_job import LiveJob
from tests.operator.operator_process import NAMESPACE, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster

WORKERS = 60
ALL = [f"gpt-1-{index}" for index in range(WORKERS)]


def test_a_replica_that_ends_gives_the_lease_back_and_its_successor_makes_the_rest(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    slow = {"ZEROTRAIN_OPERATOR_REQUESTS_PER_SECOND": "20", "ZEROTRAIN_OPERATOR_REQUEST_BURST": "20"}
    with operator(operator_kubeconfig, tmp_path, slow) as process:
        LiveJob(control_plane, namespace, workers=WORKERS)
        wait_until(lambda: len(pods(api, namespace)) > 5, "the creation to begin")
        assert process.terminate() == 0
        made = pods(api, namespace)
        assert made.keys() < set(ALL), "nothing was left to make: the replica ended too late for this test"
        assert "no pass runs any more" in process.log.read_text()
        lease = api.get(f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/zerotrain-operator")
        assert lease["spec"]["holderIdentity"] == ""
    with operator(operator_kubeconfig, tmp_path):
        wait_until(lambda: pods(api, namespace).keys() >= set(ALL), "the successor to make the rest")
    found = pods(api, namespace)
    assert sorted(found) == sorted(ALL)
    assert {name: found[name] for name in made} == made, "a pod of the first replica was replaced"


def pods(api: KubeJson, namespace: str) -> dict[str, str]:
    """Return the UIDs by name."""
    items = api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    return {item["metadata"]["name"]: item["metadata"]["uid"] for item in items}
