"""Leadership after a kill or an end; and twenty seconds without an API server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operator.kubelet_double import kubelet, wait_for_step
from tests.operator.live_job import LiveJob, check_attempts
from tests.operator.operator_process import KEY, NAMESPACE, OperatorProcess, install, operator
from tests.support.devcluster import Cluster, Devcluster, checked, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster

OUTAGE_S = 20
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
LEASE = "zerotrain-operator"


def test_a_killed_operator_takes_over_its_own_lease_at_once(
    operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    process = OperatorProcess(operator_kubeconfig, tmp_path)
    try:
        process.start()
        process.kill()
        # An operator that did not recognise the lease as its own would wait for it to expire.
        api.patch(f"{LEASES}/{LEASE}", {"spec": {"leaseDurationSeconds": 86_400}})
        process.start()
    finally:
        process.terminate()


def test_a_second_replica_stands_by_and_takes_over_what_is_given_back(
    control_plane: Cluster, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    second = OperatorProcess(
        operator_kubeconfig, tmp_path / "second", {"ZEROTRAIN_OPERATOR_IDENTITY": "another-replica"}
    )
    try:
        with operator(operator_kubeconfig, tmp_path):
            second.start(wait=False)
            wait_until(lambda: second.get("/readyz") == "ok", "the second replica to answer")
            time.sleep(5)
            assert "zerotrain_operator_leader 0.0" in second.get("/metrics")
            version = api.get(LEASES)["metadata"]["resourceVersion"]
        second.wait_until_leading()
        # The lease is given back on SIGTERM: its 15 s need not pass.
        since = f"{LEASES}?watch=1&resourceVersion={version}&timeoutSeconds=3"
        leases = [
            json.loads(line)["object"]
            for line in control_plane.kubectl("get", "--raw", since).stdout.split("\n")
            if line
        ]
        holders = [item["spec"]["holderIdentity"] for item in leases if item["metadata"]["name"] == LEASE]
        assert "another-replica" in holders[holders.index("") :], holders
    finally:
        second.terminate()


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A control plane of the test's own: other tests must not lose their API server with it."""
    with Devcluster().lease("control-plane") as cluster:
        yield cluster


def test_twenty_seconds_without_an_api_server(
    devcluster: Devcluster, own_cluster: Cluster, tmp_path: Path
) -> None:
    kubeconfig = install(own_cluster, tmp_path)
    api = own_cluster.api
    with (
        own_cluster.namespace() as namespace,
        operator(kubeconfig, tmp_path) as process,
        kubelet(api, namespace, KEY, held=True) as double,
    ):
        job = LiveJob(own_cluster, namespace)
        wait_for_step(double, 20)
        name = ("--component", "kube-apiserver")
        checked(devcluster.command("stop-component", *name, name=own_cluster.name))
        time.sleep(OUTAGE_S)
        # An API server that has just started rejects all requests until it has read the roles.
        process.expects_refusals = True
        checked(devcluster.command("start-component", *name, name=own_cluster.name))
        process.wait_until_leading()
        double.end("gpt-1-0", 137)
        double.may_end.set()
        done = job.wait_for("Completed")
        check_attempts(double, attempts=2)
        assert done["restarts"]["total"] == 1
