"""`status.memoryPlan` equals the plan that `zerotrain plan -o json` prints of the job, in few bytes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, ready, seen
from tests.support.commands import zerotrain
from tests.support.devcluster import REPOSITORY
from zerotrain.client.job import Job
from zerotrain.client.jobfile import load_job
from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.api.memory_plan import MOST_BYTES, MemoryPlan
from zerotrain.operator.cluster.jobs import status_body
from zerotrain.operator.constants import ANNOTATION_IGNORE_MEMORY_PLAN
from zerotrain.operator.reconcile import reconcile

pytestmark = pytest.mark.unit


Json = dict[str, Any]
FOLDER = REPOSITORY / "deploy" / "examples"
EXAMPLES = {
    path.name: dict(load_job(path).document.value)
    for path in sorted(FOLDER.glob("*.yaml"))
    if "kind: ZeroTrainingJob" in path.read_text()
}
UNPLANNED = {
    *("own-script.yaml", "deepspeed-config.yaml"),
    *("hf-trainer.yaml", "sft-lora.yaml", "dpo.yaml", "own-accelerate.yaml"),
}
H100 = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}


def changed(name: str, config: Json | None = None, **spec: Any) -> Json:
    job = copy.deepcopy(EXAMPLES[name])
    job["spec"] = {**job["spec"], **spec}
    if config is not None:
        job["spec"]["config"] = {**job["spec"]["config"], **config}
    return job


LARGE = "llama-70b-one-node.yaml"
CASES: dict[str, Json] = {
    **{name: job for name, job in EXAMPLES.items() if name not in UNPLANNED},
    "a GPU that no label names": changed(LARGE, scheduling=None),
    "two workers, whose network nobody knows": changed(LARGE, workers=2),
    "no room, and a way out": changed(LARGE, config={"zero_optimization": {"stage": 3}}),
    "no room, and no way out": changed(
        LARGE,
        scheduling=H100,
        resources={"gpus": {"count": 8, "memory": "2Gi"}, "memory": "64Gi"},
    ),
    "no limit": changed("gpt.yaml", resources=None),
    "four ranks of a worker on CPUs": changed("gpt.yaml", workers=1, ranksPerWorker=4),
    "one GPU, nothing offloaded": changed(
        "gpt.yaml", workers=1, resources={"gpus": {"count": 1}, "memory": "64Gi"}, scheduling=H100
    ),
    "activations in host memory": changed(
        LARGE, config={"activation_checkpointing": {"cpu_checkpointing": True}}, scheduling=H100
    ),
}


def stored(job: Json, status: Json | None = None, **metadata: Any) -> Json:
    """Return the job as the API server has it."""
    meta = {**job["metadata"], "namespace": "ml", "uid": "u", "generation": 1, **metadata}
    spec = {key: value for key, value in job["spec"].items() if value is not None}
    return {**job, "metadata": meta, "spec": spec, "status": status or {}}


def written(job: Json, status: Json | None = None, **metadata: Any) -> Json | None:
    """Return what the operator sends after its pass about the job; None where it sends nothing.

    The value must survive being read back, or else it would be sent again and again.
    """
    plan = reconcile(stored(job, status, **metadata), seen(), NOW)
    if plan.status is None:
        return None
    body = status_body(plan.status)
    assert ZeroTrainingJobStatus.model_validate(body).memory_plan == plan.status.memory_plan
    return body


def planned(job: Json, folder: Path, *options: str) -> Json:
    path = folder / "job.yaml"
    path.write_text(json.dumps(stored(job)))
    done = zerotrain("plan", path, "-o", "json", *options)
    assert done.code in (0, 67), done.err
    return json.loads(done.out)  # type: ignore[no-any-return]


def tiers_of(found: list[Json]) -> list[Json]:
    names = {
        "tier": "tier",
        "per": "per",
        "needed_bytes": "neededBytes",
        "limit_bytes": "limitBytes",
        "margin_bytes": "marginBytes",
    }
    return [{names[key]: tier[key] for key in names if tier[key] is not None} for tier in found]


def expected(found: Json, ranks_per_worker: int) -> Json:
    """Return the status computed by hand from what the command prints."""
    by_tier = {tier["tier"]: tier for tier in found["tiers"]}
    gpu, pace = by_tier.get("gpu"), found["pace"]
    activations = gpu["activation_bytes"] if gpu else by_tier["host"]["activation_bytes"] // ranks_per_worker
    phase_names = {
        "engine_bytes": "engineBytes",
        "activation_bytes": "activationBytes",
        "host_bytes": "hostBytes",
        "network_bytes": "networkBytes",
    }
    want: Json = {
        "verdict": found["verdict"],
        "message": found["message"],
        "ranks": found["ranks"],
        **{f"{name}Bytes": tier["per_rank_bytes"] for name, tier in by_tier.items()},
        "networkBytes": found["traffic"]["network_bytes"],
        "activationBytes": activations,
        "tiers": tiers_of(found["tiers"]),
        "phases": [
            {"name": phase["name"], **{phase_names[key]: phase[key] for key in phase_names if phase[key]}}
            for phase in found["phases"]
        ],
    }
    if found["nearest"] is not None:
        want["nearest"] = {"changes": found["nearest"], "tiers": tiers_of(found["nearest_tiers"])}
    if pace is not None:
        want["pace"] = {"seconds": float(f"{pace['seconds']:.4g}"), "boundBy": pace["bound_by"]}
        if pace["missing_rates"]:
            want["pace"]["missingRates"] = pace["missing_rates"]
    return want


@pytest.mark.parametrize("name", CASES)
def test_the_status_equals_the_commands_output(name: str, tmp_path: Path) -> None:
    job = CASES[name]
    body, found = written(job), planned(job, tmp_path)
    assert body is not None
    assert body["memoryPlan"] == expected(found, job["spec"].get("ranksPerWorker", 1))
    for tier in found["tiers"]:
        assert tier["per"] == ("rank" if tier["tier"] == "gpu" else "worker")
        if tier["limit_bytes"] is not None:
            assert tier["margin_bytes"] == tier["limit_bytes"] - tier["needed_bytes"]
    network = sum(phase["network_bytes"] for phase in found["phases"])
    assert network == sum(found["traffic"]["phases"].values())


def test_the_cases_hold_every_field() -> None:
    """A field that is never written would otherwise be equal everywhere."""
    plans = {name: (written(job) or {})["memoryPlan"] for name, job in CASES.items()}
    assert {"Fits", "DoesNotFit", "Unknown"} <= {plan["verdict"] for plan in plans.values()}
    way_out, none = plans["no room, and a way out"], plans["no room, and no way out"]
    assert way_out["nearest"]["tiers"][0]["marginBytes"] >= 0 > way_out["tiers"][0]["marginBytes"]
    assert "nearest" not in none
    assert "network" in plans["two workers, whose network nobody knows"]["pace"]["missingRates"]
    assert "missingRates" not in plans["one GPU, nothing offloaded"]["pace"]
    assert "pace" not in plans["a GPU that no label names"]
    assert all(phase["hostBytes"] > 0 for phase in plans[LARGE]["phases"])
    fields = {key for plan in plans.values() for key in plan}
    assert fields == {info.alias for info in MemoryPlan.model_fields.values()} - {"overridden", "observed"}


def test_an_attempt_of_another_size_is_planned_for_that_size(tmp_path: Path) -> None:
    job = EXAMPLES["elastic.yaml"]
    base = job["spec"]["workers"]
    shrunk = {
        "baseWorkers": base,
        "requestedWorkers": base,
        "workers": 1,
        "reason": "Capacity",
        "since": "2026-01-01T11:00:00Z",
    }
    status = {
        "phase": "Restarting",
        "attempt": 1,
        "podsCreated": True,
        "elastic": shrunk,
        "shape": {"workers": base},
    }
    body = written(job, status)
    assert body is not None
    ranks = job["spec"].get("ranksPerWorker", 1)
    assert body["memoryPlan"] == expected(planned(job, tmp_path, "--workers", "1"), ranks)


def test_the_page_shows_a_real_one() -> None:
    text = (REPOSITORY / "docs" / "planner.md").read_text()
    shown = text.split(".status.memoryPlan}' | jq\n", 1)[1].split("```", 1)[0]
    body = written(CASES[LARGE])
    assert body is not None
    assert json.loads(shown) == body["memoryPlan"]


def compact(value: Json) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def test_it_stays_small() -> None:
    """Every watcher of jobs gets the plan with every write of every status."""
    sizes = {name: compact((written(job) or {})["memoryPlan"]) for name, job in CASES.items()}
    assert max(sizes.values()) < 1700, sizes
    assert sorted(sizes.values())[len(sizes) // 2] < 1000, sizes


OLD: Json = {
    "verdict": "Fits",
    "message": "m",
    "ranks": 2,
    "hostBytes": 1,
    "networkBytes": 0,
    "observed": {"attempt": 1},
}
NEWER: Json = {
    **OLD,
    "tiers": [{"tier": "cxl", "per": "rack", "neededBytes": 1, "price": {"a": 1}}],
    "phases": [{"name": "evaluation", "engineBytes": 1, "colour": "red"}],
    "nearest": {"changes": ["x"], "why": "y"},
    "pace": {"seconds": 1, "boundBy": "magic", "joules": 7},
    "oracle": [1, 2],
}


@pytest.mark.parametrize("held", [OLD, NEWER], ids=["older", "newer"])
def test_what_another_operator_wrote_is_read(held: Json) -> None:
    read = ZeroTrainingJobStatus.model_validate({"phase": "Running", "memoryPlan": held})
    again = status_body(read)["memoryPlan"]
    assert {key: again[key] for key in OLD} == OLD
    assert "oracle" not in again
    plan = Job.of({**stored(EXAMPLES["gpt.yaml"]), "status": {"memoryPlan": held}}).memory_plan
    assert plan is not None
    assert plan.verdict == "Fits"
    assert (plan.pace and plan.pace.seconds) == held.get("pace", {}).get("seconds")


def test_a_plan_is_written_once() -> None:
    """A plan that is read back is the same; one of an operator before these fields is written anew, once."""
    job, ignores = CASES["no room, and a way out"], {ANNOTATION_IGNORE_MEMORY_PLAN: "true"}
    first = written(job)
    assert first is not None
    assert written(job, first) is None
    bare = {key: value for key, value in first["memoryPlan"].items() if key not in ("tiers", "phases")}
    second = written(job, {**first, "memoryPlan": bare})
    assert second == first
    started = written(job, first, annotations=ignores)
    assert started is not None
    assert started["memoryPlan"] == {**first["memoryPlan"], "overridden": True}
    failed = {"phase": "Restarting", "attempt": 1, "podsCreated": True, "memoryPlan": started["memoryPlan"]}
    again = reconcile(stored(job, failed, annotations=ignores), seen(), NOW)
    assert again.status is not None
    assert again.status.attempt == 2
    assert "MemoryPlanIgnored" not in [event.reason for event in again.events], "told with the first one"


def test_a_running_job_keeps_the_plan_of_an_earlier_operator() -> None:
    """An upgrade brings passes over thousands of jobs; none is written for its plan alone."""
    status = {"phase": "Running", "attempt": 1, "podsCreated": True, "memoryPlan": OLD}
    workers = seen(*(ready(index) for index in range(EXAMPLES["gpt.yaml"]["spec"]["workers"])))
    plan = reconcile(stored(EXAMPLES["gpt.yaml"], status), workers, NOW)
    assert plan.status is not None, "its conditions are news"
    assert plan.actions == ()
    assert status_body(plan.status)["memoryPlan"] == OLD


def test_a_limit_beyond_what_the_api_can_hold_is_written_as_the_largest_number() -> None:
    resources = {"gpus": {"count": 8, "memory": "9" * 30 + "Ei"}, "memory": "64Gi"}
    job = {**changed(LARGE, resources=resources), "status": {}}
    job["metadata"] = {**job["metadata"], "namespace": "ml", "uid": "u", "generation": 1}
    plan = reconcile(job, seen(), NOW)
    assert plan.status is not None
    assert plan.status.memory_plan is not None
    (gpu,) = [tier for tier in plan.status.memory_plan.tiers or () if tier.tier == "gpu"]
    assert gpu.limit_bytes == gpu.margin_bytes == MOST_BYTES
