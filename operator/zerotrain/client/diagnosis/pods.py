"""Advice on pods that are rejected, do not start, or are not deleted."""

from __future__ import annotations

import re
from collections.abc import Iterator

from zerotrain.client.diagnosis.case import Advice, Case

LATE_S = 60.0
"""Seconds after which a pod that has a node and has not started is reported."""

_NAME = re.compile(r"[A-Z][A-Za-z]{2,62}/[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_FAILED_STARTS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox"})
"""Event reasons by which a kubelet reports what keeps a pod from starting."""


def refused(case: Case, reasons: set[str]) -> Iterator[Advice]:
    """Advise on objects that the API server rejects."""
    if "QuotaExceeded" in reasons:
        yield Advice(
            text="A quota of the namespace has no capacity left for the job's objects: raise it, delete "
            "something else, or request less.",
            command=case.kubectl("describe resourcequota"),
        )
    if "ApiRefused" in reasons:
        yield Advice(
            text="The API server rejects the job's objects: correct the job, or allow in the namespace what "
            "the message names.",
            command=case.kubectl(f"edit ztj {case.job.name}"),
        )
    found = case.job.condition("Reconciling")
    if "NameTaken" in reasons and found is not None:
        kind, name, *_ = (*found.message.split(" "), "", "")
        if _NAME.fullmatch(f"{kind}/{name}") and " is left over from an earlier job " in found.message:
            yield Advice(
                text=f"{kind} {name} remains from an earlier job of this name: check whether its pods "
                "still run before you delete it.",
                command=case.kubectl(f"get pods -l zerotrain.dev/job={case.job.name} --show-labels"),
            )
        elif _NAME.fullmatch(f"{kind}/{name}"):
            # The owner decides whether it may be deleted: no command here deletes it unseen.
            yield Advice(
                text=f"{kind} {name} has the name that the job needs: find out who owns it, then delete "
                "it or rename the job.",
                command=case.kubectl(f"get {kind.lower()} {name} -o yaml"),
            )


def late(case: Case) -> Iterator[Advice]:
    """Advise on pods that have a node and do not start, in the kubelet's words."""
    if case.job.phase not in ("Pending", "Starting"):
        return
    waiting = {pod.name: pod for pod in case.pods if pod.attempt == case.job.attempt and not pod.started}
    pod_events = [event for event in case.events if event.kind == "Pod" and event.name in waiting]
    failed = next((event for event in reversed(pod_events) if event.reason in _FAILED_STARTS), None)
    if failed is not None:
        yield Advice(
            text=f"Pod {failed.name} cannot start: {failed.message}. Create what is missing, or correct the "
            "reference; the kubelet tries again by itself.",
            command=case.kubectl(f"describe pod {failed.name}"),
        )
        return
    for pod in waiting.values():
        age_s = (case.now - pod.created).total_seconds() if pod.created is not None else 0.0
        if pod.node and not pod.deleting and pod.exit_code is None and age_s > LATE_S:
            yield Advice(
                text=f"Pod {pod.name} has a node and has not started: see what its kubelet reports.",
                command=case.kubectl(f"describe pod {pod.name}"),
            )
            return


def held(case: Case) -> Iterator[Advice]:
    """Advise on pods that are not deleted because of a finalizer."""
    for pod in case.pods:
        if pod.deleting and pod.finalizers:
            yield Advice(
                text=f"Pod {pod.name} is held by finalizer {', '.join(pod.finalizers)}: find out why its "
                "owner does not remove it. By hand only if that owner is gone for good.",
                command=case.kubectl(
                    f'patch pod {pod.name} --type=merge -p \'{{"metadata":{{"finalizers":null}}}}\''
                ),
            )
            return


def unstarted(case: Case) -> Iterator[Advice]:
    """Advise on pods that have a node and whose container does not start."""
    words = {pod.reason for pod in case.pods if pod.attempt == case.job.attempt and not pod.started}
    first = next((pod.name for pod in case.pods if pod.reason in words and not pod.started), "")
    if words & {"ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName"}:
        yield Advice(
            text=f"The image {case.job.spec.get('image')} cannot be pulled: correct its name, or add "
            "podTemplate.imagePullSecrets.",
            command=case.kubectl(f"describe pod {first}"),
        )
    elif words & {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}:
        yield Advice(
            text="A volume, ConfigMap or command of the pod is wrong.",
            command=case.kubectl(f"describe pod {first}"),
        )
    if any("unbound" in pod.message or "persistentvolumeclaim" in pod.message for pod in case.pods):
        yield Advice(
            text="A claim of the job does not exist or is not bound.",
            command=case.kubectl("get persistentvolumeclaims"),
        )
