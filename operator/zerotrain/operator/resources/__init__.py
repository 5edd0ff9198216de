"""Pure functions that build the objects of a job as plain JSON. `cluster` creates them in the API server.

There is one module per concern; `pod` assembles a pod. Nothing here calls the API server or reads a clock:
the same job, attempt and options give the same objects.
"""

from zerotrain.operator.api import ZeroTrainingJob

from .gang import pod_group
from .identity import Json, ResourceOptions, pod_name, secret_name, selector
from .network import headless_service, network_policy, service_name
from .pod import worker_pod, worker_pods
from .secret import attempt_secret

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
    """Return the objects that the pods of an attempt need before they are created.

    These are the Service (if there are several workers), the NetworkPolicy, the Secret with the attempt's
    files and the pod group (if the attempt is a gang). Secret and group belong to the attempt and never
    change; the others belong to the job.
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
    """Return every object of an attempt, in the order of creation."""
    pods = worker_pods(job, attempt, range(job.shape.workers), options)
    return [*shared_objects(job, attempt, operator_key, options), *pods]
