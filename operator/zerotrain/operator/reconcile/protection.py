"""The disruption budget of the running attempt: made once there is something to lose, gone with its pods.

A job of one worker has none: there the eviction itself is the request to checkpoint and stop. Nor has one
that no cordon moves: its budget would refuse the drain for ever, where an eviction moves all workers.

Which attempt has one stands in status before it is made, and until the API server confirmed its end: an
operator that crashes at any point neither forgets one nor leaves one behind.
"""

from __future__ import annotations

from datetime import timedelta

from zerotrain.operator.api import Phase
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.drains import heeds_cordons
from zerotrain.operator.reconcile.observe import Protection
from zerotrain.operator.reconcile.plan import ProtectWorkers, UnprotectWorkers

WORTH_AFTER = timedelta(seconds=60)
"""An attempt without step records is protected after so long: a younger one is soon made up for."""

_WITH_PODS = frozenset({Phase.RUNNING, Phase.YIELDING, Phase.SUSPENDING})


def settle(draft: Draft) -> None:
    """In every pass, after the phase."""
    status, known = draft.status, draft.observed.protection
    protected = status.protected_attempt
    if protected is not None and (protected != status.attempt or status.phase not in _WITH_PODS):
        if known != Protection(attempt=protected, exists=False):
            draft.act(UnprotectWorkers(attempt=protected))
            return
        draft.set(protected_attempt=None)
    if status.phase is Phase.RUNNING and draft.size > 1 and heeds_cordons(draft) and _is_worth(draft):
        draft.set(protected_attempt=status.attempt)
        if known != Protection(attempt=status.attempt, exists=True):
            draft.act(ProtectWorkers(attempt=status.attempt, workers=draft.size))


def stands(draft: Draft) -> bool:
    """Whether the current attempt has one, and for a while still."""
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
