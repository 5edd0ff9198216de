"""The disruption budget of the running attempt: created once there is progress to lose, deleted with its
pods.

A job of one worker has none: there the eviction itself is the request to write a checkpoint and stop. A job
that no cordon moves has none either: its budget would block the drain forever, whereas an eviction moves all
workers.

Status records which attempt has a budget before it is created, and until the API server confirmed its
deletion. An operator that crashes at any point neither forgets a budget nor leaves one behind.
"""

from __future__ import annotations

from datetime import timedelta

from zerotrain.operator.api import Phase
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.drains import handles_cordons
from zerotrain.operator.reconcile.observe import Protection
from zerotrain.operator.reconcile.plan import ProtectWorkers, UnprotectWorkers

WORTH_AFTER = timedelta(seconds=60)
"""Time after which an attempt without step records is protected; the work of a younger one is soon
repeated."""

_WITH_PODS = frozenset({Phase.RUNNING, Phase.YIELDING, Phase.SUSPENDING})


def settle(draft: Draft) -> None:
    """Create or delete the budget as needed. It is called in every pass, after the phase."""
    status, known = draft.status, draft.observed.protection
    protected = status.protected_attempt
    if protected is not None and (protected != status.attempt or status.phase not in _WITH_PODS):
        if known != Protection(attempt=protected, exists=False):
            draft.act(UnprotectWorkers(attempt=protected))
            return
        draft.set(protected_attempt=None)
    if status.phase is Phase.RUNNING and draft.workers > 1 and handles_cordons(draft) and _is_worth(draft):
        draft.set(protected_attempt=status.attempt)
        if known != Protection(attempt=status.attempt, exists=True):
            draft.act(ProtectWorkers(attempt=status.attempt, workers=draft.workers))


def stands(draft: Draft) -> bool:
    """Return whether the current attempt has a budget and keeps it for now."""
    status = draft.status
    return status.attempt > 0 and status.protected_attempt == status.attempt and status.phase in _WITH_PODS


def _is_worth(draft: Draft) -> bool:
    status = draft.status
    if status.progress.attempt == status.attempt and status.progress.last_step_time is not None:
        return True
    if status.attempt_start_time is None:
        return False
    due = status.attempt_start_time + WORTH_AFTER
    if draft.now < due:
        draft.wake(due)
    return draft.now >= due
