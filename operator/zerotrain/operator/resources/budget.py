"""The PodDisruptionBudget of one attempt: an eviction is refused for as long as all its workers train.

A rank that is evicted takes all others down with it, so that the only useful budget is "none at a time".
What makes room is the drain's other half: it cordons the node first, `reconcile.drains` sees that and moves
the whole job through a checkpoint, and a pod that has ended no longer counts.
"""

from __future__ import annotations

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import LABEL_ATTEMPT

from .identity import Json, attempt_labels, metadata, selector


def budget_name(job_name: str, attempt: int) -> str:
    return f"{job_name}-{attempt}"


def disruption_budget(job: ZeroTrainingJob, attempt: int, workers: int) -> Json:
    """For an attempt of so many workers."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(job, budget_name(job.name, attempt), attempt_labels(job, attempt)),
        "spec": {
            # A number: for a percentage or maxUnavailable the cluster would ask our scale subresource, which
            # counts what the job wishes and not what the attempt has.
            "minAvailable": workers,
            "selector": {"matchLabels": {**selector(job), LABEL_ATTEMPT: str(attempt)}},
            # Pods that are not past their rendezvous have nothing to lose.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
