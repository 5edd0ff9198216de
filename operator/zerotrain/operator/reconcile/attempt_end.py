"""The end of an attempt: the wait for surer evidence, the record in status, the charge to a budget, the
event.

The restart counters in status are totals for users, and the recent restarts for the sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from zerotrain.operator.api import Phase, RestartCause, YieldReason, YieldRequest
from zerotrain.operator.api.failures import FailureAction, FailurePolicy
from zerotrain.operator.api.status import MAX_RECENT_RESTARTS, Restart, Restarts
from zerotrain.operator.constants import Reason
from zerotrain.operator.failure_policy import (
    Decision,
    Evidence,
    FailureClass,
    action_of,
    decide,
    matching_rule,
    still_counts,
)
from zerotrain.operator.reconcile import (
    attempt_checks,
    avoided_nodes,
    hangs,
    next_size,
    records,
)
from zerotrain.operator.reconcile.attempts import (
    MOVED,
    OVER,
    YIELDED,
    AttemptView,
    Failure,
    Worker,
    is_echo,
)
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.job_end import fail
from zerotrain.operator.reconcile.nodes import lost_at
from zerotrain.operator.reconcile.pods import WorkerState
from zerotrain.operator.reconcile.progress import newest_step, unsaved_steps

KEPT_HANGS = 7
"""Number of newest restarts after hangs that are never forgotten.

They double the hold-off, which reaches its maximum with this number, and they double the hang limits, one of
which may be longer than the window.
"""

PLAIN_SETTLE = timedelta(milliseconds=500)
"""Time that a plain failure waits for surer evidence: peers of a killed rank often report first."""

ECHO_SETTLE = timedelta(milliseconds=2500)
"""Time that a failure which looks like a consequence waits for the end that caused it.

