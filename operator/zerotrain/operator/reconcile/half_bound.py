"""Gangs of the operator's own count of which only a part was bound.

Between the count and the binding somebody else may take the room. Then the bound part holds nodes that it
cannot use, and two such jobs wait for each other for ever. So the attempt gives its nodes back, at nobody's
cost, and asks for room anew: in the order of the jobs only one of them is let in.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from zerotrain.operator.constants import Reason
from zerotrain.operator.failure_policy import MAX_HOLD_OFF_S
from zerotrain.operator.reconcile.attempts import AttemptView, Fate, Worker
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.resources.gang import OPERATOR

PATIENCE = timedelta(seconds=60)
"""So long a worker may be without a node beside bound ones, since the scheduler said that there is none."""

IN_A_ROW = timedelta(seconds=MAX_HOLD_OFF_S) + PATIENCE
"""An attempt that begins at most so long after one that ended half bound goes on with the same wait for
nodes: the longest hold-off, and time for pods to end, to be made and to be looked at."""


def told(draft: Draft, view: AttemptView) -> str | None:
    """Why the attempt has to give its nodes back; None while it holds none, or all, or may hope still."""
    shape = draft.status.shape
    if shape is None or shape.gang != OPERATOR or not view.count(Fate.PENDING):
        return None
    if (due := split_at(view)) is None:
        return None
    if draft.now < due:
        draft.wake(due)
        return None
    refused = [pod for pod in view.present if pod.refused_seen_at is not None and not pod.ended]
    first = min(refused, key=lambda pod: pod.index)
    counted = f"{len(refused)} of {len(view.workers)} workers found no node within {PATIENCE.seconds} s"
    return f"{counted}: worker {first.index} (pod {first.name}): {first.unscheduled_reason}"


def refused_at(view: AttemptView) -> datetime | None:
    """From when on it stands that the scheduler has no node for some worker; None while it says no such
    thing: pods that it has not looked at yet are not refused."""
    live = [pod for pod in view.present if not pod.ended]
    since = min((pod.refused_seen_at for pod in live if pod.refused_seen_at is not None), default=None)
    return None if since is None else since + PATIENCE


def split_at(view: AttemptView) -> datetime | None:
    """From when on it stands that a part of the workers has nodes and the scheduler has none for the others;
    None while it says no such thing."""
    return refused_at(view) if any(pod.scheduled for pod in view.present) else None


def placeable(view: AttemptView) -> int:
    """Workers that have a node or may get one still: the scheduler says nothing, or makes room for them. So
    may those that are not made yet: whatever keeps them from it, it is not the scheduler."""

    def may_be(worker: Worker) -> bool:
        if worker.pod is None:
            return worker.fate is Fate.ABSENT
        return worker.pod.refused_seen_at is None

    return sum(1 for worker in view.workers if may_be(worker))


def waits_since(draft: Draft) -> datetime:
    """When the attempt began, or the first one of those in a row that ended half bound: to the job they are
    one wait for nodes. A suspension or a turn in a queue between two of them begins another: such time says
    nothing of nodes."""
    began, attempt = draft.status.attempt_start_time or draft.now, draft.status.attempt
    for entry in reversed(draft.status.restarts.recent):
        attempt -= 1
        if (entry.attempt, entry.reason) != (attempt, Reason.HALF_BOUND):
            break
        # When an earlier attempt began is not kept: of those, `began` is the latest that it can have been.
        if began > entry.time + IN_A_ROW:
            break
        began = min(began, entry.time - PATIENCE)
    return began
