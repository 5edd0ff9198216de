"""Conversion of a pod's JSON to a `PodView`.

Texts that a container, the kubelet, the scheduler or another writer puts into a pod's status are sanitised
here, and are not passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypedDict

from zerotrain.contract.exit_codes import signal_of
from zerotrain.contract.progress import Termination
from zerotrain.contract.text import one_line, word
from zerotrain.operator.constants import (
    CONTAINER_NAME,
    LABEL_ATTEMPT,
    LABEL_HELPER,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_RANK,
)
from zerotrain.operator.reconcile.pods import PodView, Stage
from zerotrain.operator.resources.identity import pod_name

MAX_LAST_LINE_CHARS = 1000
"""Maximum length of a termination message that is not in our format."""

MAX_SOURCES = 8

MAX_FINALIZERS = 4
"""Maximum number of finalizers that are named for a pod."""

_SOURCES = (
    ("ConfigMap", "configMap", "name"),
    ("Secret", "secret", "secretName"),
    ("Secret", "secret", "name"),  # in a projected volume
    ("claim", "persistentVolumeClaim", "claimName"),
)


def pod_view(pod: Mapping[str, Any], *, seen_at: datetime) -> PodView | None:
    """Return the view of a pod; None if its labels cannot be read, or if its name does not match them."""
    meta, status = pod["metadata"], pod.get("status", {})
    helper = meta.get("labels", {}).get(LABEL_HELPER)
    place = (0, 0) if helper else worker_of(meta)
    if place is None:
        return None
    attempt, index = place
    conditions = {item["type"]: item for item in status.get("conditions", ())}
    container = _container(status, helper or CONTAINER_NAME)
    state = container.get("state", {})
    ended = state.get("terminated")
    code = None if ended is None else int(ended.get("exitCode", -1))
    before = _failed_init_container(pod) if ended is None and status.get("phase") == "Failed" else {}
    if before:
        ended = before["state"]["terminated"]
        code = int(ended["exitCode"])
    finished = ended is not None or status.get("phase") in ("Failed", "Succeeded")
    return PodView(
        name=meta["name"],
        uid=meta["uid"],
        attempt=attempt,
        index=index,
        helper=helper,
        phase=word(status.get("phase", "Pending")),
        node=pod.get("spec", {}).get("nodeName"),
        pod_ip=status.get("podIP"),
        ready=_is_ready(conditions.get("Ready"), container),
        scheduled=is_true(conditions.get("PodScheduled")),
        unscheduled_reason=_unscheduled(conditions.get("PodScheduled")),
        refused_seen_at=seen_at if _is_refused(status, conditions.get("PodScheduled")) else None,
        ignored_seen_at=seen_at if not finished and _is_ignored(pod, conditions) else None,
        started="running" in state or ended is not None,
        waiting=_waiting(state.get("waiting")) or _waiting_before(pod, state),
        **_start(pod, conditions, state),
        exit_code=code,
        exit_reason=_word((ended or {}).get("reason")),
        pod_reason=_word(status.get("reason")),
        pod_message=one_line(status["message"]) if status.get("message") else None,
        disruption=_disruption(conditions.get("DisruptionTarget")),
        termination=_termination((ended or {}).get("message"), attempt, foreign=bool(before)),
        failed_container=_word(before.get("name")),
        failed_sidecar=None if before else _failed_sidecar(pod, helper or CONTAINER_NAME, ended or {}),
        finished_at=parse_time((ended or {}).get("finishedAt")),
        deletion_at=parse_time(meta.get("deletionTimestamp")),
        deletion_grace_s=meta.get("deletionGracePeriodSeconds"),
        finalizers=_finalizers(meta),
        ended_seen_at=seen_at if finished else None,
    )


def worker_of(meta: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return attempt and index of the worker if a pod's labels and name agree on them; None otherwise.

    Labels alone can be set by anyone. With the name, which is unique, no second pod can pose as worker 0.
    """
    labels = meta.get("labels", {})
    try:
        attempt, index = int(labels[LABEL_ATTEMPT]), int(labels[LABEL_RANK])
        named = meta["name"] == pod_name(labels[LABEL_JOB], attempt, index)
    except (KeyError, ValueError):
        return None
    return (attempt, index) if named and attempt > 0 and index >= 0 else None


