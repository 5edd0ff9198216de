"""The last lines of the rank that failed: kept in a ConfigMap of the job before its pod goes.

Nothing about it is remembered but the failure itself, which is in status before anything is deleted: an
operator that starts anew sees a pod that is still there and a failure that names it, and asks again.
"""

from __future__ import annotations

from datetime import timedelta

from zerotrain.operator.api import Phase
from zerotrain.operator.constants import CONTAINER_NAME, Reason
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.observe import PodView
from zerotrain.operator.reconcile.plan import SaveLog

KEPT_PODS = timedelta(minutes=10)
"""Pods of a failed job that stay are asked within this time: a new operator must not ask them all again."""


def log_key(attempt: int) -> str:
    return f"attempt-{attempt}.log"


def unsaved(draft: Draft) -> PodView | None:
    """The pod of the newest failure, while it is there and its lines are not known to be kept."""
    seen, failures = draft.observed.log, draft.status.failures
    if seen is None or not failures or not failures[0].log or failures[0].attempt != draft.status.attempt:
        return None
    if seen.attempt == draft.status.attempt:
        if seen.error:
            draft.emit(Reason.LOG_NOT_KEPT, f"attempt {seen.attempt}: {seen.error}", warning=True)
        return None
    return next((pod for pod in draft.observed.pods if pod.name == failures[0].pod), None)


def save(draft: Draft) -> None:
    """Ask for the lines of the newest failure; to be put before the deletion of its pod."""
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
    """The same for a finished job whose pods stay."""
    ended = draft.status.completion_time
    recent = ended is not None and draft.now < ended + KEPT_PODS
    asked = any(isinstance(action, SaveLog) for action in draft.actions)
    if draft.status.phase is Phase.FAILED and recent and not asked and unsaved(draft) is not None:
        save(draft)
