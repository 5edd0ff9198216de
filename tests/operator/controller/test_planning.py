"""Memory plans of the operator: made outside of the event loop, once."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest

from tests.operator.api_double import ApiDouble, served
from tests.operator.controller.test_controller import KEY, PATH, make_controller, stored
from tests.support.jobs import ABSENT, make_job
from zerotrain.operator.api import planning
from zerotrain.operator.api.spec import ZeroTrainingJobSpec
from zerotrain.operator.controller.job_pass import JobPass

pytestmark = pytest.mark.ranks


async def test_a_memory_plan_is_made_off_the_event_loop_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may take a tenth of a second, which would block the event loop."""
    made: list[int] = []
    real = planning._planned

    def watched(*key: Any) -> planning.JobPlan:
        made.append(threading.get_ident())
        return real(*key)

    monkeypatch.setattr(planning, "_planned", watched)
    double, body = ApiDouble(), stored()
    body["spec"]["steps"] = 123_456_789  # a spec that no other test has planned
    double.on(f"PUT {PATH}/status", (200, {"metadata": {**body["metadata"], "resourceVersion": "2"}}))
    async with served(double) as api:
        controller = make_controller(api)
        for uid in ("one", "two"):
            job_of_its_own = {**body, "metadata": {**body["metadata"], "uid": uid, "generation": 1}}
            with suppress(Exception):  # the rest of the pass needs a whole cluster
                await JobPass(controller, KEY, job_of_its_own).run()
    assert len(made) == 1
    assert made[0] != threading.get_ident()


def test_a_plan_that_is_not_cached_is_reported_as_missing() -> None:
    spec = ZeroTrainingJobSpec.model_validate({**stored()["spec"], "steps": 987_654_321})
    with pytest.raises(planning.PlanMissing):
        planning.known_plan(spec)
    found = planning.plan_job(spec)
    assert planning.known_plan(spec) is found
    with pytest.raises(planning.PlanMissing):
        planning.known_plan(spec, workers=3)


FINETUNING: dict[str, Any] = {
    "spec.model": ABSENT,
    "spec.data": ABSENT,
    "spec.ranksPerWorker": 1,
    "spec.config.train_micro_batch_size_per_gpu": "auto",
    "spec.resources": {"memory": "16Gi"},
    "spec.finetune": {
        "model": "/models/a", "method": "lora", "data": "/data/a.jsonl", "learningRate": 1e-4,
        "batchSize": 2, "maxLength": 512, "parameters": 10**9, "eval": {"share": 0.1, "everySteps": 10},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.finetune.method": "full"},
        {"spec.finetune.lora": {"rank": 64}},
        {"spec.finetune.lora": {"targets": ["q_proj"]}},
        {"spec.finetune.batchSize": 4},
        {"spec.finetune.maxLength": 2048},
        {"spec.finetune.parameters": 2 * 10**9},
        {"spec.config.bf16": {"enabled": False}},
    ],
    ids=str,
)
def test_a_fine_tuning_that_needs_more_or_less_has_a_plan_of_its_own(changes: dict[str, Any]) -> None:
    found, other = (planning.plan_job(make_job(job).spec) for job in (FINETUNING, FINETUNING | changes))
    assert found.demand is not None
    assert other.demand is not None
    assert found.demand.tiers != other.demand.tiers


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.finetune.eval": {"data": "/data/b.jsonl", "everySteps": 5}, "spec.checkpoint.everySteps": 50},
        {"spec.finetune.eval": ABSENT},
        {"spec.finetune.earlyStopping": {"patience": 3}},
        {"spec.finetune.chatTemplate": "{{ messages }}"},
        {"spec.finetune.data": "/data/b.jsonl", "spec.finetune.packing": True},
        {"spec.finetune.output": "other", "spec.finetune.completionOnly": True},
        {"spec.finetune.tokenFrom": {"name": "hub", "key": "token"}},
    ],
    ids=" ".join,
)
def test_a_fine_tuning_with_other_rows_or_evaluations_has_the_same_plan(changes: dict[str, Any]) -> None:
    found = planning.plan_job(make_job(FINETUNING).spec)
    assert planning.known_plan(make_job(FINETUNING | changes).spec) is found


def test_only_the_newest_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_PLANS", 2)
    monkeypatch.setattr(planning, "_plans", {})
    spec = ZeroTrainingJobSpec.model_validate(stored()["spec"])
    for workers in (1, 2, 3):
        planning.plan_job(spec, workers=workers)
    with pytest.raises(planning.PlanMissing):
        planning.known_plan(spec, workers=1)
    assert planning.known_plan(spec, workers=3)
