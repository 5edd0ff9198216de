"""The restart counters in status: totals for users, and the recent restarts for the sliding window."""

from __future__ import annotations

from datetime import datetime

from zerotrain.operator.api.status import MAX_RECENT_RESTARTS, Restart, Restarts
from zerotrain.operator.constants import Reason
from zerotrain.operator.failure_policy import Budget, PastRestart, still_counts

KEPT_HANGS = 7
"""Number of newest restarts after hangs that are never forgotten.

They double the hold-off, which reaches its maximum with this number, and they double the hang limits, one of
which may be longer than the window.
"""


def history_of(restarts: Restarts) -> tuple[PastRestart, ...]:
    """Return the recent restarts in the form that the failure policy takes, oldest first."""
    return tuple(
        PastRestart(
            time=item.time, cause=item.cause, reason=item.reason, step=item.step, charged=item.charged
        )
        for item in restarts.recent
    )


def charge(restarts: Restarts, restart: Restart, *, budget: Budget, now: datetime) -> Restarts:
    """Add one restart and remove those that no longer count.

    Restarts that are allowed once per job are kept for good, because removing them would allow a second one.
    The newest restarts after hangs are kept as well.
    """
    counted = still_counts(history_of(restarts), budget, step=restart.step, now=now)
    hangs = [item for item in restarts.recent if item.reason == Reason.HANG][-KEPT_HANGS:]
    kept = tuple(
        item
        for item, counts in zip(restarts.recent, counted, strict=True)
        if counts or item.reason == Reason.SPILL_INTEGRITY or item in hangs
    )
    field = restart.cause.value if restart.charged else "uncharged"
    count = {field: getattr(restarts, field) + 1, "total": restarts.total + 1}
    return restarts.model_copy(update={**count, "recent": (*kept, restart)[-MAX_RECENT_RESTARTS:]})
