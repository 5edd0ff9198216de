"""Rejections of actions by the API server, or because of what it holds, in words that name cause and way
out."""

from __future__ import annotations

from zerotrain.contract.text import one_line
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.errors import Forbidden
from zerotrain.operator.constants import GROUP, LABEL_JOB, LABEL_JOB_UID, Reason
from zerotrain.operator.reconcile import Problem
from zerotrain.operator.resources.container import IPC_LOCK

_EXCEEDED = "exceeded quota"

_WAYS_OUT = (
    (
        "pod rejected: RuntimeClass",
        "Create it, or change spec.podTemplate.runtimeClassName while spec.suspend is true",
    ),
    ("no PriorityClass with name", "Create it, or change spec.scheduling.priorityClassName"),
    (
        "error looking up service account",
        "Create it, or change spec.podTemplate.serviceAccountName while spec.suspend is true",
    ),
    (
        "failed quota:",
        "Create the job again with them in spec.resources (of other containers in spec.podTemplate), or have "
        "a LimitRange of the namespace add them",
    ),
)
"""Rejections by the API server's own admission, in its wording, and the field of the job that they are about.
"""

_PASSING = ("status unknown for quota", 'serviceaccount "default" not found')
"""Rejections of the first seconds of a quota and of a namespace, until their controllers have seen them."""

_DEMANDS_DISK = ("minimum ephemeral-storage usage", "ephemeral-storage max limit to request ratio")
"""Rejections for a request that is too small, in the wording of LimitRange."""

_OF_LIMIT_RANGE = (" per Container is ", " per Pod is ")
"""Parts of all rejections by a LimitRange, in its wording."""

_BEYOND_BASELINE = (
    IPC_LOCK,
    "host namespaces",
    "hostPath volume",
    "hostPort",
    "hostProcess",
    "non-default capabilities",
    "privileged (",
    "/proc mount",
    "procMount",
    "forbidden sysctls",
    "seLinux",
    "forbidden AppArmor",
)
"""Settings that the level baseline forbids as well, in the wording of Pod Security's checks."""


class ActionRefused(Exception):
    """Error of an action that the API server rejects; the pass ends and the job's conditions say why."""

    def __init__(self, reason: Reason, message: str, *, lasting: bool = False) -> None:
        """`lasting`: only a change by a user or administrator can help."""
        message = one_line(message)
        super().__init__(message)
        self.problem = Problem(reason=str(reason), message=message, lasting=lasting)

    @property
    def may_exist(self) -> bool:
        """Return whether the object may exist in spite of the rejection: quotas are checked before the
        storage, and a full quota also rejects what exists already."""
        return self.problem.reason == Reason.QUOTA_EXCEEDED


def rejection_of(error: Forbidden, item: Json) -> ActionRefused:
    """Return the error for a rejection by the API server's own admission, with a way out. Its text is cut to
    begin with the cause: the pod that is rejected first differs from pass to pass."""
    message = str(error)
    if any(text in message for text in _DEMANDS_DISK):
        message += (
            ". Workers request none of the node's disk, except for spec.nvme: remove ephemeral-storage from "
            "min and maxLimitRequestRatio of the namespace's LimitRange"
        )
    elif "ephemeral-storage" in message:
        message += ". The limit is spec.scratch.ephemeralStorage: lower it to what the namespace allows"
    elif any(text in message for text in _OF_LIMIT_RANGE):
        message += (
            ". Create the job again with other spec.resources (of other containers in spec.podTemplate), or "
            "change the namespace's LimitRange"
        )
    message += "".join(f". {way_out}" for cause, way_out in _WAYS_OUT if cause in message)
    if _EXCEEDED in message:
        return ActionRefused(Reason.QUOTA_EXCEEDED, message[message.index(_EXCEEDED) :])
    if "violates PodSecurity" not in message:
        lasting = not any(text in message for text in _PASSING)
        return ActionRefused(Reason.API_REFUSED, message, lasting=lasting)
    way_out = "Remove the named settings from the job, or allow them in the namespace"
    if IPC_LOCK in message:
        way_out = (
            "spec.resources.rdma needs IPC_LOCK, which only the level privileged allows. Create the job "
            "again without it, or allow it in the namespace"
        )
    violation, namespace = message[message.index("violates PodSecurity") :], item["metadata"]["namespace"]
    label = f"pod-security.kubernetes.io/enforce={_least_level(violation)}"
    command = f"kubectl label namespace {namespace} {label} --overwrite"
    return ActionRefused(Reason.POD_SECURITY, f"{violation}. {way_out}: {command}", lasting=True)


def _least_level(violation: str) -> str:
    """Return the strictest level that admits the pods which this message rejects."""
    is_restricted = violation.startswith('violates PodSecurity "restricted')
    return (
        "baseline"
        if is_restricted and not any(word in violation for word in _BEYOND_BASELINE)
        else "privileged"
    )


def name_taken(item: Json) -> ActionRefused:
    meta, kind = item["metadata"], item.get("kind") or "object"
    labels = meta.get("labels") or {}
    name, uid = labels.get(LABEL_JOB), labels.get(LABEL_JOB_UID)
    if name and uid and not meta.get("ownerReferences"):
        # `kubectl delete --cascade=orphan` leaves such objects. Deleting a NetworkPolicy exposes the pods
        # that it protects.
        message = (
            f"{kind} {meta['name']} is left over from an earlier job {name} (uid {uid}), whose pods may "
            f"still run: end them (kubectl delete pods -l {LABEL_JOB_UID}={uid}), then delete it"
        )
        return ActionRefused(Reason.NAME_TAKEN, message, lasting=True)
    leaving = " and is being deleted" if meta.get("deletionTimestamp") else "; delete it or rename the job"
    message = f"{kind} {meta['name']} belongs to another owner{leaving}"
    return ActionRefused(Reason.NAME_TAKEN, message, lasting=not meta.get("deletionTimestamp"))


def altered(sent: Json, stored: Json, *, is_owned: bool) -> ActionRefused | None:
    """Return the error for a pod that was stored without what the operator finds its pods by; None if it has
    all of it. Such a pod would be created again and again, as the operator does not see it."""
    wanted, found = (item["metadata"].get("labels") or {} for item in (sent, stored))
    lost = [name for name in wanted if name.startswith(f"{GROUP}/") and found.get(name) != wanted[name]]
    if not is_owned:
        lost.append("ownerReferences")
    if not lost:
        return None
    message = (
        f"Pod {sent['metadata']['name']} has lost {', '.join(lost)}, by which the operator finds it: a "
        "webhook, a policy or a user changed it. Exempt the job's pods from that, then delete the pod"
    )
    return ActionRefused(Reason.API_REFUSED, message, lasting=True)
