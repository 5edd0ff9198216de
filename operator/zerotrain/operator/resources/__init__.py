"""The objects of a job as plain JSON, built by pure functions. `cluster` creates what these return.

One module per concern; `pod` puts the parts of a pod together. Nothing here talks to the API server
or reads a clock: the same job, attempt and options give the same objects.
"""

from zerotrain.operator.api import ZeroTrainingJob

from .gang import pod_group
from .identity import Json, ResourceOptions, pod_name, secret_name, selector
from .network_policy import network_policy
from .pod import worker_pod, worker_pods
from .secret import attempt_secret
from .service import headless_service, service_name

__all__ = [
    "Json",
    "ResourceOptions",
    "attempt_secret",
    "build",
    "headless_service",
    "network_policy",
    "pod_name",
    "secret_name",
    "selector",
    "service_name",
    "shared_objects",
    "worker_pod",
    "worker_pods",
]


def shared_objects(
    job: ZeroTrainingJob, attempt: int, operator_key: bytes, options: ResourceOptions
) -> list[Json]:
    """What the pods of an attempt need before they are made: the Service where there are several
    workers, NetworkPolicy, the Secret with its files, the pod group of a gang.

    Secret and group belong to the attempt and are never changed; the others belong to the job.
    """
    headless = headless_service(job)
    group = pod_group(job, attempt, worker_pod(job, attempt, 0, options)) if job.shape.gang else None
    return [
        *([headless] if headless is not None else []),
        network_policy(job, options),
        attempt_secret(job, attempt, operator_key),
        *([group] if group is not None else []),
    ]


def build(job: ZeroTrainingJob, attempt: int, operator_key: bytes, options: ResourceOptions) -> list[Json]:
    """Every object of an attempt, in the order of creation."""
    pods = worker_pods(job, attempt, range(job.shape.workers), options)
    return [*shared_objects(job, attempt, operator_key, options), *pods]
