"""Jobs for tests: one good job, and copies of it with single fields changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from zerotrain.operator.api import ZeroTrainingJob

Json = dict[str, Any]

ABSENT = object()
"""Value in `changes` that removes the field."""

GOOD_JOB: Json = {
    "apiVersion": "zerotrain.dev/v1alpha1",
    "kind": "ZeroTrainingJob",
    "metadata": {"name": "gpt", "namespace": "ml", "uid": "7d0e6f6c-2f4e-4b34-9d3b-4f1f3a0b0a01"},
    "spec": {
        "workers": 2,
        "ranksPerWorker": 2,
        "image": "localhost/zerotrain:dev",
        "config": {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
        },
        "model": {"gpt": {"dModel": 64, "layers": 2, "heads": 2, "context": 64}},
        "data": {"path": "builtin:python-stdlib"},
        "steps": 100,
        "checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "ckpt"}}, "everySteps": 20},
    },
}


def job_json(changes: Mapping[str, Any] | None = None, /) -> Json:
    """Return the valid job with `changes`, by dotted path from the root: {"spec.nvme.size": "1Gi"}."""
    job = copy.deepcopy(GOOD_JOB)
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        place = job
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is ABSENT:
            place.pop(last, None)
        else:
            place[last] = copy.deepcopy(value)
    return job


def make_job(changes: Mapping[str, Any] | None = None, /) -> ZeroTrainingJob:
    """Return the parsed result of `job_json`."""
    return ZeroTrainingJob.parse(job_json(changes))
