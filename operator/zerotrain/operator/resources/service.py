"""The headless Service that gives worker pods their names."""

from __future__ import annotations

from zerotrain.contract.launch import MASTER_PORT, WORKER_HTTP_PORT
from zerotrain.operator.api import ZeroTrainingJob, ZeroTrainingJobSpec
from zerotrain.operator.constants import HTTP_PORT_NAME, LABEL_RANK, RENDEZVOUS_PORT_NAME

from .identity import Json, common_labels, metadata, selector


def service(job: ZeroTrainingJob) -> Json | None:
    """None for a job of one worker, which needs no name: every Service costs the cluster endpoint traffic."""
    if job.shape.workers == 1:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, job.name, common_labels(job)),
        "spec": {
            "clusterIP": "None",
            # The ranks must find each other before the rendezvous, and pods are ready only after it.
            "publishNotReadyAddresses": True,
            "selector": _named(job),
            "ports": [
                {
                    "name": RENDEZVOUS_PORT_NAME,
                    "port": MASTER_PORT,
                    "targetPort": MASTER_PORT,
                    "protocol": "TCP",
                },
                {
                    "name": HTTP_PORT_NAME,
                    "port": WORKER_HTTP_PORT,
                    "targetPort": WORKER_HTTP_PORT,
                    "protocol": "TCP",
                },
            ],
        },
    }


def names_worker_0(spec: ZeroTrainingJobSpec, workers: int) -> bool:
    """Whether the Service of a job of so many workers is for worker 0 alone, so that nobody needs it before
    that has an address. A job of one worker has no Service."""
    return workers > 1 and not spec.command


def _named(job: ZeroTrainingJob) -> dict[str, str]:
    """The pods that get names. The built-in trainer needs worker 0's alone, where the ranks meet: every
    further one would rewrite the endpoints of all when it starts. A program of the user's may ask for any."""
    first = {LABEL_RANK: "0"} if names_worker_0(job.spec, job.shape.workers) else {}
    return {**selector(job), **first}
