"""The job as a Kueue Workload with the workers as its only pod set.

The template holds what Kueue counts and matches (requests, selectors, tolerations, priority). It leaves out
the environment and the volumes of the program, which Kueue does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zerotrain.contract.text import word
from zerotrain.operator.api import ZeroTrainingJob, ZeroTrainingJobSpec
from zerotrain.operator.api.spec import spec_hash
from zerotrain.operator.constants import ANNOTATION_EXCLUDED, ANNOTATION_MADE_FROM, LABEL_RANK

from .amounts import at_least
from .identity import Json, common_labels, metadata

KUEUE_GROUP: Final = "kueue.x-k8s.io"
KUEUE_VERSIONS: Final = ("v1beta2", "v1", "v1beta1")
"""API versions that this module can write. The version that was tested with a real Kueue comes first."""

POD_SET: Final = "workers"
TOPOLOGY_GATE: Final = f"{KUEUE_GROUP}/topology"
"""Scheduling gate that Kueue removes from a pod once it has written the pod's placement into the node
selector."""

_REQUIRED_TOPOLOGY = f"{KUEUE_GROUP}/podset-required-topology"
_PREFERRED_TOPOLOGY = f"{KUEUE_GROUP}/podset-preferred-topology"
_UNCONSTRAINED_TOPOLOGY = f"{KUEUE_GROUP}/podset-unconstrained-topology"
_INPUTS = frozenset({"image", "resources", "nvme", "scheduling", "pod_template"})
"""Fields of the spec that describe a worker."""

_SCHEDULING = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "priorityClassName",
    "schedulerName",
    "runtimeClassName",
    "overhead",
)


def workload_name(job: str, uid: str) -> str:
    """Return the name of the job's Workload. A recreated job must not find the admission of its
    predecessor."""
    return f"zerotrain-{job}-{uid[:8]}"


def made_from(spec: ZeroTrainingJobSpec) -> str:
    """Return a hash of what the pod set of a Workload depends on, besides the number of workers.

    If it differs, the Workload describes other pods. The priority may change while quota is held, so it is
    compared separately.
    """
    return spec_hash(spec, parts=_INPUTS, but={"scheduling": {"priority_class_name"}})


def workload(
    job: ZeroTrainingJob, version: str, workers: int, worker: Json, priority: int | None, *, queue: str = ""
) -> Json:
    """Return the job's Workload.

    `worker` is one worker pod. `priority` is the value of its priority class, if it has one. `queue` is the
    name of the queue if a label sets it instead of the spec.
    """
    scheduling = job.spec.scheduling
    spec: Json = {"podSets": [_pod_set(worker, workers)]}
    if named := queue or (scheduling.queue_name if scheduling is not None else None):
        spec["queueName"] = named
    if scheduling is not None and scheduling.priority_class_name is not None and priority is not None:
        spec |= _priority(version, scheduling.priority_class_name, priority)
    labels = {**common_labels(job), f"{KUEUE_GROUP}/job-uid": job.uid}
    meta = metadata(job, workload_name(job.name, job.uid), labels)
    meta["annotations"] = {ANNOTATION_MADE_FROM: made_from(job.spec)}
    if off := job.shape.excluded_nodes:
        meta["annotations"][ANNOTATION_EXCLUDED] = ",".join(off)
    return {"apiVersion": version, "kind": "Workload", "metadata": meta, "spec": spec}


def _pod_set(worker: Json, workers: int) -> Json:
    spec = worker["spec"]
    template: Json = {
        "restartPolicy": "Never",
        "containers": [_counted(item) for item in spec["containers"]],
        **{name: spec[name] for name in _SCHEDULING if name in spec},
    }
    if before := spec.get("initContainers"):
        template["initContainers"] = [_counted(item) for item in before]
    pod_set: Json = {"name": POD_SET, "count": workers, "template": {"metadata": {}, "spec": template}}
    return {**pod_set, "topologyRequest": _topology(worker["metadata"]["annotations"])}


def _topology(annotations: Mapping[str, str]) -> Json:
    """Return the topology request of podTemplate.

    Pods are placed in the order of their rank, so that neighbours in rank are neighbours in the topology:
    rings follow the ranks.
    """
    levels = (("required", _REQUIRED_TOPOLOGY), ("preferred", _PREFERRED_TOPOLOGY))
    topology: Json = {level: annotations[name] for level, name in levels if name in annotations}
    if annotations.get(_UNCONSTRAINED_TOPOLOGY) == "true":
        topology["unconstrained"] = True
    return {**topology, "podIndexLabel": LABEL_RANK}


def excluded_by(item: Mapping[str, Any]) -> frozenset[str]:
    """Return the nodes that the pods of this Workload must not run on because of the job's own failures."""
    written = item.get("metadata", {}).get("annotations", {}).get(ANNOTATION_EXCLUDED, "")
    return frozenset(word(name) for name in written.split(",") if name)


def placed_by_kueue(item: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels and annotations by which Kueue finds the pods of this Workload and accepts them as
    its own.

    Kueue has chosen the placement of these pods. If no topology was requested, an annotation says so, as for
    the pods of Kueue's own jobs.
    """
    request = item["spec"]["podSets"][0].get("topologyRequest", {})
    annotations = {f"{KUEUE_GROUP}/workload": item["metadata"]["name"]}
    if not any(level in request for level in ("required", "preferred", "unconstrained")):
        annotations[_UNCONSTRAINED_TOPOLOGY] = "true"
    return {f"{KUEUE_GROUP}/podset": POD_SET}, annotations


def _counted(container: Json) -> Json:
    kept = ("name", "image", "resources", "restartPolicy")
    counted = {name: container[name] for name in kept if name in container}
    if "resources" in counted:
        counted["resources"] = _requested(counted["resources"])
    return counted


def _requested(resources: Json) -> Json:
    """Return the resources without those that have a limit but a request of zero.

    Kueue takes a limit for a request, and admits nothing that requests a resource which its queue does not
    have.
    """
    free = {name for name, amount in resources.get("requests", {}).items() if at_least(amount) == 0}
    parts = {
        part: {name: amount for name, amount in amounts.items() if name not in free}
        for part, amounts in resources.items()
    }
    return {part: amounts for part, amounts in parts.items() if amounts}


def _priority(version: str, name: str, value: int) -> dict[str, Any]:
    if version.endswith("/v1beta1"):
        return {
            "priorityClassName": name,
            "priorityClassSource": "scheduling.k8s.io/priorityclass",
            "priority": value,
        }
    reference = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": name}
    return {"priorityClassRef": reference, "priority": value}
