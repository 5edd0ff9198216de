"""The Secret with the files that the workers of one attempt read: the rendered configuration and the channel
token.

Both are in one object, because each object costs the API server a write per attempt and every kubelet a
watch. An immutable Secret is not even watched. The operator only creates Secrets: it derives the token again
whenever it calls a worker, so it needs no permission to read them.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from zerotrain.contract.channel_token import derive
from zerotrain.contract.finetune_spec import (
    FINETUNE_FILE,
    EarlyStoppingSpec,
    EvaluationSpec,
    FinetuneSpec,
    LoraSpec,
)
from zerotrain.contract.train_spec import (
    CONFIG_FILE,
    TRAIN_SPEC_FILE,
    CheckpointPolicy,
    GptSpec,
    ModelSpec,
    TrainSpec,
)
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.configuration import base_workers, config_at
from zerotrain.operator.api.storage import Checkpoint
from zerotrain.operator.api.workload import Model
from zerotrain.operator.constants import TOKEN_KEY

from .identity import Json, attempt_labels, metadata, secret_name

_SAME_NAMES = {
    "model",
    "data",
    "learning_rate",
    "batch_size",
    "accumulation_steps",
    "max_length",
    "epochs",
    "output",
    "chat_template",
    "packing",
    "completion_only",
}
"""Fields that are the same in the API and in the file."""


def attempt_secret(job: ZeroTrainingJob, attempt: int, operator_key: bytes) -> Json:
    """Return the Secret of the attempt. Raises ValueError if the key is too short or the job has no UID
    yet."""
    files = {**config_files(job), TOKEN_KEY: derive(operator_key, job.uid, attempt)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, secret_name(job, attempt), attempt_labels(job, attempt)),
        "type": "Opaque",
        "immutable": True,
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in files.items()},
    }


def config_files(job: ZeroTrainingJob) -> dict[str, str]:
    """Return the texts by file name; ds_config.json is missing if the job refers to a ConfigMap of the
    user."""
    files: dict[str, str] = {}
    if job.spec.config is not None:
        files[CONFIG_FILE] = json.dumps(_config(job), indent=1, sort_keys=True, allow_nan=False)
    spec = train_spec(job)
    if spec is not None:
        files[TRAIN_SPEC_FILE] = spec.to_json()
    finetune = finetune_spec(job)
    if finetune is not None:
        files[FINETUNE_FILE] = finetune.to_json()
    return files


def _config(job: ZeroTrainingJob) -> dict[str, Any]:
    """Return the configuration as the user wrote it; for an elastic job, with the batch sizes for the
    attempt's ranks."""
    if job.spec.elastic is None or job.spec.config is None:
        return job.spec.config or {}
    return config_at(job.spec, base_workers(job), job.shape.workers)


def train_spec(job: ZeroTrainingJob) -> TrainSpec | None:
    """Return the input of the built-in trainer; None for a user program without model, data or steps."""
    spec = job.spec
    if spec.model is None or spec.data is None or spec.steps is None:
        return None
    factory = spec.model.factory
    return TrainSpec(
        model=_model(spec.model),
        data_path=spec.data.path,
        steps=spec.steps,
        seed=spec.seed,
        log_every_steps=spec.log_every_steps,
        checkpoint=_checkpoint_policy(spec.checkpoint),
        context=factory.context if factory else None,
    )


def finetune_spec(job: ZeroTrainingJob) -> FinetuneSpec | None:
    """Return the input of the fine-tuning; None for other jobs."""
    spec, asked, checkpoint = job.spec, job.spec.finetune, job.spec.checkpoint
    if asked is None or checkpoint is None:  # a fine-tuning without one is refused
        return None
    early, evaluation = asked.early_stopping, asked.eval
    return FinetuneSpec(
        **asked.model_dump(include=_SAME_NAMES),
        method=asked.method.value,
        steps=spec.steps,
        seed=spec.seed,
        log_every_steps=spec.log_every_steps,
        save_every_steps=checkpoint.every_steps,
        keep_last=checkpoint.keep_last,
        lora=LoraSpec(**asked.lora.model_dump()) if asked.lora else LoraSpec(),
        eval=EvaluationSpec(**evaluation.model_dump()) if evaluation else None,
        early_stopping=EarlyStoppingSpec(**early.model_dump()) if early else None,
    )


def _model(model: Model) -> ModelSpec:
    factory = model.factory
    return ModelSpec(
        gpt=GptSpec(**model.gpt.model_dump()) if model.gpt else None,
        preset=model.preset,
        path=model.path,
        factory=factory.function if factory else None,
        factory_args=(factory.args or {}) if factory else {},
    )


def _checkpoint_policy(checkpoint: Checkpoint | None) -> CheckpointPolicy:
    if checkpoint is None:
        return CheckpointPolicy()
    return CheckpointPolicy(
        every_steps=checkpoint.every_steps,
        every_seconds=checkpoint.every_seconds,
        keep_last=checkpoint.keep_last,
        on_termination=checkpoint.on_termination,
        resume_from=checkpoint.resume_from,
    )
