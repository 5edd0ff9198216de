"""The values of PriorityClasses: what orders jobs, and what a Workload of Kueue must carry."""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.api import Api, Request

PATH = "/apis/scheduling.k8s.io/v1/priorityclasses"


@dataclass(frozen=True, kw_only=True, slots=True)
class Priority:
    """What the API server gives the pods."""

    value: int = 0
    preempts: bool = True


async def priority_of(api: Api, job: ZeroTrainingJob) -> Priority:
    """Of the job's workers: its class, else the cluster's default. A class that does not exist counts as
    none; the API server will refuse the pods by its name."""
    listed = await api.call(Request(method="GET", path=PATH, kind="priorityclasses"))
    scheduling = job.spec.scheduling
    wanted = scheduling.priority_class_name if scheduling is not None else None
    for item in listed.get("items", ()):
        if item["metadata"]["name"] == wanted or (wanted is None and item.get("globalDefault")):
            preempts = item.get("preemptionPolicy", "PreemptLowerPriority") != "Never"
            return Priority(value=int(item["value"]), preempts=preempts)
    return Priority()
