"""Pods that no scheduler reports on: the scheduler that the job names may not run in the cluster.

A scheduler gives a pod a node within seconds, or writes why it has none. Without a scheduler nothing happens
to the pod, and nothing else says so: the API server accepts every name.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.pods import PodView, WorkerState
from zerotrain.operator.reconcile.start_up import report_first
from zerotrain.operator.resources.gang import scheduler_name

PATIENCE = timedelta(minutes=2)
"""Time after which a scheduler counts as missing. One with thousands of new pods takes a minute."""


def ignored(draft: Draft, view: AttemptView) -> Callable[[PodView], str | None]:
    """Return a function that says of a pod which scheduler should have reported on it, and what to do; None
    while it may."""
    due = _due(view)
    text = _text(draft) if due is not None and draft.now >= due else None
    return lambda pod: text if pod.ignored_seen_at is not None else None


def report_ignored(draft: Draft, view: AttemptView) -> None:
    """Emit one event when a scheduler begins to count as missing."""
    due = _due(view)
    if due is not None and due > draft.now:
        draft.wake(due)
    report_first(draft, list(view.present), Reason.SCHEDULER_MISSING, ignored(draft, view))


def _text(draft: Draft) -> str:
    shape = draft.status.shape
    name = scheduler_name(draft.job.spec.scheduling, shape.gang if shape is not None else "")
    if name is None:
        return "no scheduler has reported on it: does the cluster's default scheduler run?"
    return (
        f"no scheduler has reported on it: does {name} run? Otherwise change spec.scheduling.schedulerName "
        "or gang while spec.suspend is true"
    )


def _due(view: AttemptView) -> datetime | None:
    """Return when the scheduler counts as missing. A scheduler of gangs waits until all pods exist."""
    times = [pod.ignored_seen_at for pod in view.present if pod.ignored_seen_at is not None]
    return max(times) + PATIENCE if times and not view.count(WorkerState.ABSENT) else None
