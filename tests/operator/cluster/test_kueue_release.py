"""A quota is given back once, as Kueue may have admitted the job anew before the watch shows it, and the next
start counts as a new one.
"""

from __future__ import annotations

import pytest

from tests.operator.api_double import ApiDouble, served
from tests.operator.cluster.test_admission import conditions
from tests.operator.cluster.test_executor import job
from tests.operator.reconcile_builders import NOW
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.kueue import WorkloadClient
from zerotrain.operator.cluster.workload_status import StatusChange, advanced
from zerotrain.operator.reconcile.plan import QueueStep
from zerotrain.operator.resources.kueue import workload_name


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("evicted", "reserved", "writes"),
    [
        ("True Preempted", "True R", 1),
        ("False QuotaReserved", "True R", 0),
        ("True Preempted", "False Pending", 0),
    ],
    ids=["evicted", "admitted-anew", "released"],
)
async def test_only_what_is_evicted_now_is_given_back(evicted: str, reserved: str, writes: int) -> None:
    """The watch may still show the previous eviction."""
    double, version = ApiDouble(), "kueue.x-k8s.io/v1beta2"
    parsed = ZeroTrainingJob.parse(job())
    path = f"/apis/{version}/namespaces/{parsed.namespace}/workloads/{workload_name(parsed.name, parsed.uid)}"
    status = {"conditions": conditions(Evicted=evicted, QuotaReserved=reserved)}
    double.on(f"GET {path}", (200, {"metadata": {"generation": 1}, "status": status}))
    double.on(f"PUT {path}/status", (200, {}))
    async with served(double) as api:
        await WorkloadClient(api, version, parsed).advance(QueueStep.RELEASE, "why")
    assert double.asked(f"PUT {path}/status") == writes


@pytest.mark.unit
@pytest.mark.parametrize(
    ("before", "step", "after"),
    [
        ("", QueueStep.PODS_READY, "True Started"),
        ("True Started", QueueStep.PODS_NOT_READY, "False WaitForRecovery"),
        ("False WaitForRecovery", QueueStep.PODS_READY, "True Recovered"),
        ("True Recovered", QueueStep.PODS_NOT_READY, "False WaitForRecovery"),
        ("True Recovered", QueueStep.RELEASE, "False WaitForStart"),
        ("False WaitForRecovery", QueueStep.RELEASE, "False WaitForStart"),
        ("False WaitForStart", QueueStep.PODS_READY, "True Started"),
        ("", QueueStep.RELEASE, ""),
    ],
)
def test_the_workload_shows_whether_pods_start_or_recover(before: str, step: QueueStep, after: str) -> None:
    """Kueue has a limit for each of the two; the one for a recovery only where an administrator set it."""
    found = {"conditions": conditions(PodsReady=before) if before else []}
    status = advanced(found, StatusChange(step=step, message="why", at=NOW, generation=4))
    words = [
        f"{item['status']} {item['reason']}" for item in status["conditions"] if item["type"] == "PodsReady"
    ]
    assert words == ([after] if after else [])
