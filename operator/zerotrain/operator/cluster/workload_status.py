"""Content of Kueue's Workloads: what reconcile reads of one, and its status after a step of the operator.

All functions are pure; `kueue` makes the requests.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from zerotrain.contract.text import is_printable, one_line, word
from zerotrain.operator.api.core.meta import Toleration
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.constants import ANNOTATION_MADE_FROM
from zerotrain.operator.reconcile.observe import QueueView
from zerotrain.operator.reconcile.plan import QueueStep
from zerotrain.operator.reconcile.pod_reader import is_true, summarize
from zerotrain.operator.resources.kueue import (
    TOPOLOGY_GATE,
    excluded_by,
    placed_by_kueue,
)

MAX_MESSAGE_CHARS = 500
"""Maximum of characters that are kept of Kueue's message on a Workload."""

REQUEUES = frozenset({"Preempted", "AdmissionCheck", "NodeFailures"})
"""Evictions after which a Workload goes back into its queue at once, as Kueue's own jobs do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flavor:
    """Requirements of a ResourceFlavor on the pods."""

    node_labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusChange:
    """One step of the operator, as it is written into the Workload's conditions."""

    step: QueueStep
    message: str
    at: datetime
    generation: int


def may_release(status: Mapping[str, Any]) -> bool:
    """Return whether the Workload is evicted now and still holds the quota to be released. The watch may be
    behind: Kueue may have admitted the Workload anew since the last release, and nothing would requeue it
    after another one."""
    return all(_condition(status, kind).get("status") == "True" for kind in ("Evicted", "QuotaReserved"))


def advanced(status: Mapping[str, Any], change: StatusChange) -> Json:
    """Return the Workload's status after one step of the operator."""
    changed = {**status, "conditions": [dict(item) for item in status.get("conditions", ())]}
    message = change.message

    def put(kind: str, value: bool, reason: str, text: str) -> None:
        entry = {"type": kind, "status": "True" if value else "False", "reason": reason, "message": text}
        _put_condition(changed["conditions"], entry, change)

    match change.step:
        case QueueStep.RELEASE:
            reason = _condition(status, "Evicted").get("reason", "")
            put("Requeued", reason in REQUEUES, reason or "Evicted", message)
            put("QuotaReserved", False, "Pending", message)
            put("Admitted", False, "NoReservation", "The workload has no reservation")
            if _condition(status, "PodsReady"):
                # Otherwise Kueue waits for a recovery after the next admission, possibly without a time
                # limit.
                put("PodsReady", False, "WaitForStart", message)
            changed.pop("admission", None)
        case QueueStep.FINISH:
            put("Finished", True, "Failed" if message.endswith("Failed") else "Succeeded", message)
        case QueueStep.PODS_READY:
            again = _condition(status, "PodsReady").get("reason") in ("WaitForRecovery", "Recovered")
            put("PodsReady", True, "Recovered" if again else "Started", "all ranks joined")
        case QueueStep.PODS_NOT_READY:
            put("PodsReady", False, "WaitForRecovery", message)
    return changed


