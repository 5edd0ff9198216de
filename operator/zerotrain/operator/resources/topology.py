"""Placement of the workers of one attempt: together or apart by a node label, and away from excluded
nodes."""

from __future__ import annotations

from collections.abc import Iterable

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.scheduling import TopologyPolicy
from zerotrain.operator.constants import LABEL_ATTEMPT, LABEL_JOB_UID

from .identity import Json

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def place(spec: Json, job: ZeroTrainingJob, attempt: int) -> None:
    """Add the topology of spec.scheduling to a pod spec, besides the constraints of podTemplate."""
    scheduling = job.spec.scheduling
    key = scheduling.topology_key if scheduling is not None else None
    # If a queue chose a value of the key, the node selector already contains it.
    if scheduling is None or key is None or key in job.shape.node_selector:
        return
    peers = {"matchLabels": {LABEL_JOB_UID: job.uid, LABEL_ATTEMPT: str(attempt)}}
    if scheduling.topology_policy is TopologyPolicy.SPREAD:
        spread: Json = {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule"}
        # Otherwise a zone whose nodes are all cordoned would count as a zone without pods, and no pod could
        # be scheduled.
        spec["topologySpreadConstraints"] = [{**spread, "labelSelector": peers, "nodeTaintsPolicy": "Honor"}]
        return
    # The first worker matches itself and goes anywhere; the others follow it.
    affinity = dict(spec.get("affinity", {}))
    near = dict(affinity.get("podAffinity", {}))
    near[_REQUIRED] = [*near.get(_REQUIRED, ()), {"topologyKey": key, "labelSelector": peers}]
    spec["affinity"] = {**affinity, "podAffinity": near}


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
