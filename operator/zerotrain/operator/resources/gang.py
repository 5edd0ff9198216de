"""Pod groups: they tell a scheduler to place the workers of an attempt together or not at all.

Three schedulers are supported, with several API versions. The attempt's shape names the version that was
found at its start, so that a recreated pod joins the same group. A group belongs to one attempt, and its size
never changes.
"""

from __future__ import annotations

from typing import Any, Final

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.scheduling import Gang, Scheduling, TopologyPolicy

from .amounts import requests_of, resource_list, times
from .identity import Json, attempt_labels, metadata

GROUPS: Final = {
    Gang.NATIVE: "scheduling.k8s.io",
    Gang.VOLCANO: "scheduling.volcano.sh",
    Gang.COSCHEDULING: "scheduling.x-k8s.io",
}
VERSIONS: Final = {
    Gang.NATIVE: ("v1beta1", "v1alpha3", "v1alpha2"),
    Gang.VOLCANO: ("v1beta1",),
    Gang.COSCHEDULING: ("v1alpha1",),
}
"""API versions that this module can write, newest first."""

RESOURCE: Final = "podgroups"

_SCHEDULERS = {Gang.VOLCANO: "volcano", Gang.COSCHEDULING: "scheduler-plugins-scheduler"}
_COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
_VOLCANO_ANNOTATIONS = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")


def group_name(job_name: str, attempt: int) -> str:
    return f"{job_name}-{attempt}"


def has_group(version: str) -> bool:
    """Return whether a scheduler's pod group places the attempt."""
    return _mechanism(version) is not None


def pod_group(job: ZeroTrainingJob, attempt: int, worker: Json) -> Json | None:
    """Return the pod group of an attempt whose workers look like `worker`; None without a gang scheduler."""
    version = job.shape.gang
    match _mechanism(version):
        case Gang.NATIVE:
            spec = _native(job, version)
        case Gang.VOLCANO:
            spec = _volcano(job, worker)
        case Gang.COSCHEDULING:
            spec = {"minMember": job.shape.workers, "minResources": _total(job, worker)}
        case _:
            return None
    meta = metadata(job, group_name(job.name, attempt), attempt_labels(job, attempt))
    return {"apiVersion": version, "kind": "PodGroup", "metadata": meta, "spec": spec}


def scheduler_name(scheduling: Scheduling | None, version: str) -> str | None:
    """Return the scheduler of an attempt's pods; None for the cluster's default one."""
    mechanism = _mechanism(version)
    own = scheduling.scheduler_name if scheduling is not None else None
    return own or (_SCHEDULERS.get(mechanism) if mechanism is not None else None)


def join(pod: Json, job: ZeroTrainingJob, attempt: int) -> None:
    """Make the pod (without its index) a member of the attempt's group."""
    version, name = job.shape.gang, group_name(job.name, attempt)
    spec, meta = pod["spec"], pod["metadata"]
    if (scheduler := scheduler_name(job.spec.scheduling, version)) is not None:
        spec["schedulerName"] = scheduler
    match _mechanism(version):
        case Gang.NATIVE:
            spec["schedulingGroup"] = {"podGroupName": name}
        case Gang.VOLCANO:
            meta["annotations"] |= dict.fromkeys(_VOLCANO_ANNOTATIONS, name)
        case Gang.COSCHEDULING:
            meta["labels"][_COSCHEDULING_LABEL] = name
    if job.shape.scheduling_gates:
        spec["schedulingGates"] = [{"name": gate} for gate in job.shape.scheduling_gates]


def _mechanism(version: str) -> Gang | None:
    group = version.rpartition("/")[0]
    return next((gang for gang, name in GROUPS.items() if name == group), None)


def _native(job: ZeroTrainingJob, version: str) -> Json:
    policy = {"gang": {"minCount": job.shape.workers}}
    # If the scheduler evicts one worker, it may as well evict all: the others cannot continue without it.
    mode: Any = "PodGroup" if version.endswith("/v1alpha2") else {"all": {}}
    spec: Json = {"schedulingPolicy": policy, "disruptionMode": mode}
    scheduling = job.spec.scheduling or Scheduling()
    if scheduling.priority_class_name is not None:
        spec["priorityClassName"] = scheduling.priority_class_name
    if scheduling.topology_key is not None and scheduling.topology_policy is not TopologyPolicy.SPREAD:
        spec["schedulingConstraints"] = {"topology": [{"key": scheduling.topology_key}]}
    return spec


def _volcano(job: ZeroTrainingJob, worker: Json) -> Json:
    spec: Json = {"minMember": job.shape.workers, "minResources": _total(job, worker)}
    scheduling = job.spec.scheduling
    if scheduling is not None and scheduling.priority_class_name is not None:
        spec["priorityClassName"] = scheduling.priority_class_name
    return spec


def _total(job: ZeroTrainingJob, worker: Json) -> dict[str, str]:
    return resource_list(times(requests_of(worker["spec"]), job.shape.workers))
