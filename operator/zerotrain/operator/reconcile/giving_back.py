"""Attempts that hold a part of what they need and are refused the rest give back what they hold.

Two jobs of which each has half of a quota, or of the nodes, wait for each other for ever, whatever the gang.
So all pods of the attempt go, and the next one comes after a hold-off that grows and differs from job to job.
That is nobody's fault: no budget is charged, and no restart is counted.

What is held are pods that exist while the API server refuses others (each counts in the quota, with or
without a node), and nodes while there is none for other pods. An attempt of which no pod has a node holds no
node: it is left to the scheduler and the cluster's autoscaler. In a queue of Kueue, its waitForPodsReady
decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from zlib import crc32

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.operator.api import Phase
from zerotrain.operator.api.status import GivenBack, Shortage
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import queueing, sizing, unscheduled
from zerotrain.operator.reconcile.attempts import AttemptView, Fate, Worker
from zerotrain.operator.reconcile.draft import Draft, stored

FIRST_HOLD_OFF_S = 15.0
"""Longer than kube-scheduler waits before it looks again at a pod that it refused: who goes on waiting gets
what was given back."""

RETRIES = 6
"""Times that a refused creation is tried at least before the attempt gives back."""

_STARTING = frozenset({Phase.PENDING, Phase.STARTING})
_OVER = frozenset({Phase.RUNNING, Phase.SUSPENDED, Phase.COMPLETED, Phase.FAILED})


def reason(draft: Draft, view: AttemptView) -> str | None:
    """Why the attempt has to end; None while it holds nothing, or lacks nothing, or may hope still."""
    if draft.status.phase not in _STARTING:
        return None
    lack = _lack(draft, view)
    if lack is not None and _gave_up(view):
        return f"{lack[1]}; the others gave up the rendezvous (exit code 82)"
    if lack is None or queueing.in_queue(draft):
        if draft.status.shortage is not None and not view.count(Fate.ABSENT):
            draft.set(shortage=None)
        return None
    shortage = draft.status.shortage
    if shortage is None or shortage.reason != lack[0]:
        shortage = Shortage(since=draft.stamp, reason=lack[0])
        draft.set(shortage=shortage)
    due, limit_s = _due(draft, shortage)
    if draft.now < due:
        draft.wake(due)
        if view.count(Fate.ABSENT):
            # Whoever gives back makes room at any moment, and nothing tells of it.
            draft.wake(draft.now + timedelta(seconds=draft.observed.limits.refused_creation_s / RETRIES))
        return None
    return f"for {limit_s:.0f} s {lack[1]}"


def conclude(draft: Draft, why: str) -> None:
    """The attempt is over; another one comes after the hold-off."""
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
    message = f"attempt {attempt} gives back what it holds: {why}; attempt {attempt + 1} starts"
    draft.emit(Reason.GAVE_BACK, f"{message} in {hold_off.total_seconds():.0f} s", warning=True)


def waits_for_older(draft: Draft) -> bool:
    """Whether a job that gave back leaves an older one of its namespace the time to get what it lacks."""
    if draft.status.given_back is None or draft.observed.older_in_shortage is None:
        return False
    draft.wake(draft.now + timedelta(seconds=draft.observed.limits.refused_creation_s / RETRIES))
    return True


def settle(draft: Draft) -> None:
    """At the end of a pass: what is over is forgotten."""
    if draft.status.shortage is not None and draft.status.phase not in _STARTING:
        draft.set(shortage=None)
    if draft.status.given_back is not None and draft.status.phase in _OVER:
        draft.set(given_back=None)


def _lack(draft: Draft, view: AttemptView) -> tuple[str, str] | None:
    """Reason and message of what the attempt is refused beside what it holds."""
    live = [pod for pod in view.present if not pod.ended]
    if absent := view.count(Fate.ABSENT):
        problem, known = draft.observed.problem, draft.status.shortage
        if not view.present or (problem is None and known is None):
            return None
        reason = problem.reason if problem is not None else known.reason if known is not None else ""
        said = f": {problem.message}" if problem is not None else ""
        return reason, f"{absent} of {len(view.workers)} pods are refused{said}"
    homeless = [pod for pod in live if not (pod.scheduled or pod.node)]
    if not homeless or not any(pod.scheduled or pod.node for pod in view.present):
        return None
    if not unscheduled.refused(view) and not _is_late(draft):
        return None
    first = min(homeless, key=lambda pod: (pod.unscheduled_reason is None, pod.index))
    said = first.unscheduled_reason or "the scheduler has not placed it"
    counted = f"{len(homeless)} of {len(view.workers)} pods have no node"
    return Reason.UNSCHEDULABLE, f"{counted}: worker {first.index} (pod {first.name}): {said}"


def _is_late(draft: Draft) -> bool:
    """Of pods that nobody has refused: they may wait for their turn, but not for ever."""
    began = draft.status.attempt_start_time or draft.now
    due = began + timedelta(seconds=_node_limit_s(draft))
    if draft.now < due:
        draft.wake(due)
    return draft.now >= due


def _gave_up(view: AttemptView) -> bool:
    """Whether ranks of the part that is held waited for the rest in vain. A pod that has a node and says why
    its program does not start is to blame in the place of the rest."""
    ended = [worker for worker in view.workers if worker.fate is Fate.FAILED]
    if not ended or any(_code(worker) != ExitCode.RENDEZVOUS_TIMEOUT for worker in ended):
        return False
    return not any(worker.pod.waiting for worker in _placed_and_waiting(view) if worker.pod is not None)


def _placed_and_waiting(view: AttemptView) -> Iterator[Worker]:
    for worker in view.workers:
        pod = worker.pod
        if worker.fate is Fate.PENDING and pod is not None and (pod.scheduled or pod.node):
            yield worker


def _code(worker: Worker) -> int | None:
    return worker.pod.exit_code if worker.pod is not None else None


def _due(draft: Draft, shortage: Shortage) -> tuple[datetime, float]:
    """When the attempt gives back, and after how many seconds that is. The oldest job of a namespace comes
    last: what the others give back may be all that it lacks."""
    limits = draft.observed.limits
    limit_s = _node_limit_s(draft) if shortage.reason == Reason.UNSCHEDULABLE else limits.refused_creation_s
    if draft.observed.older_in_shortage is None:
        limit_s += limits.refused_creation_s
    due = shortage.since + timedelta(seconds=limit_s)
    # An elastic job goes on smaller instead, where it can.
    smaller = sizing.decided_by(draft, draft.status.attempt_start_time or draft.now)
    return (due if smaller is None else max(due, smaller)), limit_s


def _node_limit_s(draft: Draft) -> float:
    own = draft.job.spec.run_policy.start_deadline_seconds
    return draft.observed.limits.start_deadline_s if own is None else own


def _hold_off_s(draft: Draft, times: int) -> float:
    """Half of it differs from job to job and from attempt to attempt, so that two do not meet again."""
    most_s = draft.observed.limits.max_hold_off_s
    whole_s = min(FIRST_HOLD_OFF_S * 2.0 ** min(times - 1, 10), most_s)
    chance = crc32(f"{draft.job.identity.uid}/{draft.status.attempt}".encode()) / 2**32
    return whole_s * (1 + chance) / 2
