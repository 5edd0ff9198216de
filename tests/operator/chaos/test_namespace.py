"""A namespace is deleted while the operator is down: the product does not block the deletion, and recreates
nothing.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.cluster.chaos.crashes import immortal
from tests.cluster.chaos.operator_run import OperatorRun, Setup, ignore_unraisable_errors
from tests.cluster.chaos.scenario import collect_errors
from tests.operator.kubelet_double import kubelet, wait_for_step
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import KEY
from tests.support.devcluster import Cluster, wait_until
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster


def test_a_namespace_goes_without_its_operator(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    key = tmp_path / "channel.key"
    key.write_bytes(KEY)
    setup = Setup(kubeconfig=operator_kubeconfig, key_file=key)
    doomed = f"doomed-{secrets.token_hex(3)}"
    control_plane.kubectl("create", "namespace", doomed)
    with collect_errors() as errors, ignore_unraisable_errors():
        with kubelet(api, doomed, KEY, steps=1000) as double:
            first = _leading(setup)
            LiveJob(control_plane, doomed)
            wait_for_step(double, 1)
            first.kill()
            control_plane.kubectl("delete", "namespace", doomed, "--wait=false")
            gone = ("get", "namespace", doomed, "-o", "name", "--ignore-not-found")
            wait_until(lambda: not control_plane.kubectl(*gone).stdout, "the namespace to go")
            pods = len(double.created)
        second = _leading(setup)
        job = LiveJob(control_plane, namespace)
        job.wait_for("Pending")
        second.retire()
    assert errors == []
    assert pods == 2
    assert [*first.ended, *second.ended] == []


def _leading(setup: Setup) -> OperatorRun:
    life = OperatorRun(setup, immortal)
    life.start()
    wait_until(life.leads, "the operator to lead")
    return life