A kubelet checks its containers once a second, and another kubelet may just have done so.
"""

SIGN_EVERY = timedelta(seconds=5)
"""Interval of the passes while a failure waits for signs of life of silent nodes."""

SYNC_SETTLE = timedelta(seconds=2)
"""Time after this replica became active in which a missing pod may be one whose peers are just yielding."""


def is_permanent(draft: Draft, failure: Failure) -> bool:
    """Return whether the job ends with this failure, whatever is left of the budgets."""
    rules = draft.job.spec.failure_policy.rules
    return action_of(failure.failure_class, rules, _matching_rule(draft, failure)) is FailureAction.FAIL_JOB


def take_failure(draft: Draft, view: AttemptView, failure: Failure) -> None:
    """Record the failure in status, once no surer evidence can arrive."""
    if failure.due is not None and draft.now < failure.due:
        draft.wake(min(failure.due, draft.now + hangs.STACKS_RETRY))
        return
    settled_at = _settled_at(draft, view, failure)
    if settled_at is not None and draft.now < settled_at:
        draft.wake(min(settled_at, draft.now + SIGN_EVERY))  # no pass is triggered when a worker answers
    else:
        after_failure(draft, failure)


def _settled_at(draft: Draft, view: AttemptView, failure: Failure) -> datetime | None:
    """Return the time until which surer evidence may still arrive; None if waiting cannot make the failure
    clearer."""
    if view.all_in(OVER) or not failure.blames_worker:
        return None
    pod = failure.worker.pod
    if pod is None:
        return draft.observed.synced_at + SYNC_SETTLE if draft.observed.synced_at is not None else None
    if failure.failure_class.evidence < Evidence.UNCLEAR or pod.ended_seen_at is None:
        return None
    settle = ECHO_SETTLE if is_echo(failure) else PLAIN_SETTLE
    return max(pod.ended_seen_at + settle, _silence_ends(draft, view, since=pod.ended_seen_at))


def _silence_ends(draft: Draft, view: AttemptView, *, since: datetime) -> datetime:
    """Return the time at which the first node that became silent counts as lost.

    Only nodes of which no worker has answered since a peer's end are considered: collectives time out sooner
    than the control plane. The result is at most nodeNotReadySeconds after `since`, and `since` itself if
    there is no such node.
    """
    signs = draft.signs()
    holding = {pod.node for pod in view.pods(WorkerState.RUNNING)}
    due = [
        at
        for name, node in draft.observed.nodes.items()
        if name in holding and signs.last_responses.get(name, since) <= since
        if (at := lost_at(node, signs)) is not None
    ]
    limit = since + timedelta(seconds=draft.job.spec.failure_policy.node_not_ready_seconds)
    return min([*due, limit]) if due else since


def after_failure(draft: Draft, failure: Failure) -> None:
    """Record the failure, charge it, and decide between another attempt and the end of the job."""
    decision = _decide(draft, failure.failure_class, rule=_matching_rule(draft, failure))
    message = records.describe(draft, failure)
    if (way_out := attempt_checks.egress_hint(draft, records.texts_of(draft, failure))) is not None:
        message = f"{message}; {way_out}"
    records.record(draft, failure, decision=decision)
    if not decision.restart:
        fail(draft, decision.reason or Reason.PERMANENT_FAILURE, f"{message}; {decision.message}")
        return
    effects = _carry_out(draft, failure, decision.action)
    if decision.rule is not None:
        effects = (f"failurePolicy.rules[{decision.rule}] requires {decision.action}", *effects)
    _restart(draft, failure.failure_class, decision)
    message = "; ".join((message, *effects))
    _announce(draft, failure.failure_class.reason, message, decision, warning=True)


def after_expiry(draft: Draft, names: Sequence[str]) -> None:
    """Start a new attempt, without charge to a budget.

    Pods of the present attempt wait for a node and cannot use one whose exclusion is over.
    """
    draft.set(phase=Phase.RESTARTING, next_attempt_time=None)
    attempt, nodes = draft.status.attempt, ", ".join(names)
    message = f"attempt {attempt} waits for a node and {nodes} may be used again; attempt {attempt + 1} may"
    draft.emit(Reason.EXCLUSION_EXPIRED, message)


def after_yield(draft: Draft, view: AttemptView) -> None:
    """Start another attempt after the ranks stopped though the job was not suspended.

    After a yield a durable checkpoint exists at one step. For a user program that ended with 0 when its pod
    was to go, it is not known what it saved.
    """
    decision = _decide(draft, YIELDED)
    if decision.hold_off_s and (first := _unprovoked(view)) is not None:
        # Programs with other conventions also end with 75; one that does so every time must end the job.
        failure_class = replace(YIELDED, cause=RestartCause.APP)
        message = "ended with code 75 (yielded) although it was not asked to stop, and no step was gained"
        after_failure(draft, Failure(worker=first, failure_class=failure_class, message=message))
        return
    _restart(draft, YIELDED, decision)
    stopped = view.indices(WorkerState.YIELDED, WorkerState.STOPPED)
    names = f"{', '.join(str(index) for index in stopped[:5])}{', ...' if len(stopped) > 5 else ''}"
    message = f"attempt {view.number} yielded (workers {names})"
    if view.count(WorkerState.STOPPED):
        message += (
            "; exit code 0 of a program whose pod was being deleted does not prove that it has finished"
        )
    _announce(draft, YIELDED.reason, message, decision, warning=False)


def _unprovoked(view: AttemptView) -> Worker | None:
    """Return the first worker that yielded, if no worker is known to have been told to stop; None
    otherwise."""
    if any(_was_asked_to_stop(worker, view) for worker in view.workers):
        return None
    return next((worker for worker in view.workers if worker.state is WorkerState.YIELDED), None)


def _was_asked_to_stop(worker: Worker, view: AttemptView) -> bool:
    pod = worker.pod
    if pod is None or all(pod is not item for item in view.present):
        return True  # deleted
    return worker.state is WorkerState.LOST or bool(pod.deletion_at or pod.disruption or pod.pod_reason)


def after_move(draft: Draft, request: YieldRequest) -> None:
    """Start another attempt after the ranks stopped to continue on other nodes, or in another size.

    It starts at once, unless one drain follows another and no step is gained in between.
    """
    attempt, decision = draft.status.attempt, Decision(restart=True)
    if request.reason is YieldReason.DRAIN:
        decision = _decide(draft, MOVED)
        _restart(draft, MOVED, decision)
    else:
        draft.set(phase=Phase.RESTARTING, next_attempt_time=None)
    message = f"attempt {attempt} {'yielded' if request.joined else 'ended before its ranks had joined'}"
    if request.joined and unsaved_steps(draft.status):
        message = f"attempt {attempt} stopped at step {draft.status.progress.step} without saving it"
    _announce(draft, Reason.YIELDED, message, decision, warning=False)


def _carry_out(draft: Draft, failure: Failure, action: FailureAction) -> tuple[str, ...]:
    """Do what the action requires besides the restart, and return its description."""
    if action is FailureAction.SHRINK_AND_RESTART:
        why_not = next_size.shrink(draft, str(failure.failure_class.reason))
        return (f"the number of workers stays: {why_not}",) if why_not is not None else ()
    if action is not FailureAction.REPLACE_NODE_AND_RESTART:
        return ()
    node = failure.worker.pod.node if failure.worker.pod is not None else None
    if node is None:
        return ("there is no node to replace",)
    entry = avoided_nodes.exclude(draft, node, str(failure.failure_class.reason))
    return (f"the job avoids node {node} until {entry.until:%Y-%m-%d %H:%M:%S} UTC",)


def _matching_rule(draft: Draft, failure: Failure) -> int | None:
    rules = draft.job.spec.failure_policy.rules
    if not rules:
        return None
    return matching_rule(
        rules,
        reason=failure.failure_class.reason,
        exit_code=records.exit_code_of(failure),
        ranks=records.suspects_of(draft, failure),
        texts=records.texts_of(draft, failure),
    )


def _decide(draft: Draft, failure_class: FailureClass, rule: int | None = None) -> Decision:
    return decide(
        failure_class,
        draft.status.restarts.recent,
        draft.job.spec.failure_policy,
        step=newest_step(draft.status),
        now=draft.now,
        rule=rule,
    )


def _restart(draft: Draft, failure_class: FailureClass, decision: Decision) -> None:
    entry = Restart(
        time=draft.stamp,
        cause=failure_class.cause,
        attempt=draft.status.attempt,
        reason=str(failure_class.reason),
        step=newest_step(draft.status),
        charged=decision.charged,
    )
    due = draft.now + timedelta(seconds=decision.hold_off_s) if decision.hold_off_s else None
    draft.set(
        phase=Phase.RESTARTING,
        restarts=charge(draft.status.restarts, entry, draft.job.spec.failure_policy, now=draft.now),
        next_attempt_time=due,
    )


def _announce(draft: Draft, reason: Reason, message: str, decision: Decision, *, warning: bool) -> None:
    last = draft.status.checkpoint.last
    source = f"from the checkpoint of step {last.step}" if last is not None else "from the start"
    when = f" in {decision.hold_off_s:.0f} s" if decision.hold_off_s else ""
    draft.emit(
        reason, f"{message}; attempt {draft.status.attempt + 1} continues {source}{when}", warning=warning
    )


def charge(restarts: Restarts, restart: Restart, policy: FailurePolicy, *, now: datetime) -> Restarts:
    """Add one restart and remove those that no longer count.

    Restarts that are allowed once per job are kept for good, because removing them would allow a second one.
    The newest restarts after hangs are kept as well.
    """
    counted = still_counts(restarts.recent, policy, step=restart.step, now=now)
    hangs = [item for item in restarts.recent if item.reason == Reason.HANG][-KEPT_HANGS:]
    kept = tuple(
        item
        for item, counts in zip(restarts.recent, counted, strict=True)
        if counts or item.reason == Reason.SPILL_INTEGRITY or item in hangs
    )
    field = restart.cause.value if restart.charged else "uncharged"
    count = {field: getattr(restarts, field) + 1, "total": restarts.total + 1}
    return restarts.model_copy(update={**count, "recent": (*kept, restart)[-MAX_RECENT_RESTARTS:]})
