"""The ConfigMap with what is kept of a job's failures: of the newest attempts, the last lines of a rank.

One for the job and not for the attempt: it goes with the job, and its size has an end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.status import MAX_FAILURES

from .identity import Json, common_labels, metadata

_KEY = re.compile(r"attempt-(\d+)\.")


def failures_name(job_name: str) -> str:
    return f"{job_name}-failures"


def failures_config_map(job: ZeroTrainingJob, data: Mapping[str, str]) -> Json:
    meta = metadata(job, failures_name(job.name), common_labels(job))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": dict(data)}


def outdated_keys(keys: Iterable[str], newest: str) -> list[str]:
    """Keys of attempts beyond as many as status.failures shows, with `newest` about to be added."""
    attempts = {key: int(found[1]) for key in keys if (found := _KEY.match(key))}
    added = _KEY.match(newest)
    numbers = sorted({*attempts.values(), *([int(added[1])] if added else [])})
    kept = set(numbers[-MAX_FAILURES:])
    return sorted(key for key, number in attempts.items() if number not in kept)
