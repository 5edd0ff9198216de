"""Deletion of pod groups with their attempt: a scheduler reserves the nodes of a leftover group for absent
pods.

Status (attempt and shape) says which group may exist. The next attempt, whose shape may name another API,
starts only after the API server confirmed the deletion: no crash, suspension or change leaves a group behind.
"""

from __future__ import annotations

from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.plan import ForgetGroup
from zerotrain.operator.resources.gang import has_group


def settled(draft: Draft) -> bool:
    """Return whether the attempt's group is gone; request its deletion otherwise. Call it when none of its
    pods runs."""
    status = draft.status
    gang = status.shape.gang if status.shape is not None else ""
    if status.attempt == 0 or not has_group(gang) or draft.observed.ungrouped == status.attempt:
        return True
    draft.act(ForgetGroup(attempt=status.attempt, gang=gang))
    draft.wake(draft.now)
    return False
