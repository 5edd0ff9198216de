"""The objects that the pods of an attempt share: looked at now and then while the attempt lasts.

An attempt may last for weeks. Without its NetworkPolicy it would run open, and without Secret or Service pods
that wait for nodes could never start; without its disruption budget a drain would end ranks one by one.
"""

from __future__ import annotations

from zerotrain.operator.reconcile import protection
from zerotrain.operator.reconcile.attempts import AttemptView, Fate
from zerotrain.operator.reconcile.conditions import ACTIVE
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.plan import KeepShared


def settle(draft: Draft, view: AttemptView) -> None:
    """After the phase: ask for it where it is due. Nobody is woken for it; every resync brings a pass."""
    due, status = draft.observed.shared_due, draft.status
    if due is None or draft.now < due or status.attempt == 0 or status.phase not in ACTIVE:
        return
    if not view.count(Fate.ABSENT):  # else they are looked after with the pods that are made
        protected = draft.size if protection.stands(draft) else None
        draft.act(KeepShared(attempt=status.attempt, protected=protected))
