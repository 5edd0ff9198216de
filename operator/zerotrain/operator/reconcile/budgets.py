"""Counting restarts in status: totals for people, the recent ones for the sliding window."""

from __future__ import annotations

from datetime import datetime

from zerotrain.operator.api.status import MAX_RECENT_RESTARTS, Restart, Restarts
from zerotrain.operator.constants import Reason
from zerotrain.operator.failure_policy import Budget, PastRestart, still_counts

KEPT_HANGS = 7
"""Restarts after hangs that stay, the newest ones: they double the hold-off, up to its longest with so many,
and the limits, of which one may be longer than the window."""


def history_of(restarts: Restarts) -> tuple[PastRestart, ...]:
    """The recent restarts as the failure policy wants them, oldest first."""
    return tuple(
        PastRestart(
            time=item.time, cause=item.cause, reason=item.reason, step=item.step, charged=item.charged
        )
        for item in restarts.recent
    )


def charge(restarts: Restarts, restart: Restart, *, budget: Budget, now: datetime) -> Restarts:
    """Add one restart, forget those that no longer count.

    Restarts that are allowed once per job stay for good: forgetting them would allow a second one. So do the
    newest hangs.
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
