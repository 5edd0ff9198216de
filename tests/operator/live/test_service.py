"""The Service of a job in a cluster: it gives worker 0 its name, belongs to the job and goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.operator.live_job import LiveJob
from tests.operator.operator_process import operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.resources import service_name

pytestmark = pytest.mark.cluster

Json = dict[str, Any]


def test_worker_0_has_its_name_and_the_service_is_the_jobs(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def behind() -> list[Json]:
        return [endpoint for item in api.get(slices)["items"] for endpoint in item["endpoints"] or ()]

    with operator(operator_kubeconfig, tmp_path):
        live = LiveJob(control_plane, namespace)
        wait_until(lambda: {"Pod/gpt-1-0", "Pod/gpt-1-1"} <= set(live.owned()), "the pods")
        for index in (0, 1):
            address = f"10.1.2.{index + 3}"
            status = {"podIP": address, "podIPs": [{"ip": address}]}
            api.patch(f"/api/v1/namespaces/{namespace}/pods/gpt-1-{index}/status", {"status": status})
        (found,) = wait_until(behind, "the endpoint of worker 0")
        assert (found["addresses"], found["hostname"]) == (["10.1.2.3"], "gpt-1-0")
        services = [name for name in live.owned() if name.startswith("Service/")]
        assert services == [f"Service/{service_name(ZeroTrainingJob.parse(live.object()))}"]
