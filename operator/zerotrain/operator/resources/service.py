"""The headless Service of a job, which gives the worker pods their DNS names."""

from __future__ import annotations

import hashlib

from zerotrain.contract.launch import MASTER_PORT, WORKER_HTTP_PORT
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import HTTP_PORT_NAME, LABEL_RANK, RENDEZVOUS_PORT_NAME

from .identity import Json, common_labels, metadata, selector


def headless_service(job: ZeroTrainingJob) -> Json | None:
    """Return the headless Service; None for a single worker, which needs no DNS name."""
    if job.shape.workers == 1:
        return None
    pods = selector(job)
    if not job.spec.command:
        # The trainer resolves only worker 0: endpoints are written once per attempt, not for each pod.
        pods[LABEL_RANK] = "0"
    return _headless(metadata(job, service_name(job), common_labels(job)), pods)


def service_name(job: ZeroTrainingJob) -> str:
    """Return a DNS label that is unlikely to be the name of another Service.

    It depends on which pods the Service selects, because an existing Service is never changed.
    """
    named = "all" if job.spec.command else "first"
    return f"{job.name}-{hashlib.sha256(f'{job.uid}/{named}'.encode()).hexdigest()[:8]}"


def domain(job: ZeroTrainingJob) -> str | None:
    """Return the subdomain of the job's pods, which is the name of the headless Service; None for a single
    worker."""
    return service_name(job) if job.shape.workers > 1 else None


def _headless(meta: Json, pods: dict[str, str]) -> Json:
    ports = {RENDEZVOUS_PORT_NAME: MASTER_PORT, HTTP_PORT_NAME: WORKER_HTTP_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "clusterIP": "None",
            # The ranks must find each other before the rendezvous, and pods become ready only after it.
            "publishNotReadyAddresses": True,
            "selector": pods,
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in ports.items()
            ],
        },
    }
