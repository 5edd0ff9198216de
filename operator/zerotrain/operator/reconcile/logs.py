"""The last log lines of the failed rank, kept in a ConfigMap of the job before its pod is deleted.

Only the failure itself is remembered, and it is in status before any deletion: a restarted operator sees a
pod that still exists and a failure that names it, and requests the lines again.
"""

from __future__ import annotations

from datetime import timedelta

from zerotrain.operator.api import Phase
from zerotrain.operator.constants import CONTAINER_NAME, Reason
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.observe import PodView
from zerotrain.operator.reconcile.plan import SaveLog

KEPT_PODS = timedelta(minutes=10)
"""Time within which the remaining pods of a failed job are asked: a new operator must not ask them all
again."""


def log_key(attempt: int) -> str:
    return f"attempt-{attempt}.log"


def unsaved(draft: Draft) -> PodView | None:
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


def save(draft: Draft) -> None:
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


def save_kept(draft: Draft) -> None:
    """Request the lines for a failed job whose pods stay."""
    ended = draft.status.completion_time
    recent = ended is not None and draft.now < ended + KEPT_PODS
    asked = any(isinstance(action, SaveLog) for action in draft.actions)
    if draft.status.phase is Phase.FAILED and recent and not asked and unsaved(draft) is not None:
        save(draft)
