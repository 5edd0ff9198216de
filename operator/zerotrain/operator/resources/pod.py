"""The worker pods: the worker container, the operator's volumes, and the parts from podTemplate and
scheduling.

The workers of an attempt differ only in their index, so the other parts are built once: a job may have
thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.core.containers import Container
from zerotrain.operator.api.pod_template import PodTemplate
from zerotrain.operator.api.scheduling import Scheduling
from zerotrain.operator.constants import CONTAINER_NAME

from .container import environment, grace_period_s, launch_spec, worker_container
from .gang import join
from .identity import Json, ResourceOptions, metadata, pod_name, worker_labels
from .scratch import limited
from .security import container_security_context, pod_security_context
from .service import domain
from .topology import keep_off, place
from .volumes import MountedVolume, as_written, own_volumes


def worker_pod(job: ZeroTrainingJob, attempt: int, index: int, options: ResourceOptions) -> Json:
    """Return the pod of worker `index` (0-based) of `attempt` (counted from 1)."""
    return next(worker_pods(job, attempt, (index,), options))


def worker_pods(
    job: ZeroTrainingJob, attempt: int, indices: Iterable[int], options: ResourceOptions
) -> Iterator[Json]:
    """Yield the pods of these workers. They share the parts that do not depend on the index: do not change
    them."""
    volumes = own_volumes(job, attempt)
    container = worker_container(job, options, volumes)
    shared: Json = {
        "metadata": {"labels": dict(job.shape.labels), "annotations": _annotations(job)},
        "spec": _pod_spec(job, attempt, volumes),
    }
    join(shared, job, attempt)
    launch = launch_spec(job, attempt, options)
    for index in indices:
        name = pod_name(job.name, attempt, index)
        labels = {**shared["metadata"]["labels"], **_labels(job, attempt, index)}
        meta = metadata(job, name, labels)
        meta["annotations"] = shared["metadata"]["annotations"]
        env = environment(job, replace(launch, node_rank=index))
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": meta,
            "spec": {**shared["spec"], "hostname": name, "containers": [{**container, "env": env}]},
        }


def _pod_spec(job: ZeroTrainingJob, attempt: int, volumes: tuple[MountedVolume, ...]) -> Json:
    """Return the pod spec without the host name and the worker container."""
    spec: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_period_s(job),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security_context(),
        "volumes": [volume.volume for volume in volumes],
    }
    if (subdomain := domain(job)) is not None:
        spec["subdomain"] = subdomain
    _add_scheduling(spec, job)
    if job.spec.pod_template is not None:
        _add_template(spec, job, job.spec.pod_template)
    place(spec, job, attempt)
    keep_off(spec, job.shape.excluded_nodes)
    return spec


def _labels(job: ZeroTrainingJob, attempt: int, index: int) -> dict[str, str]:
    template = job.spec.pod_template
    given = template.labels if template is not None else None
    return {**(given or {}), **worker_labels(job, attempt, index)}


def _annotations(job: ZeroTrainingJob) -> dict[str, str]:
    template = job.spec.pod_template
    given = template.annotations if template is not None else None
    others = template is not None and bool(template.sidecars or template.init_containers)
    return {
        # `kubectl logs` must show the ranks by default, not a sidecar.
        **({"kubectl.kubernetes.io/default-container": CONTAINER_NAME} if others else {}),
        **(given or {}),
        **job.shape.annotations,
    }


def _add_scheduling(spec: Json, job: ZeroTrainingJob) -> None:
    scheduling, shape = job.spec.scheduling or Scheduling(), job.shape
    if scheduling.priority_class_name is not None:
        spec["priorityClassName"] = scheduling.priority_class_name
    if selector := {**(scheduling.node_selector or {}), **shape.node_selector}:
        spec["nodeSelector"] = selector
    if tolerations := (*scheduling.tolerations, *shape.tolerations):
        spec["tolerations"] = [as_written(toleration) for toleration in tolerations]


def _add_template(spec: Json, job: ZeroTrainingJob, template: PodTemplate) -> None:
    spec["volumes"] += [limited(volume, as_written(volume), job) for volume in template.volumes]
    before = [_extra_container(container) for container in template.init_containers]
    # A sidecar is an init container that keeps running: the pod ends when the ranks end, without waiting for
    # it.
    sidecars = [{**_extra_container(container), "restartPolicy": "Always"} for container in template.sidecars]
    if before or sidecars:
        spec["initContainers"] = [*before, *sidecars]
    if template.affinity is not None:
        spec["affinity"] = as_written(template.affinity)
    if template.image_pull_secrets:
        spec["imagePullSecrets"] = [as_written(reference) for reference in template.image_pull_secrets]
    if template.service_account_name is not None:
        spec["serviceAccountName"] = template.service_account_name


def _extra_container(container: Container) -> Json:
    return {
        **as_written(container),
        # Without it, only the exit code of a failure is known.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security_context(container.security_context),
    }
