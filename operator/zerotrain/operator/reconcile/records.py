"""The description of a failure for users: its record in status.failures, the text of its event, and the last
log lines of the failed rank, kept in a ConfigMap of the job before its pod is deleted.

Of the log only the failure itself is remembered, and it is in status before any deletion: a restarted
operator sees a pod that still exists and a failure that names it, and requests the lines again.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import chain, islice

from zerotrain.contract.exit_codes import ExitCode, meaning_of, signal_of
from zerotrain.operator.api import FailureRecord, Phase
from zerotrain.operator.api.status import MAX_FAILURES, MAX_RANK_FAILURES, RankFailure
from zerotrain.operator.constants import CONTAINER_NAME, Reason
from zerotrain.operator.failure_policy import UNKNOWN_ENDS, Decision
from zerotrain.operator.reconcile.attempts import (
    Failure,
    cause_order,
    failure_class_of,
    failures_of,
)
from zerotrain.operator.reconcile.draft import Draft, stored
from zerotrain.operator.reconcile.plan import SaveLog
from zerotrain.operator.reconcile.pods import PodView, WorkerState
from zerotrain.operator.reconcile.progress import newest_step

MAX_RANK_TEXT = 200

KEPT_PODS = timedelta(minutes=10)
"""Time within which the remaining pods of a failed job are asked: a new operator must not ask them all
again."""


def record(
    draft: Draft,
    failure: Failure,
    *,
    decision: Decision | None = None,
) -> None:
    """Add the failure to the front of status.failures, once per attempt.

    There is no decision if the attempt was to end anyway.
    """
    attempt = draft.status.attempt
    if any(item.attempt == attempt for item in draft.status.failures):
        return
    pod = failure.worker.pod
    entry = FailureRecord(
        attempt=attempt,
        time=draft.stamp,
        pod=pod.name if pod is not None else "",
        container=(pod.failed_container or "") if pod is not None else "",
        rank=rank_of(draft, failure),
        node=(pod.node or "") if pod is not None else "",
        exit_code=pod.exit_code if pod is not None else None,
        reason=str(failure.failure_class.reason),
        cause=failure.failure_class.cause if decision is not None and decision.restart else None,
        message=stored(cause_text(draft, failure)),
        last_line=_last_line(failure),
        stacks=failure.stacks,
        step=newest_step(draft.status),
        rule=decision.rule if decision is not None else None,
        action=str(decision.action) if decision is not None else "",
        log=log_key(attempt) if _has_log(draft, failure) else "",
        ranks=_ranks(draft, failure),
    )
    draft.set(failures=(entry, *draft.status.failures)[:MAX_FAILURES])


def exit_code_of(failure: Failure) -> int | None:
    """Return the exit code of the failed program, or of the ranks that waited for it."""
    pod = failure.worker.pod
    return failure.code if pod is None or pod.exit_code is None else pod.exit_code


def suspects_of(draft: Draft, failure: Failure) -> frozenset[int]:
    """Return the rank to blame, or all ranks of the worker if its rank is not known."""
    rank, each = rank_of(draft, failure), draft.job.spec.num_ranks_per_worker
    if rank is not None:
        return frozenset({rank})
    first = failure.worker.index * each
    return frozenset(range(first, first + each)) if failure.blames_worker else frozenset()


def texts_of(draft: Draft, failure: Failure) -> tuple[str, str]:
    """Return the message and the last line as status has them, so that they are of bounded length."""
    return stored(cause_text(draft, failure)), _last_line(failure)


def _last_line(failure: Failure) -> str:
    end = failure.worker.pod.termination if failure.worker.pod is not None else None
    return stored((end.last_line or "") if end is not None else "")


def describe(draft: Draft, failure: Failure) -> str:
    """Return which worker of which attempt failed, where, and what happened to it."""
    worker, pod = failure.worker, failure.worker.pod
    if not failure.blames_worker:
        return f"attempt {draft.status.attempt}: {cause_text(draft, failure)}"
    rank = rank_of(draft, failure)
    where = [f"rank {rank}"] if rank is not None else []
    where += [f"pod {pod.name}"] if pod is not None else []
    where += [f"node {pod.node}"] if pod is not None and pod.node else []
    place = f" ({', '.join(where)})" if where else ""
    return f"attempt {draft.status.attempt}: worker {worker.index}{place}: {cause_text(draft, failure)}"


def rank_of(draft: Draft, failure: Failure) -> int | None:
    """Return the rank to blame; None if only its worker is known, or no rank is to blame."""
    pod = failure.worker.pod
    if failure.rank is not None or not failure.blames_worker:
        return failure.rank
    if pod is not None and pod.termination is not None and pod.termination.rank is not None:
        return pod.termination.rank
    if pod is not None and pod.failed_container is not None:
        return None
    return failure.worker.index if draft.job.spec.num_ranks_per_worker == 1 else None


def cause_text(draft: Draft, failure: Failure) -> str:
    """Return what happened, most specific first: the program's message, then the cluster's, then the code's
    meaning."""
    if failure.message:
        return failure.message
    pod = failure.worker.pod
    if pod is None or (failure.worker.state is WorkerState.LOST and not pod.ended):
        return _lost_text(draft, failure)
    parts = []
    if pod.failed_container is not None:
        parts.append(f"init container {pod.failed_container}")
    if pod.exit_code is not None:
        parts.append(_code_text(pod))
    parts += [text for text in (pod.disruption, pod.pod_reason, pod.pod_message) if text]
    end = pod.termination
    if end is not None and (end.exception or end.last_line):
        parts.append(end.exception or end.last_line or "")
    message = ": ".join(parts) or f"pod phase {pod.phase}"
    return f"{message}; preceded by {pod.failed_sidecar}" if pod.failed_sidecar else message


def _code_text(pod: PodView) -> str:
    """Return the code with its meaning. The contract's table applies only to the worker's program."""
    code = pod.exit_code or 0
    # "Error" is the runtime's reason for any code but 0.
    known = pod.exit_reason if pod.exit_reason != "Error" else None
    if pod.failed_container is None:
        known = known or meaning_of(code).meaning
    elif known is None and (number := signal_of(code)) is not None:
        known = f"killed by signal {number}"
    return f"exit code {code} ({known})" if known else f"exit code {code}"


def _lost_text(draft: Draft, failure: Failure) -> str:
    pod = failure.worker.pod
    if pod is not None and failure.worker.loss is not None:
        return _node_text(draft, pod)
    why = f" ({pod.disruption})" if pod is not None and pod.disruption else ""
    if pod is None or pod.deletion_at is None:
        return f"the pod is gone{why}"
    if all(item.uid != pod.uid for item in draft.observed.pods):
        return f"the pod was deleted{why or ', not by the operator'}"
    if pod.finalizers:
        return f"the pod was deleted and is held by finalizer {', '.join(pod.finalizers)}{why}"
    return f"its node does not finish the deletion of the pod{why}"


def _node_text(draft: Draft, pod: PodView) -> str:
    node = draft.observed.nodes.get(pod.node or "")
    if node is None or node.gone:
        return "its node was deleted"
    if node.out_of_service:
        return "its node is out of service"
    since = node.not_ready_since
    since_text = f" since {since:%H:%M:%S} UTC" if since is not None else ""
    return f"its node is not ready{since_text}, no step was reported and no worker on it answered"


def _has_log(draft: Draft, failure: Failure) -> bool:
    """Return whether the pod exists and its node answers, so that its log can be requested."""
    pod, worker = failure.worker.pod, failure.worker
    present = pod is not None and any(item.uid == pod.uid for item in draft.observed.pods)
    if draft.observed.log is None or not present or pod is None or worker.loss is not None:
        return False
    is_back = pod.exit_reason in UNKNOWN_ENDS  # the node answers again, and may have kept the log
    return pod.started and (is_back or failure.failure_class.reason is not Reason.NODE_LOST)


def _ranks(draft: Draft, first: Failure) -> tuple[RankFailure, ...]:
    others = sorted(failures_of(draft.view()), key=cause_order)
    blamed = [first, *first.others]
    known = {item.worker.index for item in blamed}
    named = [*blamed, *(item for item in others if item.worker.index not in known)]
    if not first.blames_worker:
        named = others
    leading = [_rank_failure(draft, item) for item in named[:MAX_RANK_FAILURES]]
    further = (found for item in named for found in _other_ranks(draft, item))
    return tuple(islice(chain(leading, further), MAX_RANK_FAILURES))


def _rank_failure(draft: Draft, failure: Failure) -> RankFailure:
    pod = failure.worker.pod
    return RankFailure(
        rank=rank_of(draft, failure),
        pod=pod.name if pod is not None else "",
        node=(pod.node or "") if pod is not None else "",
        exit_code=pod.exit_code if pod is not None else None,
        reason=str(failure.failure_class.reason),
        message=stored(cause_text(draft, failure), MAX_RANK_TEXT),
    )


def _other_ranks(draft: Draft, failure: Failure) -> Iterator[RankFailure]:
    """Yield the failures of the pod's other ranks, as its launcher reports them.

    The tenant controls this report. So only the pod's own ranks are accepted, each once, and only failures.
    """
    worker, pod, each = failure.worker, failure.worker.pod, draft.job.spec.num_ranks_per_worker
    if pod is None or pod.termination is None or not pod.ended:
        return
    open_ranks = set(range(worker.index * each, (worker.index + 1) * each)) - {rank_of(draft, failure)}
    for end in pod.termination.also_failed:
        if end.rank not in open_ranks or not 0 < end.code < 256 or end.code == ExitCode.YIELDED:
            continue
        open_ranks.remove(end.rank)
        text = f"exit code {end.code} ({meaning_of(end.code).meaning})"
        yield RankFailure(
            rank=end.rank,
            pod=pod.name,
            node=pod.node or "",
            exit_code=end.code,
            reason=str(failure_class_of(worker, end).reason),
            message=stored(f"{text}: {end.reason}" if end.reason else text, MAX_RANK_TEXT),
        )


def log_key(attempt: int) -> str:
    return f"attempt-{attempt}.log"


def unsaved_log(draft: Draft) -> PodView | None:
    """Return the pod of the newest failure while it exists and its lines are not known to be kept; None
    otherwise."""
    seen, failures = draft.observed.log, draft.status.failures
    if seen is None or not failures or not failures[0].log or failures[0].attempt != draft.status.attempt:
        return None
    if seen.attempt == draft.status.attempt:
        if seen.error:
            draft.emit(Reason.LOG_NOT_KEPT, f"attempt {seen.attempt}: {seen.error}", warning=True)
        return None
    return next((pod for pod in draft.observed.pods if pod.name == failures[0].pod), None)


def save_log(draft: Draft) -> None:
    """Request the lines of the newest failure; call it before the deletion of its pod is requested."""
    failure = draft.status.failures[0]
    where = f"pod {failure.pod}, node {failure.node}"
    if failure.container:
        where += f", init container {failure.container}"
    code = f", exit code {failure.exit_code}" if failure.exit_code is not None else ""
    draft.act(
        SaveLog(
            attempt=failure.attempt,
            pod=failure.pod,
            rank=failure.rank,
            key=failure.log,
            container=failure.container or CONTAINER_NAME,
            title=f"attempt {failure.attempt}, {where}: {failure.reason}{code}",
        )
    )


def save_kept_log(draft: Draft) -> None:
    """Request the lines for a failed job whose pods stay."""
    ended = draft.status.completion_time
    recent = ended is not None and draft.now < ended + KEPT_PODS
    asked = any(isinstance(action, SaveLog) for action in draft.actions)
    if draft.status.phase is Phase.FAILED and recent and not asked and unsaved_log(draft) is not None:
        save_log(draft)
