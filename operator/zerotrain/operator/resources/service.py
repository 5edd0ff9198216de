"""The headless Services that give worker pods their names.

The built-in trainer needs worker 0's name alone, where the ranks meet. Jobs share the Services for that: each
costs the cluster its own write and two of its endpoints, and every pod is compared with every Service of its
namespace. A program of the user's may ask for any worker, so its job has a Service of its own.
"""

from __future__ import annotations

from zlib import crc32

from zerotrain.contract.launch import MASTER_PORT, WORKER_HTTP_PORT
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import (
    HTTP_PORT_NAME,
    LABEL_RENDEZVOUS,
    RENDEZVOUS_PORT_NAME,
    RENDEZVOUS_SERVICES,
)

from .identity import Json, common_labels, metadata, selector, shared_labels


def own_service(job: ZeroTrainingJob) -> Json | None:
    """The Service by which a program of the user's finds any worker; None where nobody asks for one."""
    if job.shape.workers == 1 or not job.spec.command:
        return None
    return _headless(metadata(job, job.name, common_labels(job)), selector(job))


def rendezvous_service(job: ZeroTrainingJob) -> Json | None:
    """The Service of its namespace by which the job's ranks find worker 0; it belongs to no job. None where
    `own_service` does that, or a single worker needs no name."""
    if job.shape.workers == 1 or job.spec.command:
        return None
    meta = {"name": rendezvous_name(job.uid), "namespace": job.namespace, "labels": shared_labels()}
    return _headless(meta, {LABEL_RENDEZVOUS: str(_number(job.uid))})


def rendezvous_name(job_uid: str) -> str:
    """The name of the Service that the job uses if it uses one."""
    return RENDEZVOUS_SERVICES[_number(job_uid)]


def rendezvous_label(job: ZeroTrainingJob) -> dict[str, str]:
    """What worker 0 carries so that `rendezvous_service` names it."""
    found = rendezvous_service(job)
    return dict(found["spec"]["selector"]) if found is not None else {}


def domain(job: ZeroTrainingJob) -> str | None:
    """The subdomain of the job's pods: the name of the Service that gives them theirs."""
    found = own_service(job) or rendezvous_service(job)
    return str(found["metadata"]["name"]) if found is not None else None


def _number(job_uid: str) -> int:
    """Of the job alone, so that every attempt and every operator comes to the same."""
    return crc32(job_uid.encode()) % len(RENDEZVOUS_SERVICES)


def _headless(meta: Json, pods: dict[str, str]) -> Json:
    ports = {RENDEZVOUS_PORT_NAME: MASTER_PORT, HTTP_PORT_NAME: WORKER_HTTP_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "clusterIP": "None",
            # The ranks must find each other before the rendezvous, and pods are ready only after it.
            "publishNotReadyAddresses": True,
            "selector": pods,
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in ports.items()
            ],
        },
    }
