"""Number of requests that the operator spends on a job: growth here is what makes a thousand jobs slow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.operator.kubelet_double import kubelet
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import KEY, OperatorProcess, operator
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster

WORKERS = 4
LINE = re.compile(
    r'zerotrain_operator_api_requests_total\{code="(\d+)",resource="([^"]+)",verb="([A-Z]+)"\} (\S+)'
)


def writes(process: OperatorProcess) -> dict[str, int]:
    """Return the creations, updates and deletions so far, by resource."""
    found: dict[str, int] = {}
    for _, resource, verb, number in LINE.findall(process.get("/metrics")):
        if verb not in ("GET", "WATCH") and resource != "leases":
            found[resource] = found.get(resource, 0) + int(float(number))
    return found


def test_a_job_of_four_pods_from_apply_to_running(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    # Jobs that other tests left behind would be counted with this one.
    alone = {"ZEROTRAIN_OPERATOR_NAMESPACES": namespace}
    with (
        operator(operator_kubeconfig, tmp_path, alone) as process,
        kubelet(api, namespace, KEY, steps=10_000),
    ):
        before = writes(process)
        job = LiveJob(control_plane, namespace, workers=WORKERS)
        job.wait_for("Running")
        # Events follow the status.
        wait_until(lambda: writes(process).get("events", 0) > before.get("events", 0), "an event")
        spent = {kind: number - before.get(kind, 0) for kind, number in writes(process).items()}
        assert spent["pods"] == WORKERS
        shared = [spent[kind] for kind in ("services", "networkpolicies", "secrets")]
        assert shared == [1, 1, 1]
        assert spent["events"] <= 3
        # One write for the attempt and one for all pods seen; then at most one for each pod that started and
        # each that became ready. How many of these fall into one pass is a matter of timing; that there are
        # no others is not.
        assert spent["zerotrainingjobs/status"] <= 2 + 2 * WORKERS
