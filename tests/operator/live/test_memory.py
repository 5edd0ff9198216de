"""A job that cannot fit, on the real API server: no object of it is created until an annotation overrides the
check.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operator.kubelet_double import kubelet
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import Cluster
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster


def test_a_job_that_cannot_fit_has_no_pods_until_it_is_overridden(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=20) as double:
        job = LiveJob(control_plane, namespace, model={"preset": "gpt-1b"}, resources={"memory": "4Gi"})
        stalled = job.wait_for("Stalled")
        assert job.condition("Stalled")["reason"] == "DoesNotFit"
        assert "Nearest that fits: " in job.condition("Stalled")["message"]
        assert stalled["memoryPlan"]["verdict"] == "DoesNotFit"
        assert (stalled["memoryPlan"]["ranks"], stalled.get("attempt", 0)) == (4, 0)
        # The API server drops what the schema does not have, at every depth.
        host = {"tier": "host", "per": "worker", "limitBytes": 4 << 30}
        assert host.items() <= stalled["memoryPlan"]["tiers"][0].items()
        assert stalled["memoryPlan"]["tiers"][0]["marginBytes"] < 0
        assert stalled["memoryPlan"]["nearest"]["changes"]
        assert stalled["memoryPlan"]["nearest"]["tiers"][0]["marginBytes"] > 0
        assert stalled["memoryPlan"]["phases"][2]["networkBytes"] > 0
        assert job.owned() == []
        assert [reason for reason, _ in job.events("DoesNotFit")].count("DoesNotFit") == 1
        ignore = "zerotrain.dev/ignore-memory-plan=true"
        control_plane.kubectl("annotate", "ztj", job.name, "-n", namespace, ignore)
        completed = job.wait_for("Completed")
        assert completed["memoryPlan"]["overridden"] is True
        assert job.events("MemoryPlanIgnored")
        assert {name for name, _ in double.created} == {"gpt-1-0", "gpt-1-1"}
