"""Gangs of the operator's own count of which not all was bound.

Between the count and the binding somebody else may take the room. Then the bound part holds nodes that it
cannot use, and two such jobs wait for each other for ever. So the attempt gives its nodes back, at nobody's
cost, and asks for room anew: in the order of the jobs only one of them is let in.

So does one that holds no node and may not use all that there are: what it was to avoid when it was let in,
and the value of the topology key that all were to go to, stand in its pods, whatever becomes free elsewhere.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from zerotrain.operator.api import AttemptShape
from zerotrain.operator.constants import Reason
from zerotrain.operator.failure_policy import MAX_HOLD_OFF_S
from zerotrain.operator.reconcile.attempts import AttemptView, Fate, Worker
from zerotrain.operator.reconcile.draft import Draft, few
from zerotrain.operator.resources.gang import OPERATOR

PATIENCE = timedelta(seconds=60)
"""So long a worker may be without a node beside bound ones, since the scheduler said that there is none."""

IN_A_ROW = timedelta(seconds=MAX_HOLD_OFF_S) + PATIENCE
"""An attempt that begins at most so long after one that ended half bound goes on with the same wait for
nodes: the longest hold-off, and time for pods to end, to be made and to be looked at."""


def told(draft: Draft, view: AttemptView) -> str | None:
    """Why the attempt has to end; None while it holds all nodes, or may hope still."""
    shape = draft.status.shape
    if shape is None or shape.gang != OPERATOR or not view.count(Fate.PENDING):
        return None
    due, where = split_at(view), ""
    if due is None and (where := _confined(draft, shape)):
        due = _nowhere_at(view)
    if due is None:
        return None
    if draft.now < due:
        draft.wake(due)
        return None
    refused = [pod for pod in view.present if pod.refused_seen_at is not None and not pod.ended]
    first = min(refused, key=lambda pod: pod.index)
    counted = f"{len(refused)} of {len(view.workers)} workers found no node within {PATIENCE.seconds} s"
    return f"{counted}{where}: worker {first.index} (pod {first.name}): {first.unscheduled_reason}"


def _confined(draft: Draft, shape: AttemptShape) -> str:
    """To be added to the message: where alone its pods may go, for reasons of the moment at which it was let
    in. Empty if anywhere."""
    scheduling = draft.job.spec.scheduling
    key = scheduling.topology_key if scheduling is not None else None
    parts = []
    if key is not None and key in shape.node_selector:
        parts.append(f" with {key}={shape.node_selector[key]}")
    if shape.avoided_nodes:
        parts.append(f" without {few(shape.avoided_nodes)}")
    return "".join(parts)


def _nowhere_at(view: AttemptView) -> datetime | None:
    """From when on it stands that the scheduler has no node for any worker."""
    refusals = [pod.refused_seen_at for pod in view.present if not pod.ended]
    known = [at for at in refusals if at is not None]
    return max(known) + PATIENCE if known and len(known) == len(refusals) else None


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
    may those that are not made yet: whatever keeps them from it, it is not the scheduler. Where it refuses
    every one, it does not say how many it would place: sizes are tried one by one."""

    def may_be(worker: Worker) -> bool:
        if worker.pod is None:
            return worker.fate is Fate.ABSENT
        return worker.pod.refused_seen_at is None

    return sum(1 for worker in view.workers if may_be(worker)) or len(view.workers) - 1


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
