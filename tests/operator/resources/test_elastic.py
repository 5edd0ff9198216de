"""The objects of an attempt in another size than the spec's, and the budget that protects one."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.support.jobs import make_job
from zerotrain.contract.worker_environment import unfolded
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.resources import (
    ResourceOptions,
    headless_service,
    service_name,
    shared_objects,
    worker_pods,
)
from zerotrain.operator.resources.pod import disruption_budget

pytestmark = pytest.mark.unit


OPTIONS = ResourceOptions()
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def resized(workers: int, **changes: Any) -> ZeroTrainingJob:
    """Return the good job (2 workers of 2 ranks, micro batch 1, accumulation 4) in another size."""
    return make_job(
        {
            "spec.elastic": {"minWorkers": 1, "maxWorkers": 8},
            "spec.config.gradient_accumulation_steps": 4,
            "status": {
                "shape": {"workers": workers},
                "elastic": {"baseWorkers": 2, "requestedWorkers": workers},
            },
            **changes,
        }
    )


def objects(job: ZeroTrainingJob) -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in shared_objects(job, 3, b"k" * 32, OPTIONS)}


def test_each_size_has_its_own_configuration() -> None:
    for workers, sizes in {1: (16, 1, 8), 2: (16, 1, 4), 8: (16, 1, 1)}.items():
        job = resized(workers)
        config = json.loads(base64.b64decode(objects(job)["Secret"]["data"]["ds_config.json"]))
        assert tuple(config[name] for name in BATCH) == sizes


def test_ranks_and_service_are_those_of_the_attempt() -> None:
    pods = list(worker_pods(resized(4), 3, range(4), OPTIONS))
    named = service_name(resized(4))
    env = unfolded({item["name"]: item.get("value", "") for item in pods[3]["spec"]["containers"][0]["env"]})
    assert (env["WORLD_SIZE"], env["NODE_RANK"], env["MASTER_ADDR"]) == ("8", "3", f"gpt-3-0.{named}")
    assert headless_service(resized(1)) is None


def test_the_budget_counts_exactly_the_workers_of_its_attempt() -> None:
    job = resized(4)
    budget = disruption_budget(job, 3, 4)
    (pod, *_) = worker_pods(job, 3, (0,), OPTIONS)
    (other, *_) = worker_pods(job, 2, (0,), OPTIONS)
    wanted = budget["spec"]["selector"]["matchLabels"].items()
    assert wanted <= pod["metadata"]["labels"].items()
    assert not wanted <= other["metadata"]["labels"].items()
    assert budget["spec"]["minAvailable"] == 4
    assert budget["metadata"]["name"] == "gpt-3"
    assert budget["metadata"]["ownerReferences"][0]["uid"] == job.uid
