"""Release of partial allocations: an attempt that holds a part of its resources and is refused the rest ends.

Two jobs that each hold half of a quota, or of the nodes, would wait for each other forever, with or without
gang scheduling. So all pods of the attempt are deleted, and the next attempt starts after a hold-off that
grows and differs from job to job. This is not the job's fault: no budget is charged, and no restart is
counted.

An attempt holds pods while the API server rejects others (each counts in the quota, with or without a node),
and nodes while there is none for other pods. An attempt of which no pod has a node holds no node: it is left
to the scheduler and the cluster's autoscaler. In a Kueue queue, waitForPodsReady decides.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from zlib import crc32

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.operator.api import Phase
from zerotrain.operator.api.status import GivenBack, Shortage
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import queueing, resizing, start_up
from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.draft import Draft, stored
from zerotrain.operator.reconcile.pods import WorkerState

FIRST_HOLD_OFF_S = 15.0
"""Seconds of the first hold-off. It is longer than kube-scheduler waits before it retries a pod that it could
not schedule, so that jobs that keep waiting get what was released."""

RETRIES = 6
"""Minimum number of tries of a rejected creation before the attempt ends."""

_STARTING = frozenset({Phase.PENDING, Phase.STARTING})
_OVER = frozenset({Phase.RUNNING, Phase.SUSPENDED, Phase.COMPLETED, Phase.FAILED})


def reason(draft: Draft, view: AttemptView) -> str | None:
    """Return why the attempt has to end; None while it holds nothing, lacks nothing, or may still succeed."""
    if draft.status.phase not in _STARTING:
        return None
    lack = _lack(draft, view)
    if lack is not None and _gave_up(view):
        return f"{lack[1]}; the others timed out in the rendezvous (exit code 82)"
    if lack is None or queueing.in_queue(draft):
        if draft.status.shortage is not None and not view.count(WorkerState.ABSENT):
            draft.set(shortage=None)
        return None
    shortage = draft.status.shortage
    if shortage is None or shortage.reason != lack[0]:
        shortage = Shortage(since=draft.stamp, reason=lack[0])
        draft.set(shortage=shortage)
    due, limit_s = _due(draft, shortage)
    if not draft.is_due(due):
        if view.count(WorkerState.ABSENT):
            # Other jobs may release resources at any moment, and no event reports it.
            draft.wake(draft.now + timedelta(seconds=draft.observed.limits.refused_creation_s / RETRIES))
        return None
    return f"for {limit_s:.0f} s {lack[1]}"


def conclude(draft: Draft, why: str) -> None:
    """End the attempt; another one starts after the hold-off."""
    before, attempt = draft.status.given_back, draft.status.attempt
    given = GivenBack(times=(before.times if before is not None else 0) + 1, message=stored(why))
    hold_off = timedelta(seconds=_hold_off_s(draft, given.times))
    draft.set(
        phase=Phase.RESTARTING,
        next_attempt_time=draft.now + hold_off,
        shortage=None,
        given_back=given,
        start_time=None,
    )
    message = f"attempt {attempt} releases its resources: {why}; attempt {attempt + 1} starts"
    draft.emit(Reason.GAVE_BACK, f"{message} in {hold_off.total_seconds():.0f} s", warning=True)


def waits_for_older(draft: Draft) -> bool:
    """Return whether a job that released its resources gives an older job of its namespace time to start."""
    if draft.status.given_back is None or draft.observed.older_in_shortage is None:
        return False
    draft.wake(draft.now + timedelta(seconds=draft.observed.limits.refused_creation_s / RETRIES))
    return True


def settle(draft: Draft) -> None:
    """Clear the fields of status that are over, at the end of a pass."""
    if draft.status.shortage is not None and draft.status.phase not in _STARTING:
        draft.set(shortage=None)
    if draft.status.given_back is not None and draft.status.phase in _OVER:
        draft.set(given_back=None)


def _lack(draft: Draft, view: AttemptView) -> tuple[str, str] | None:
    """Return reason and message of what the attempt lacks while it holds something; None otherwise."""
    if absent := view.count(WorkerState.ABSENT):
        problem, known = draft.observed.problem, draft.status.shortage
        if not view.present or (problem is None and known is None):
            return None
        reason = problem.reason if problem is not None else known.reason if known is not None else ""
        details = f": {problem.message}" if problem is not None else ""
        return reason, f"{absent} of {len(view.workers)} pods are refused{details}"
    unplaced = [pod for pod in view.present if not (pod.ended or pod.scheduled or pod.node)]
    if not unplaced or not any(pod.scheduled or pod.node for pod in view.present):
        return None
    if not start_up.refused_pods(view) and not _is_late(draft):
        return None
    first = min(unplaced, key=lambda pod: (pod.unscheduled_reason is None, pod.index))
    details = first.unscheduled_reason or "the scheduler has not placed it"
    counted = f"{len(unplaced)} of {len(view.workers)} pods have no node"
    return Reason.UNSCHEDULABLE, f"{counted}: worker {first.index} (pod {first.name}): {details}"


def _is_late(draft: Draft) -> bool:
    """Return whether pods that the scheduler has not rejected have waited for too long."""
    began = draft.status.attempt_start_time or draft.now
    return draft.is_due(began + timedelta(seconds=_node_limit_s(draft)))


def _gave_up(view: AttemptView) -> bool:
    """Return whether ranks with resources waited for the rest in vain.

    A pod that has a node and reports why its program does not start is to blame instead of the rest.
    """
    ended = view.pods(WorkerState.FAILED)
    if not ended or any(pod.exit_code != ExitCode.RENDEZVOUS_TIMEOUT for pod in ended):
        return False
    return not any(pod.waiting for pod in view.pods(WorkerState.PENDING) if pod.scheduled or pod.node)


def _due(draft: Draft, shortage: Shortage) -> tuple[datetime, float]:
    """Return the time at which the attempt releases its resources, and the limit in seconds.

    The oldest job of a namespace comes last: what the others release may be all that it lacks.
    """
    limits = draft.observed.limits
    limit_s = _node_limit_s(draft) if shortage.reason == Reason.UNSCHEDULABLE else limits.refused_creation_s
    if draft.observed.older_in_shortage is None:
        limit_s += limits.refused_creation_s
    due = shortage.since + timedelta(seconds=limit_s)
    # An elastic job continues with fewer workers instead, if it can.
    smaller = resizing.decided_by(draft, draft.status.attempt_start_time or draft.now)
    return (due if smaller is None else max(due, smaller)), limit_s


def _node_limit_s(draft: Draft) -> float:
    own = draft.job.spec.run_policy.start_deadline_seconds
    return draft.observed.limits.start_deadline_s if own is None else own


def _hold_off_s(draft: Draft, times: int) -> float:
    """Return the hold-off in seconds; half of it varies by job and attempt, so that two jobs do not collide
    again."""
    most_s = draft.observed.limits.max_hold_off_s
    whole_s = min(FIRST_HOLD_OFF_S * 2.0 ** min(times - 1, 10), most_s)
    chance = crc32(f"{draft.job.identity.uid}/{draft.status.attempt}".encode()) / 2**32
    return whole_s * (1 + chance) / 2