def flavors_of(status: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the admission's flavors, each once."""
    assignments = status.get("admission", {}).get("podSetAssignments", ())
    return tuple(sorted({name for item in assignments for name in item.get("flavors", {}).values()}))


def queue_view(item: Mapping[str, Any], flavors: list[Flavor]) -> QueueView:
    """Return the Workload's view for reconcile, with its flavors and the pod-set updates of its admission
    checks."""
    spec, status = item.get("spec", {}), item.get("status", {})
    updates = [
        update for check in status.get("admissionChecks", ()) for update in check.get("podSetUpdates", ())
    ]
    asked = [
        *flavors,
        *(
            read_flavor("an admission check", update.get("nodeSelector", {}), update.get("tolerations", ()))
            for update in updates
        ),
    ]
    evicted, quota = _condition(status, "Evicted"), _condition(status, "QuotaReserved")
    gates, (labels, annotations) = _topology(item)
    return QueueView(
        exists=True,
        deleting="deletionTimestamp" in item.get("metadata", {}),
        workers=sum(int(pods.get("count", 1)) for pods in spec.get("podSets", ())),
        made_from=word(item.get("metadata", {}).get("annotations", {}).get(ANNOTATION_MADE_FROM, "")),
        queue=word(spec.get("queueName", "")),
        priority_class=word(
            spec.get("priorityClassName") or spec.get("priorityClassRef", {}).get("name", "")
        ),
        admitted=is_true(_condition(status, "Admitted")),
        evicted=one_line(f"{evicted.get('reason')}: {evicted.get('message', '')}", MAX_MESSAGE_CHARS)
        if is_true(evicted)
        else None,
        holds_quota=is_true(quota),
        finished=is_true(_condition(status, "Finished")),
        pods_ready=is_true(_condition(status, "PodsReady")),
        message="" if is_true(quota) else one_line(str(quota.get("message", "")), MAX_MESSAGE_CHARS),
        cluster_queue=word(status.get("admission", {}).get("clusterQueue", "")),
        # The first value of a key wins, as in Kueue.
        node_selector=_first_of(flavor.node_labels for flavor in asked),
        tolerations=tuple(dict.fromkeys(each for flavor in asked for each in flavor.tolerations)),
        labels=_first_of((labels, *(update.get("labels", {}) for update in updates))),
        annotations=_first_of((annotations, *map(_annotations, updates))),
        gates=gates,
        excluded_nodes=excluded_by(item),
        problem=next((flavor.problem for flavor in asked if flavor.problem), _failed_nodes(status))
        or _unprintable(updates),
    )


def _annotations(update: Mapping[str, Any]) -> dict[str, str]:
    """Return the printable annotations that an admission check sets. They go to the pods unchanged, and into
    the job's status."""
    return {name: text for name, text in update.get("annotations", {}).items() if is_printable(text)}


def _unprintable(updates: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a message that names an annotation that was left out; None if there is none."""
    for update in updates:
        for name in update.get("annotations", {}).keys() - _annotations(update).keys():
            return f"an admission check gives annotation {word(name)} a value with control characters"
    return None


def _topology(item: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[dict[str, str], dict[str, str]]]:
    """Return gates, labels and annotations of pods that Kueue has assigned to nodes (topology-aware
    scheduling)."""
    assignments = item.get("status", {}).get("admission", {}).get("podSetAssignments", ())
    if not any(part.get("topologyAssignment") for part in assignments):
        return (), ({}, {})
    return (TOPOLOGY_GATE,), placed_by_kueue(item)


def _failed_nodes(status: Mapping[str, Any]) -> str | None:
    """Return a message if Kueue is about to correct its topology assignment: pods made before that could not
    run on the failed nodes."""
    names = [word(str(node.get("name"))) for node in status.get("unhealthyNodes", ())]
    return f"it looks for other nodes in place of {summarize(names)}, which failed" if names else None


def read_flavor(what: str, labels: Mapping[str, str], tolerations: Any) -> Flavor:
    """Return the requirements, or a problem that names `what` if a toleration is not understood."""
    try:
        parsed = tuple(Toleration.model_validate(item) for item in tolerations)
    except ValidationError as error:
        message = one_line(str(error.errors()[0]["msg"]))
        return Flavor(problem=f"a toleration of {what} is not understood: {message}")
    return Flavor(node_labels=labels, tolerations=parsed)


def _first_of(parts: Any) -> dict[str, str]:
    return dict(ChainMap(*parts))


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    found = [item for item in status.get("conditions", ()) if item.get("type") == kind]
    return dict(found[0]) if found else {}


def _put_condition(conditions: list[Json], entry: Json, change: StatusChange) -> None:
    old = next((item for item in conditions if item.get("type") == entry["type"]), None)
    since = change.at.strftime("%Y-%m-%dT%H:%M:%SZ")
    if old is not None and old.get("status") == entry["status"]:
        since = old.get("lastTransitionTime", since)
    new = {
        **entry,
        "message": entry["message"][:1024],
        "lastTransitionTime": since,
        "observedGeneration": change.generation,
    }
    if old is None:
        conditions.append(new)
    else:
        conditions[conditions.index(old)] = new
