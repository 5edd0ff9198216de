"""The PodDisruptionBudget of one attempt: it blocks evictions while all workers train.

The eviction of one rank ends all others, so the only useful budget is "none at a time". A node drain still
succeeds: it cordons the node first, `reconcile.avoided_nodes` notices the cordon and moves the whole job
through a checkpoint, and a pod that has ended no longer counts.
"""

from __future__ import annotations

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import LABEL_ATTEMPT

from .identity import Json, attempt_labels, metadata, selector


def budget_name(job_name: str, attempt: int) -> str:
    return f"{job_name}-{attempt}"


def disruption_budget(job: ZeroTrainingJob, attempt: int, workers: int) -> Json:
    """Return the disruption budget of an attempt of `workers` workers."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(job, budget_name(job.name, attempt), attempt_labels(job, attempt)),
        "spec": {
            # This is a number: for a percentage or maxUnavailable the cluster would read our scale
            # subresource, which reports the requested workers and not those of the attempt.
            "minAvailable": workers,
            "selector": {"matchLabels": {**selector(job), LABEL_ATTEMPT: str(attempt)}},
            # Pods whose ranks have not completed the rendezvous have nothing to lose.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
