"""The Kueue queue of a job: `spec.scheduling.queueName`, or the label that Kueue's other jobs have, which
means the same. The schema cannot compare the two, since its rules do not see labels: this module does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def queue_in(job: Mapping[str, Any]) -> str | None:
    """Of a job's body as the API server has it; None without one. The field counts where both are there."""
    scheduling = (job.get("spec") or {}).get("scheduling") or {}
    labels = (job.get("metadata") or {}).get("labels") or {}
    found = scheduling.get("queueName") or labels.get(QUEUE_LABEL)
    return str(found) if found else None
