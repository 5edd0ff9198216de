"""The objects of an attempt besides its pods, from the first pod to the last: its disruption budget, its pod
group, and what its pods share.

Status records which attempt has a budget before it is created, and until the API server confirmed its
deletion; it also says (attempt and shape) which group may exist. An operator that crashes at any point
neither forgets such an object nor leaves one behind.
"""

from __future__ import annotations

from datetime import timedelta

from zerotrain.operator.api import Phase
from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.avoided_nodes import handles_cordons
from zerotrain.operator.reconcile.draft import ACTIVE, Draft
from zerotrain.operator.reconcile.observe import Protection
from zerotrain.operator.reconcile.plan import ForgetGroup, KeepShared, ProtectWorkers, UnprotectWorkers
from zerotrain.operator.reconcile.pods import WorkerState
from zerotrain.operator.resources.gang import has_group

WORTH_AFTER = timedelta(seconds=60)
"""Time after which an attempt without step records is protected; the work of a younger one is soon
repeated."""

_WITH_PODS = frozenset({Phase.RUNNING, Phase.YIELDING, Phase.SUSPENDING})


def settle_protection(draft: Draft) -> None:
    """Create the disruption budget once there is progress to lose, and delete it with the pods.

    A job of one worker has none: there the eviction itself is the request to write a checkpoint and stop. A
    job that no cordon moves has none either: its budget would block the drain forever, whereas an eviction
    moves all workers.
    """
    status, known = draft.status, draft.observed.protection
    protected = status.protected_attempt
    if protected is not None and (protected != status.attempt or status.phase not in _WITH_PODS):
        if known != Protection(attempt=protected, exists=False):
            draft.act(UnprotectWorkers(attempt=protected))
            return
        draft.set(protected_attempt=None)
    if (
        status.phase is Phase.RUNNING
        and draft.workers > 1
        and handles_cordons(draft)
        and _is_worth_protection(draft)
    ):
        draft.set(protected_attempt=status.attempt)
        if known != Protection(attempt=status.attempt, exists=True):
            draft.act(ProtectWorkers(attempt=status.attempt, workers=draft.workers))


def is_protected(draft: Draft) -> bool:
    """Return whether the current attempt has a budget and keeps it for now."""
    status = draft.status
    return status.attempt > 0 and status.protected_attempt == status.attempt and status.phase in _WITH_PODS


def _is_worth_protection(draft: Draft) -> bool:
    status = draft.status
    if status.progress.attempt == status.attempt and status.progress.last_step_time is not None:
        return True
    if status.attempt_start_time is None:
        return False
    return draft.is_due(status.attempt_start_time + WORTH_AFTER)


def group_is_gone(draft: Draft) -> bool:
    """Return whether the attempt's pod group is gone; request its deletion otherwise. Call it when none of
    its pods runs.

    A scheduler reserves the nodes of a leftover group for absent pods. The next attempt, whose shape may name
    another API, starts only after the API server confirmed the deletion: no crash, suspension or change
    leaves a group behind.
    """
    status = draft.status
    gang = status.shape.gang if status.shape is not None else ""
    if status.attempt == 0 or not has_group(gang) or draft.observed.ungrouped == status.attempt:
        return True
    draft.act(ForgetGroup(attempt=status.attempt, gang=gang))
    draft.wake(draft.now)
    return False


def keep_shared(draft: Draft, view: AttemptView) -> None:
    """Request a check of the objects that the pods share if it is due. It schedules no pass of its own,
    because every resync causes one.

    An attempt may last for weeks. Without its NetworkPolicy it would run unprotected. Without the Secret or
    the Service, pods that wait for nodes could never start. Without its disruption budget, a drain would end
    its ranks one by one.
    """
    due, status = draft.observed.shared_due, draft.status
    if due is None or draft.now < due or status.attempt == 0 or status.phase not in ACTIVE:
        return
    if not view.count(WorkerState.ABSENT):  # otherwise they are checked when the pods are created
        # One that was rejected so far is requested by itself, and delays no later check of the others.
        has_budget = draft.observed.protection == Protection(attempt=status.attempt, exists=True)
        protected = draft.workers if has_budget and is_protected(draft) else None
        draft.act(KeepShared(attempt=status.attempt, protected=protected))
