"""Pods that have a node but do not start, and pods whose containers have ended but which are not removed.

The operator may not read events, in which the kubelet reports what fails. It reports how far the pod is and
what it needs for the next step. `zerotrain describe` shows the kubelet's messages next to that.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from zerotrain.operator.constants import ConditionType, Reason
from zerotrain.operator.reconcile import egress
from zerotrain.operator.reconcile.attempts import AttemptView, WorkerState
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.observe import PodView, Stage

PATIENCE = {
    Stage.MOUNTING: timedelta(seconds=30),
    Stage.PULLING: timedelta(minutes=5),
    Stage.INITIALIZING: timedelta(minutes=5),
}
"""Time that each stage may take.

A kubelet mounts a volume in seconds and pulls an image in minutes. How long an init container may run is not
known, but one that waits for packets which a policy drops reports nothing itself.
"""


def starts_late(draft: Draft, pod: PodView) -> str | None:
    """Return what the pod is waiting for if it takes too long; None otherwise."""
    due = _due(pod)
    if due is None or draft.now < due or pod.bound_at is None or pod.stage is Stage.INITIALIZING:
        return None
    since = f"since {pod.bound_at:%H:%M:%S} UTC the kubelet of node {pod.node}"
    if pod.stage is Stage.PULLING:
        return f"{since} has not started its containers: it may still pull an image"
    needs = f"; it needs {pod.needs}: does each exist in the namespace?" if pod.needs else ""
    return f"{since} has not set up its volumes or its network{needs}"


def runs_before(pod: PodView) -> str | None:
    """Return which init container runs; None without one."""
    return f"init container {pod.needs} runs" if pod.stage is Stage.INITIALIZING else None


def runs_long(draft: Draft, pod: PodView) -> str | None:
    """Return the init container that has run for minutes, and what it may wait for; None without one."""
    due, before = _due(pod), runs_before(pod)
    if before is None or due is None or draft.now < due:
        return None
    since = f"{before}, and the pod has had its node since {pod.bound_at:%H:%M:%S} UTC"
    return f"{since}. If it waits for the network: {egress.way_out(draft)}"


def report_slow_start(draft: Draft, view: AttemptView) -> None:
    """Emit one event when a start begins to hang, or if a container cannot be started."""
    pods = [
        worker.pod
        for worker in view.workers
        if worker.state is WorkerState.PENDING and worker.pod is not None
    ]
    for pod in pods:
        due = _due(pod)
        if due is not None and due > draft.now:
            draft.wake(due)
    _report_first(draft, pods, Reason.CONTAINER_WAITING, lambda pod: pod.waiting)
    _report_first(draft, pods, Reason.POD_NOT_STARTING, lambda pod: starts_late(draft, pod))
    _report_first(draft, pods, Reason.INIT_CONTAINER_RUNS, lambda pod: runs_long(draft, pod), warning=False)


def held(draft: Draft, pod: PodView) -> str | None:
    """Return the finalizers that keep the pod, if nothing else does; None otherwise."""
    due = _held_from(draft, pod)
    if due is None or draft.now < due:
        return None
    names = ", ".join(pod.finalizers)
    return (
        f"pod {pod.name} cannot be removed: finalizer {names} holds it; no other attempt starts until the "
        "finalizer's owner removes that"
    )


def first_held(draft: Draft) -> str | None:
    """Return the text of `held` for the first such pod, with the number of further ones; None without one."""
    found = [text for pod in draft.observed.pods if (text := held(draft, pod)) is not None]
    more = f" (and {len(found) - 1} more pods)" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else None


def report_held(draft: Draft, pods: list[PodView]) -> None:
    """Emit one event when finalizers begin to hold a pod."""
    for pod in pods:
        due = _held_from(draft, pod)
        if due is not None and due > draft.now:
            draft.wake(due)
    _report_first(draft, pods, Reason.POD_HELD, lambda pod: held(draft, pod))


def _due(pod: PodView) -> datetime | None:
    patience = PATIENCE.get(pod.stage) if pod.stage is not None else None
    return pod.bound_at + patience if patience is not None and pod.bound_at is not None else None


def _held_from(draft: Draft, pod: PodView) -> datetime | None:
    if not pod.finalizers or pod.deletion_at is None:
        return None
    timeout = timedelta(seconds=draft.job.spec.run_policy.termination_timeout_seconds)
    return pod.deletion_at if pod.is_over else pod.deletion_at + timeout


def _report_first(
    draft: Draft,
    pods: list[PodView],
    reason: Reason,
    text: Callable[[PodView], str | None],
    *,
    warning: bool = True,
) -> None:
    before = {item.type: item for item in draft.job.status.conditions}.get(str(ConditionType.RECONCILING))
    if before is not None and before.reason == reason:
        return  # an event was emitted when it began
    pod = min((pod for pod in pods if text(pod)), key=lambda pod: pod.index, default=None)
    if pod is not None:
        place = f"worker {pod.index} (pod {pod.name})"
        draft.emit(reason, f"attempt {pod.attempt}: {place}: {text(pod)}", warning=warning)
