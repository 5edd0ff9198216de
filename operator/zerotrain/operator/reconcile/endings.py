"""How an attempt or the job ends: the record in status, the charge to a budget, the one event."""

from __future__ import annotations

from datetime import datetime, timedelta

from zerotrain.contract.exit_codes import meaning_of
from zerotrain.operator.api import Failure as FailureRecord
from zerotrain.operator.api import Phase, RestartCause, YieldReason
from zerotrain.operator.api.status import MAX_FAILURES, Restart
from zerotrain.operator.constants import Reason
from zerotrain.operator.failure_policy import Budget, Decision, Evidence, Judgement, Verdict, decide
from zerotrain.operator.reconcile.attempts import OVER, YIELDED_JUDGEMENT, AttemptView, Failure, Fate
from zerotrain.operator.reconcile.budgets import charge, history_of
from zerotrain.operator.reconcile.draft import Draft, cut
from zerotrain.operator.reconcile.progress import newest_step


def complete(draft: Draft) -> None:
    draft.set(phase=Phase.COMPLETED, completion_time=draft.stamp)
    progress = draft.status.progress
    steps = f" after {progress.step} steps" if progress.step else ""
    draft.emit(Reason.COMPLETED, f"attempt {draft.status.attempt} completed the job{steps}")


def fail(draft: Draft, reason: Reason, message: str) -> None:
    draft.set(phase=Phase.FAILED, completion_time=draft.stamp, next_attempt_time=None)
    draft.failed = (reason, message)
    draft.emit(reason, message, warning=True)


def is_permanent(failure: Failure) -> bool:
    """Whether the user must change something before any further attempt."""
    return failure.judgement.verdict is Verdict.FAIL


def settled_at(
    draft: Draft, view: AttemptView, failure: Failure, *, echo: timedelta, sync: timedelta
) -> datetime | None:
    """Until when surer evidence may still come in; None when this failure is as clear as it gets."""
    if view.all_in(OVER):
        return None
    pod = failure.worker.pod
    if pod is None:
        return draft.observed.synced_at + sync if draft.observed.synced_at is not None else None
    if failure.judgement.evidence < Evidence.UNCLEAR or pod.ended_seen_at is None:
        return None
    return pod.ended_seen_at + echo


def after_failure(draft: Draft, failure: Failure) -> None:
    """Record the failure, charge it, and decide between another attempt and the end of the job."""
    decision = _decide(draft, failure.judgement)
    told = _describe(draft, failure)
    cause = failure.judgement.cause if decision.restart else None
    record(draft, failure, cause=cause)
    if decision.restart:
        _restart(draft, failure.judgement, decision)
        _announce(draft, failure.judgement.reason, told, decision, warning=True)
        return
    fail(draft, decision.reason or Reason.PERMANENT_FAILURE, f"{told}; {decision.message}")


def after_yield(draft: Draft, view: AttemptView) -> None:
    """The ranks stopped at one step with a durable checkpoint, though nobody suspended the job: go on."""
    decision = _decide(draft, YIELDED_JUDGEMENT)
    _restart(draft, YIELDED_JUDGEMENT, decision)
    stopped = ", ".join(str(index) for index in view.indices(Fate.YIELDED)[:5])
    told = f"attempt {view.number} yielded (workers {stopped}{', ...' if len(view.workers) > 5 else ''})"
    _announce(draft, YIELDED_JUDGEMENT.reason, told, decision, warning=False)


def after_move(draft: Draft, reason: YieldReason) -> None:
    """The ranks stopped so that all of them can go on elsewhere, or in another size: at once."""
    step, attempt = newest_step(draft.status), draft.status.attempt
    draft.set(phase=Phase.RESTARTING, next_attempt_time=None)
    if reason is YieldReason.DRAIN:
        entry = Restart(
            time=draft.stamp,
            cause=RestartCause.PREEMPTION,
            attempt=attempt,
            reason=str(Reason.DRAINING),
            step=step,
        )
        restarts = charge(draft.status.restarts, entry, budget=_budget(draft), now=draft.now)
        draft.set(restarts=restarts)
    _announce(draft, Reason.YIELDED, f"attempt {attempt} yielded", Decision(restart=True), warning=False)


