"""The objects that the pods of an attempt share, checked from time to time while the attempt lasts.

An attempt may last for weeks. Without its NetworkPolicy it would run unprotected. Without the Secret or the
Service, pods that wait for nodes could never start. Without its disruption budget, a drain would end its
ranks one by one.
"""

from __future__ import annotations

from zerotrain.operator.reconcile import protection
from zerotrain.operator.reconcile.attempts import AttemptView, WorkerState
from zerotrain.operator.reconcile.conditions import ACTIVE
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.plan import KeepShared


def settle(draft: Draft, view: AttemptView) -> None:
    """Request the check if it is due. It schedules no pass of its own, because every resync causes one."""
    due, status = draft.observed.shared_due, draft.status
    if due is None or draft.now < due or status.attempt == 0 or status.phase not in ACTIVE:
        return
    if not view.count(WorkerState.ABSENT):  # otherwise they are checked when the pods are created
        protected = draft.workers if protection.stands(draft) else None
        draft.act(KeepShared(attempt=status.attempt, protected=protected))
