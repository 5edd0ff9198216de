"""Pod groups end with their attempt: a scheduler books the nodes of one that stays for pods that never come.

Which group there may be stands in status (attempt and shape). The next attempt, whose shape may name another
API, starts only after the API server confirmed its end: no crash, suspend or change leaves one behind.
"""

from __future__ import annotations

from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.plan import ForgetGroup
from zerotrain.operator.resources.gang import has_group


def settled(draft: Draft) -> bool:
    """Whether the group of the attempt is gone; asks for its end. To be called when none of its pods runs."""
    status = draft.status
    gang = status.shape.gang if status.shape is not None else ""
    if status.attempt == 0 or not has_group(gang) or draft.observed.ungrouped == status.attempt:
        return True
    draft.act(ForgetGroup(attempt=status.attempt, gang=gang))
    draft.wake(draft.now)
    return False
