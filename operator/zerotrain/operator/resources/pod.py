"""The worker pods: the worker container, the operator's volumes, the parts from podTemplate and scheduling,
and the disruption budget of an attempt.

The workers of an attempt differ only in their index, so the other parts are built once: a job may have
thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.core.containers import Container
from zerotrain.operator.api.pod_template import PodTemplate
from zerotrain.operator.api.scheduling import Scheduling, TopologyPolicy
from zerotrain.operator.constants import CONTAINER_NAME, LABEL_ATTEMPT, LABEL_JOB_UID

from .container import (
    container_security_context,
    environment,
    grace_period_s,
    launch_spec,
    pod_security_context,
    worker_container,
)
from .gang import join
from .identity import Json, ResourceOptions, attempt_labels, metadata, pod_name, selector, worker_labels
from .network import domain
from .volumes import MountedVolume, as_written, limited, own_volumes


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
    if labels := {**(scheduling.node_selector or {}), **shape.node_selector}:
        spec["nodeSelector"] = labels
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
    if template.runtime_class_name is not None:
        spec["runtimeClassName"] = template.runtime_class_name
    if template.service_account_name is not None:
        spec["serviceAccountName"] = template.service_account_name


def _extra_container(container: Container) -> Json:
    return {
        **as_written(container),
        # Without it, only the exit code of a failure is known.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security_context(container.security_context),
    }


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_SPREAD_KEYS = ("topologyKey", "whenUnsatisfiable")


def place(spec: Json, job: ZeroTrainingJob, attempt: int) -> None:
    """Add the spreading of podTemplate and the topology of spec.scheduling to a pod spec."""
    peers = {"matchLabels": {LABEL_JOB_UID: job.uid, LABEL_ATTEMPT: str(attempt)}}
    template, scheduling = job.spec.pod_template, job.spec.scheduling
    given = template.topology_spread_constraints if template is not None else ()
    # Without a selector, Kubernetes would count no pods, and the constraint would have no effect.
    spread = [{"labelSelector": peers, **as_written(item)} for item in given]
    key = scheduling.topology_key if scheduling is not None else None
    # If a queue chose a value of the key, the node selector already contains it.
    if scheduling is not None and key is not None and key not in job.shape.node_selector:
        if scheduling.topology_policy is TopologyPolicy.SPREAD:
            spread += _apart(key, peers, spread)
        else:
            spec["affinity"] = _together(spec.get("affinity", {}), key, peers)
    if spread:
        spec["topologySpreadConstraints"] = spread


def _apart(key: str, peers: Json, given: list[Json]) -> list[Json]:
    """Return the constraint that spreads the pods over the values of `key`; none if one is given, as the API
    server accepts only one."""
    spread: Json = {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule"}
    if any(all(item[name] == spread[name] for name in _SPREAD_KEYS) for item in given):
        return []
    # Otherwise a zone whose nodes are all cordoned would count as a zone without pods, and no pod could be
    # scheduled.
    return [{**spread, "labelSelector": peers, "nodeTaintsPolicy": "Honor"}]


def _together(affinity: Json, key: str, peers: Json) -> Json:
    """Return the affinity with a term by which the first worker, which matches itself, goes anywhere, and the
    others follow it."""
    near = dict(affinity.get("podAffinity", {}))
    near[_REQUIRED] = [*near.get(_REQUIRED, ()), {"topologyKey": key, "labelSelector": peers}]
    return {**affinity, "podAffinity": near}


def keep_off(spec: Json, nodes: Iterable[str]) -> None:
    """Keep a pod away from these nodes, whatever nodes podTemplate selects."""
    # There is one requirement per node, because the API accepts a single value for the name of a node.
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(set(nodes))]
    if not away:
        return
    affinity = dict(spec.get("affinity", {}))
    node = dict(affinity.get("nodeAffinity", {}))
    # Terms are alternatives, so each of them gets the condition.
    terms = node.get(_REQUIRED, {}).get("nodeSelectorTerms") or [{}]
    node[_REQUIRED] = {
        "nodeSelectorTerms": [
            {**term, "matchFields": [*term.get("matchFields", ()), *away]} for term in terms
        ]
    }
    spec["affinity"] = {**affinity, "nodeAffinity": node}


def budget_name(job_name: str, attempt: int) -> str:
    return f"{job_name}-{attempt}"


def disruption_budget(job: ZeroTrainingJob, attempt: int, workers: int) -> Json:
    """Return the budget that blocks evictions from an attempt of `workers` workers while all of them train.

    The eviction of one rank ends all others, so the only useful budget is "none at a time". A node drain
    still succeeds: it cordons the node first, `reconcile.avoided_nodes` notices the cordon and moves the
    whole job through a checkpoint, and a pod that has ended no longer counts.
    """
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
