"""The ConfigMap with the last log lines of the failed rank of the newest attempts.

There is one per job, not per attempt: it is deleted with the job, and its size is bounded.
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
    """Return the keys of attempts beyond the number that status.failures shows, once `newest` is added."""
    attempts = {key: int(found[1]) for key in keys if (found := _KEY.match(key))}
    added = _KEY.match(newest)
    numbers = sorted({*attempts.values(), *([int(added[1])] if added else [])})
    kept = set(numbers[-MAX_FAILURES:])
    return sorted(key for key, number in attempts.items() if number not in kept)