def record(draft: Draft, failure: Failure, *, cause: RestartCause | None) -> None:
    """Put the failure on top of status.failures, once per attempt."""
    if any(item.attempt == draft.status.attempt for item in draft.status.failures):
        return
    pod = failure.worker.pod
    end = pod.termination if pod is not None else None
    entry = FailureRecord(
        attempt=draft.status.attempt,
        time=draft.stamp,
        pod=pod.name if pod is not None else "",
        rank=_rank(draft, failure),
        node=(pod.node or "") if pod is not None else "",
        exit_code=pod.exit_code if pod is not None else None,
        reason=str(failure.judgement.reason),
        cause=cause,
        message=cut(_cause_text(failure)),
        last_line=cut((end.last_line or "") if end is not None else ""),
        stacks=failure.stacks,
        step=newest_step(draft.status),
    )
    draft.set(failures=(entry, *draft.status.failures)[:MAX_FAILURES])


def _decide(draft: Draft, judgement: Judgement) -> Decision:
    return decide(
        judgement,
        history_of(draft.status.restarts),
        _budget(draft),
        step=newest_step(draft.status),
        now=draft.now,
    )


def _budget(draft: Draft) -> Budget:
    policy = draft.job.spec.failure_policy
    return Budget(max_restarts=policy.max_restarts, window_s=policy.window_seconds)


def _restart(draft: Draft, judgement: Judgement, decision: Decision) -> None:
    entry = Restart(
        time=draft.stamp,
        cause=judgement.cause,
        attempt=draft.status.attempt,
        reason=str(judgement.reason),
        step=newest_step(draft.status),
    )
    due = draft.now + timedelta(seconds=decision.hold_off_s) if decision.hold_off_s else None
    draft.set(
        phase=Phase.RESTARTING,
        restarts=charge(draft.status.restarts, entry, budget=_budget(draft), now=draft.now),
        next_attempt_time=due,
    )


def _announce(draft: Draft, reason: Reason, told: str, decision: Decision, *, warning: bool) -> None:
    last = draft.status.checkpoint.last
    source = f"from the checkpoint of step {last.step}" if last is not None else "from the start"
    when = f" in {decision.hold_off_s:.0f} s" if decision.hold_off_s else ""
    draft.emit(reason, f"{told}; attempt {draft.status.attempt + 1} goes on {source}{when}", warning=warning)


def _describe(draft: Draft, failure: Failure) -> str:
    worker, pod = failure.worker, failure.worker.pod
    rank = _rank(draft, failure)
    where = [f"rank {rank}"] if rank is not None else []
    where += [f"pod {pod.name}"] if pod is not None else []
    where += [f"node {pod.node}"] if pod is not None and pod.node else []
    place = f" ({', '.join(where)})" if where else ""
    return f"attempt {draft.status.attempt}: worker {worker.index}{place}: {_cause_text(failure)}"


def _rank(draft: Draft, failure: Failure) -> int | None:
    pod = failure.worker.pod
    if failure.rank is not None:
        return failure.rank
    if pod is not None and pod.termination is not None and pod.termination.rank is not None:
        return pod.termination.rank
    return failure.worker.index if draft.job.spec.num_ranks_per_worker == 1 else None


def _cause_text(failure: Failure) -> str:
    """What happened, most specific first: the program's own words, then the cluster's, then the code's."""
    if failure.told:
        return failure.told
    pod, fate = failure.worker.pod, failure.worker.fate
    if pod is None or (fate is Fate.LOST and not pod.ended):
        stuck = pod is not None and pod.deletion_at is not None
        gone = "its node does not finish the deletion of the pod" if stuck else "the pod is gone"
        return f"{gone}{f' ({pod.disruption})' if pod is not None and pod.disruption else ''}"
    parts = []
    if pod.exit_code is not None:
        # "Error" is the runtime's word for any code but 0.
        known = pod.exit_reason if pod.exit_reason != "Error" else None
        parts.append(f"exit code {pod.exit_code} ({known or meaning_of(pod.exit_code).meaning})")
    parts += [text for text in (pod.disruption, pod.pod_reason, pod.pod_message) if text]
    end = pod.termination
    if end is not None and (end.exception or end.last_line):
        parts.append(end.exception or end.last_line or "")
    return ": ".join(parts) or f"pod phase {pod.phase}"
