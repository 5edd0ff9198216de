"""Which nodes a pod may run on and how many pods of one kind fit there: the scheduler's arithmetic, in part.

`capacity` asks before it lets a job start. Known here are selectors, required node affinity, taints and every
counted resource; not known are pod (anti-)affinity, volumes and devices that are claimed by name, so that
"fits" means "nothing that we can count is missing".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerotrain.operator.resources.amounts import MILLI, PODS, at_most, requests_of

_HARD = frozenset({"NoSchedule", "NoExecute"})
_CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What decides where a worker may run; all workers of an attempt are of one kind."""

    each: Mapping[str, int]
    """Requests of one worker, with the pod itself counted."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    terms: Sequence[Mapping[str, Any]] | None = None
    """nodeSelectorTerms of the required node affinity; None when there is no such affinity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node without its pods."""

    name: str
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, Any]]
    """Those that keep a pod away."""
    allocatable: Mapping[str, int]


def kind_of(pod: Mapping[str, Any]) -> Kind:
    """The kind of a pod, from its JSON."""
    spec = pod["spec"]
    required = (
        spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    )
    return Kind(
        each={**requests_of(spec), PODS: MILLI},
        node_selector=spec.get("nodeSelector", {}),
        tolerations=spec.get("tolerations", ()),
        terms=None if required is None else required.get("nodeSelectorTerms", ()),
    )


def node_of(node: Mapping[str, Any]) -> Node:
    """A node from its JSON. A cordon is the taint that the node controller would set for it."""
    spec, meta = node.get("spec", {}), node["metadata"]
    taints = [taint for taint in spec.get("taints", ()) if taint.get("effect") in _HARD]
    if spec.get("unschedulable") and not any(taint["key"] == _CORDON["key"] for taint in taints):
        taints.append(_CORDON)
    allocatable = node.get("status", {}).get("allocatable", {})
    return Node(
        name=meta["name"],
        labels=meta.get("labels", {}),
        taints=tuple(taints),
        allocatable={name: at_most(amount) for name, amount in allocatable.items()},
    )


def is_suitable(kind: Kind, node: Node) -> bool:
    """Whether labels and taints let the kind run there, however full the node is."""
    if any(node.labels.get(key) != value for key, value in kind.node_selector.items()):
        return False
    if kind.terms is not None and not any(_meets(term, node) for term in kind.terms):
        return False
    return all(any(_tolerates(item, taint) for item in kind.tolerations) for taint in node.taints)


def slots(kind: Kind, free: Mapping[str, int]) -> int:
    """How many pods of the kind fit into the free amounts."""
    counts = [free.get(name, 0) // amount for name, amount in kind.each.items() if amount > 0]
    return max(min(counts, default=0), 0)


def short_of(kind: Kind, free: Mapping[str, int]) -> tuple[str, ...]:
    """The resources of which not even one pod's amount is free."""
    return tuple(sorted(name for name, amount in kind.each.items() if free.get(name, 0) < amount))


def _meets(term: Mapping[str, Any], node: Node) -> bool:
    """A term without any condition matches nothing, as in the scheduler."""
    expressions, fields = term.get("matchExpressions", ()), term.get("matchFields", ())
    if not expressions and not fields:
        return False
    named = {"metadata.name": node.name}
    return all(_holds(item, node.labels) for item in expressions) and all(
        _holds(item, named) for item in fields
    )


def _holds(condition: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(condition["key"]), condition.get("values", ())
    match condition["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            if value is None or not _is_number(value) or not values or not _is_number(values[0]):
                return False
            return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
    return False


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    key = toleration.get("key")
    if key not in (None, "", taint["key"]):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(key == taint["key"]) and toleration.get("value", "") == taint.get("value", "")