def job_uid_of(pod: Mapping[str, Any]) -> str | None:
    """Return the UID of the job that controls this pod; None if label and owner do not agree."""
    uid = pod["metadata"].get("labels", {}).get(LABEL_JOB_UID)
    owners = pod["metadata"].get("ownerReferences", ())
    return uid if any(owner.get("uid") == uid and owner.get("controller") for owner in owners) else None


def _container(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next((item for item in status.get("containerStatuses", ()) if item.get("name") == name), {})


def _failed_init_container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the status of the failed init container; empty if none failed.

    A failed sidecar does not fail the pod, because it is restarted.
    """
    sidecars = _sidecars(pod)
    for item in pod.get("status", {}).get("initContainerStatuses", ()):
        if item.get("name") not in sidecars and item.get("state", {}).get("terminated", {}).get("exitCode"):
            return dict(item)
    return {}


def _sidecars(pod: Mapping[str, Any]) -> frozenset[str]:
    before = pod.get("spec", {}).get("initContainers", ())
    return frozenset(item["name"] for item in before if item.get("restartPolicy") == "Always")


def _failed_sidecar(pod: Mapping[str, Any], worker: str, ended: Mapping[str, Any]) -> str | None:
    """Return a description of the container that failed last before a failed worker ended; None without one.

    The worker may have depended on it, as on a proxy.
    """
    if not ended.get("exitCode"):
        return None
    status, sidecars = pod["status"], _sidecars(pod)
    others = [item for item in status.get("initContainerStatuses", ()) if item.get("name") in sidecars]
    others += [item for item in status.get("containerStatuses", ()) if item.get("name") != worker]
    found: list[tuple[str, str]] = []
    for item in others:
        for state in ("state", "lastState"):
            end = item.get(state, {}).get("terminated", {})
            at, code = str(end.get("finishedAt") or ""), end.get("exitCode")
            # A container that was killed in the same second may have been killed because the worker had
            # ended.
            if code and at and signal_of(code) is None and at <= str(ended.get("finishedAt") or ""):
                found.append((at, f"sidecar {word(str(item.get('name')))}: {_ending(end)}"))
    return max(found)[1] if found else None


def _ending(end: Mapping[str, Any]) -> str:
    """Return `exit code 3: no such bucket`, for a container other than the worker's."""
    code, reason, text = end.get("exitCode"), end.get("reason"), _last_line(end.get("message"))
    number = signal_of(int(code or 0))
    # "Error" is the runtime's reason for any code but 0.
    why = word(reason) if reason and reason != "Error" else f"killed by signal {number}" if number else ""
    return f"exit code {code}{f' ({why})' if why else ''}{f': {text}' if text else ''}"


def _last_line(message: str | None) -> str:
    """Return the last line of a foreign program's termination message or log."""
    lines = (message or "").strip().splitlines()
    return one_line(lines[-1], MAX_LAST_LINE_CHARS) if lines else ""


class _Start(TypedDict, total=False):
    stage: Stage
    needs: str
    bound_at: datetime | None


def _start(pod: Mapping[str, Any], conditions: Mapping[str, Any], state: Mapping[str, Any]) -> _Start:
    """Return the progress of the start; empty without a node, and once the worker's container has started."""
    spec, status = pod.get("spec", {}), pod.get("status", {})
    is_over = status.get("phase") in ("Failed", "Succeeded")
    if not spec.get("nodeName") or "running" in state or "terminated" in state or is_over:
        return {}
    bound_at = parse_time(conditions.get("PodScheduled", {}).get("lastTransitionTime"))
    sidecars = _sidecars(pod)
    for item in status.get("initContainerStatuses", ()):
        if "running" in item.get("state", {}) and item.get("name") not in sidecars:
            return {"stage": Stage.INITIALIZING, "needs": word(str(item["name"])), "bound_at": bound_at}
    sandbox = conditions.get("PodReadyToStartContainers")
    if sandbox is None:  # the kubelet has not handled the pod yet, or does not report this condition
        return {}
    if is_true(sandbox):
        return {"stage": Stage.PULLING, "bound_at": bound_at}
    return {"stage": Stage.MOUNTING, "needs": _sources(spec), "bound_at": bound_at}


def _sources(spec: Mapping[str, Any]) -> str:
    """Return `ConfigMap ds, claim data`: the objects that the volumes require."""
    found: dict[str, None] = {}
    for volume in spec.get("volumes", ()):
        for part in (volume, *volume.get("projected", {}).get("sources", ())):
            for kind, source, key in _SOURCES:
                item = part.get(source) or {}
                if item.get(key) and not item.get("optional"):
                    found[f"{kind} {word(item[key])}"] = None
    return summarize(list(found), MAX_SOURCES)


def _finalizers(meta: Mapping[str, Any]) -> tuple[str, ...]:
    names = meta.get("finalizers", ()) if meta.get("deletionTimestamp") else ()
    return tuple(word(str(name)) for name in names[:MAX_FINALIZERS])


def _word(text: str | None) -> str | None:
    return word(text) if text else None


def _worded(reason: str, message: str | None) -> str:
    """Return `Reason: message`, as conditions and waiting states contain them."""
    return one_line(f"{word(reason)}: {message or ''}".rstrip(": "))


def _is_ready(condition: Mapping[str, Any] | None, container: Mapping[str, Any]) -> bool:
    """Return whether the worker's container is ready.

    Another container may keep the pod from being ready. A silent node does so, too, and then the states of
    the containers are outdated.
    """
    by_another = condition is not None and condition.get("reason") == "ContainersNotReady"
    return is_true(condition) or (by_another and container.get("ready") is True)


def is_true(condition: Mapping[str, Any] | None) -> bool:
    """Return whether a condition of a status is True."""
    return condition is not None and condition.get("status") == "True"


def _unscheduled(condition: Mapping[str, Any] | None) -> str | None:
    if condition is None or condition.get("status") != "False":
        return None
    return _worded(condition.get("reason", "Unschedulable"), condition.get("message"))


def _is_refused(status: Mapping[str, Any], condition: Mapping[str, Any] | None) -> bool:
    """Return whether the scheduler found no node, and none that it could free by preemption."""
    scheduled = condition or {}
    unplaced = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    return unplaced and not status.get("nominatedNodeName")


def _is_ignored(pod: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    """Return whether no scheduler has given the pod a node, or a reason why it gets none."""
    return "PodScheduled" not in conditions and not pod.get("spec", {}).get("nodeName")


def _disruption(condition: Mapping[str, Any] | None) -> str | None:
    return word(str((condition or {}).get("reason"))) if is_true(condition) else None


def _waiting(state: Mapping[str, Any] | None) -> str | None:
    # ContainerCreating and PodInitializing are normal stages of a start and are not reported.
    if state is None or state.get("reason") in (None, "ContainerCreating", "PodInitializing"):
        return None
    return _worded(state["reason"], state.get("message"))


def _waiting_before(pod: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """Return why the first waiting init container or sidecar waits: it keeps the worker's container from
    starting."""
    if "running" in state or "terminated" in state:
        return None
    sidecars = _sidecars(pod)
    for item in pod.get("status", {}).get("initContainerStatuses", ()):
        text = _waiting(item.get("state", {}).get("waiting"))
        if text is not None:
            kind = "sidecar" if item.get("name") in sidecars else "init container"
            last = item.get("lastState", {}).get("terminated")
            before = f"; it ended with {_ending(last)}" if last else ""
            return one_line(f"{kind} {word(str(item.get('name')))}: {text}{before}")
    return None


def _termination(message: str | None, attempt: int, *, foreign: bool) -> Termination | None:
    """Return the parsed termination message of a pod.

    `foreign` says that it was written by another container than the worker's: it is then never in our format,
    whatever it looks like.
    """
    if not message or not message.strip():
        return None
    try:
        parsed = None if foreign else Termination.from_json(message)
    except ValueError:
        parsed = None  # a user program: its last line is still worth showing
    if parsed is None:
        return Termination(attempt=attempt, code=-1, last_line=_last_line(message))
    # A launcher that could not read its environment does not know its attempt and reports 0.
    return parsed if parsed.attempt in (0, attempt) else None


def parse_time(text: str | None) -> datetime | None:
    """Return the time in a text such as `2026-01-31T12:00:00Z` (fractions allowed); None for no text.

    Raises ValueError on other text.
    """
    if not text:
        return None
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def summarize(names: Sequence[str], most: int = 3) -> str:
    """Return `a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
