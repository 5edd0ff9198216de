"""Table of `reconcile` for the memory plan: refused before a pod exists, overridden, tight, unknown; with
observed peaks.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    ALL,
    Row,
    Want,
    check,
    job,
    progress,
    ready,
    run,
    seen,
    settled,
    status,
)
from zerotrain.operator.api.planning import plan_job
from zerotrain.operator.api.spec import ZeroTrainingJobSpec
from zerotrain.operator.reconcile import CreateWorkers

pytestmark = pytest.mark.unit


MIB = 1 << 20
IGNORE = {"annotations": {"zerotrain.dev/ignore-memory-plan": "true"}}
CONFIG = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
LARGE = {
    "model": {"path": "/models/gpt-175b", "parameters": 175_000_000_000},
    "config": CONFIG,
    "resources": {"gpus": {"count": 8, "memory": "80Gi"}, "memory": "2Ti"},
}
LITTLE_HOST_MEMORY = {**LARGE, "resources": {"gpus": {"count": 8, "memory": "80Gi"}, "memory": "512Gi"}}
UNKNOWN = {**LARGE, "model": {"path": "/models/gpt-175b"}}
STARTS = (CreateWorkers(attempt=1, indices=ALL),)


def with_memory(memory: str, **spec: Any) -> dict[str, Any]:
    return {"config": CONFIG, "resources": {"memory": memory}, **spec}


def host_need() -> int:
    """Return the host memory that one worker of the small job of these tables needs."""
    found = plan_job(ZeroTrainingJobSpec.model_validate(job(spec=with_memory("8Gi"))["spec"]))
    assert found.demand is not None
    return found.demand.tiers[0].total_bytes


ROWS = [
    Row(
        id="cannot fit: no attempt, no pod, the numbers and the nearest that fits",
        job=job(spec=LITTLE_HOST_MEMORY),
        seen=seen(),
        want=Want(
            phase="Stalled",
            attempt=0,
            actions=(),
            events=("DoesNotFit",),
            conditions={
                "Stalled": ("True", "DoesNotFit"),
                "Admitted": ("False", "DoesNotFit"),
                "Reconciling": ("False", "DoesNotFit"),
            },
            messages={"Stalled": "apply it again with these changes", "event": "Nearest that fits: "},
            fields={
                "memoryPlan.verdict": "DoesNotFit",
                "memoryPlan.ranks": 16,
                "memoryPlan.overridden": None,
            },
        ),
    ),
    Row(
        id="told once",
        job=settled(job(spec=LARGE), seen()),
        seen=seen(),
        want=Want(phase="Stalled", attempt=0, actions=(), events=(), writes=False),
    ),
    Row(
        id="the annotation starts it all the same, and says so",
        job=job(spec=LARGE, **IGNORE),
        seen=seen(),
        want=Want(
            phase="Pending",
            attempt=1,
            actions=STARTS,
            events=("MemoryPlanIgnored",),
            conditions={"Stalled": ("False", "SpecAccepted")},
            fields={"memoryPlan.verdict": "DoesNotFit", "memoryPlan.overridden": True},
        ),
    ),
    Row(
        id="the annotation comes after the refusal",
        job={**settled(job(spec=LARGE), seen()), "metadata": job(**IGNORE)["metadata"]},
        seen=seen(),
        want=Want(phase="Pending", attempt=1, actions=STARTS, events=("MemoryPlanIgnored",)),
    ),
    Row(
        id="any other value of the annotation is no override",
        job=job(spec=LARGE, annotations={"zerotrain.dev/ignore-memory-plan": "false"}),
        seen=seen(),
        want=Want(phase="Stalled", actions=()),
    ),
    Row(
        id="the label of the nodes tells the GPU's memory",
        job=job(
            spec={
                **LARGE,
                "resources": {"gpus": {"count": 8}, "memory": "2Ti"},
                "scheduling": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}},
            }
        ),
        seen=seen(),
        want=Want(
            phase="Stalled", actions=(), messages={"Stalled": "H100-80GB, spec.scheduling.nodeSelector"}
        ),
    ),
    Row(
        id="its memory on the label",
        job=job(
            spec={
                **LARGE,
                "resources": {"gpus": {"count": 8}, "memory": "2Ti"},
                "scheduling": {"nodeSelector": {"nvidia.com/gpu.memory": "81559"}},
            }
        ),
        seen=seen(),
        want=Want(phase="Stalled", actions=(), messages={"Stalled": "79.6 GiB"}),
    ),
    Row(
        id="nobody knows the GPU's memory: it starts",
        job=job(spec={**LARGE, "resources": {"gpus": {"count": 8}, "memory": "2Ti"}}),
        seen=seen(),
        want=Want(attempt=1, actions=STARTS, events=(), fields={"memoryPlan.verdict": "Unknown"}),
    ),
    Row(
        id="nobody knows the model's size: it starts, and the plan says what to give",
        job=job(spec=UNKNOWN),
        seen=seen(),
        want=Want(
            attempt=1,
            actions=STARTS,
            events=(),
            fields={
                "memoryPlan.verdict": "Unknown",
                "memoryPlan.gpuBytes": None,
                "memoryPlan.message": "not planned: only the workers see /models/gpt-175b; give its size as "
                "spec.model.parameters",
            },
        ),
    ),
    Row(
        id="a configuration by reference is not planned",
        job=job(
            spec={
                **LARGE,
                "config": None,
                "configFrom": {"configMapKeyRef": {"name": "ds", "key": "ds.json"}},
            }
        ),
        seen=seen(),
        want=Want(attempt=1, actions=STARTS, fields={"memoryPlan.verdict": "Unknown"}),
    ),
    Row(
        id="fits",
        job=job(spec=with_memory("8Gi")),
        seen=seen(),
        want=Want(
            attempt=1,
            actions=STARTS,
            events=(),
            fields={"memoryPlan.verdict": "Fits", "memoryPlan.gpuBytes": None, "memoryPlan.observed": None},
        ),
    ),
    Row(
        id="tight: it starts with a warning",
        job=job(spec=with_memory(str(host_need()))),
        seen=seen(),
        want=Want(attempt=1, actions=STARTS, events=("MemoryTight",), fields={"memoryPlan.verdict": "Tight"}),
    ),
    Row(
        id="suspended is not planned",
        job=job(spec={**LARGE, "suspend": True}),
        seen=seen(),
        want=Want(phase="Suspended", actions=(), fields={"memoryPlan": None}),
    ),
    Row(
        id="refused by the engine: planned again before the next attempt",
        job=job(spec=LARGE, status=status("Suspended", attempt=2)),
        seen=seen(),
        want=Want(phase="Stalled", attempt=2, actions=()),
    ),
    Row(
        id="an attempt that runs is left alone",
        job=job(spec=LARGE, status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Running", actions=(), fields={"memoryPlan": None}),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_gate(row: Row) -> None:
    check(row)


def test_the_size_of_the_next_attempt_is_planned() -> None:
    """The plan is for the size of the attempt that is about to start, and not for spec.workers."""
    shrunk = {
        "baseWorkers": 4,
        "requestedWorkers": 4,
        "workers": 2,
        "reason": "Capacity",
        "since": "2026-01-01T11:00:00Z",
    }
    elastic = {"elastic": {"minWorkers": 1, "maxWorkers": 4}, "workers": 4, **with_memory("8Gi")}
    stored = status("Restarting", attempt=1, elastic=shrunk, shape={"workers": 4})
    _, after = run(Row(id="", job=job(spec=elastic, status=stored), seen=seen(), want=Want()))
    assert after["memoryPlan"]["ranks"] == 2
    assert after["attempt"] == 2


PLAN = {"verdict": "Fits", "message": "", "ranks": 2, "hostBytes": 700 * MIB}


def peaks(
    given: dict[str, int], *, before: dict[str, Any] | None = None, attempt: int = 1, gpus: bool = False
) -> dict[str, Any] | None:
    """Return status.memoryPlan.observed after a report of these peaks, where `before` was stored."""
    plan = {**PLAN, **({"observed": before} if before else {})}
    spec = {"resources": {"gpus": {"count": 1}}} if gpus else {}
    stored = status("Running", attempt=2, memoryPlan=plan)
    reported = progress(step=5, attempt=attempt, **given)
    row = Row(
        id="",
        job=job(spec=spec, status=stored),
        seen=seen(ready(0, 2), ready(1, 2), progress=reported),
        want=Want(),
    )
    return run(row)[1]["memoryPlan"].get("observed")  # type: ignore[no-any-return]


def test_peaks_of_a_rank_on_cpus() -> None:
    reported = {"memory_peak_bytes": 500 * MIB, "host_peak_bytes": 500 * MIB, "spill_peak_bytes": 64 * MIB}
    assert peaks(reported, attempt=2) == {"attempt": 2, "hostBytes": 500 * MIB, "nvmeBytes": 64 * MIB}


def test_peaks_of_a_rank_with_a_gpu() -> None:
    reported = {"memory_peak_bytes": 9000 * MIB, "host_peak_bytes": 2500 * MIB}
    assert peaks(reported, attempt=2, gpus=True) == {
        "attempt": 2,
        "gpuBytes": 9000 * MIB,
        "hostBytes": 2500 * MIB,
    }


def test_only_growth_is_news() -> None:
    """A peak that grows slowly is not worth a status write."""
    before = {"attempt": 2, "hostBytes": 500 * MIB}
    assert peaks({"memory_peak_bytes": 505 * MIB}, before=before, attempt=2) == before
    assert peaks({"memory_peak_bytes": 400 * MIB}, before=before, attempt=2) == before
    assert peaks({"memory_peak_bytes": 520 * MIB}, before=before, attempt=2) == {
        **before,
        "hostBytes": 520 * MIB,
    }


def test_peaks_belong_to_their_attempt() -> None:
    old = {"attempt": 1, "hostBytes": 900 * MIB}
    reported = {"memory_peak_bytes": 500 * MIB}
    assert peaks(reported, before=old, attempt=2) == {"attempt": 2, "hostBytes": 500 * MIB}
    assert peaks(reported, before=old, attempt=1) == old, "a record of another attempt was believed"


def test_nonsense_from_the_tenant() -> None:
    assert peaks({"memory_peak_bytes": -1, "host_peak_bytes": 2**62}, attempt=2) is None
    assert peaks({"memory_peak_bytes": 0}, attempt=2) is None
