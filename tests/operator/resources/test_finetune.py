"""A fine-tuning becomes the program of the workers, with its settings in a file beside the configuration."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import ABSENT, make_job
from zerotrain.contract.finetune_spec import FINETUNE_FILE, FinetuneSpec
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.validation import refusals
from zerotrain.operator.resources import ResourceOptions, worker_pod
from zerotrain.operator.resources.container import HANG_BACKSTOP_S, hang_backstop_s
from zerotrain.operator.resources.network import headless_service
from zerotrain.operator.resources.secret import config_files

pytestmark = pytest.mark.unit

FINETUNE: dict[str, Any] = {
    "model": "/models/a",
    "method": "lora",
    "lora": {"rank": 8, "targets": ["q_proj"]},
    "data": "/data/rows.jsonl",
    "eval": {"share": 0.1, "everySteps": 10},
    "earlyStopping": {"patience": 3},
    "learningRate": 2e-4,
    "batchSize": 2,
    "maxLength": 512,
}


def finetuning(changes: dict[str, Any] | None = None) -> ZeroTrainingJob:
    return make_job({"spec.model": ABSENT, "spec.data": ABSENT, "spec.finetune": FINETUNE, **(changes or {})})


def test_the_launcher_starts_the_program_of_a_script() -> None:
    job = finetuning({"spec.finetune.tokenFrom": {"name": "hub", "key": "token"}})
    container = worker_pod(job, 1, 0, ResourceOptions())["spec"]["containers"][0]
    assert container["args"] == ["--", "zerotrain", "launch", "-m", "zerotrain.compat.finetune"]
    assert {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
    } in container["env"]
    assert hang_backstop_s(job) == HANG_BACKSTOP_S
    service = headless_service(job)
    assert service is not None
    assert "zerotrain.dev/rank" not in service["spec"]["selector"]


def test_the_file_has_the_settings_and_what_the_job_says_elsewhere() -> None:
    job = finetuning({"spec.seed": 5, "spec.checkpoint.keepLast": 2})
    files = config_files(job)
    assert sorted(files) == ["ds_config.json", FINETUNE_FILE]
    spec = FinetuneSpec.from_json(files[FINETUNE_FILE])
    assert (spec.model, spec.method, spec.lora.rank, spec.lora.targets) == (
        "/models/a",
        "lora",
        8,
        ("q_proj",),
    )
    assert (spec.steps, spec.seed, spec.save_every_steps, spec.keep_last) == (100, 5, 20, 2)
    assert (spec.learning_rate, spec.batch_size, spec.max_length) == (2e-4, 2, 512)
    assert spec.eval is not None
    assert (spec.eval.share, spec.eval.every_steps) == (0.1, 10)
    assert spec.early_stopping is not None
    assert spec.early_stopping.patience == 3


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        (
            {"spec.checkpoint.everySteps": 15},
            "spec.checkpoint.everySteps",
            "15 is not a multiple of spec.finetune.eval.everySteps 10, so the best checkpoint could not be "
            "kept; take 20",
        ),
        ({"spec.checkpoint.everySeconds": 60}, "spec.checkpoint.everySeconds", "give everySteps"),
        ({"spec.finetune.model": "org/model"}, "spec.finetune.model", "give spec.network.egressCidrs"),
    ],
    ids=["multiple", "seconds", "hub"],
)
def test_what_the_schema_cannot_say_is_refused(changes: dict[str, Any], path: str, message: str) -> None:
    (refusal,) = refusals(finetuning(changes).spec)
    assert refusal.path == path
    assert message in refusal.message


def test_a_name_on_the_hub_is_taken_where_the_network_lets_pods_out() -> None:
    changes = {"spec.finetune.model": "org/model", "spec.network.egressCidrs": ["10.0.0.0/8"]}
    assert refusals(finetuning(changes).spec) == ()
