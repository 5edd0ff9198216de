"""Which status writes may wait for better company. The controller asks before it writes.

While pods start, their counts and the words about them change with every event. In a storm of a thousand jobs
a write for each would cost the API server more than the pods do.
"""

from __future__ import annotations

from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.reconcile.plan import CreateWorkers, Plan

PATIENT = frozenset({"workers", "ranks", "conditions", "pods_created", "progress"})
"""Fields for people and dashboards. `pods_created` is for an operator that starts again: until it is written,
such an operator makes a pod that was deleted meanwhile once more within its attempt, at no cost to that."""


def can_wait(before: ZeroTrainingJobStatus, plan: Plan) -> bool:
    """Whether the plan does no more than bring PATIENT fields up to date, and let in pods that were decided
    on before: an attempt that begins changes other fields."""
    after = plan.status
    if after is None or plan.events or any(not isinstance(item, CreateWorkers) for item in plan.actions):
        return False
    changed = {name for name in type(after).model_fields if getattr(after, name) != getattr(before, name)}
    return changed <= PATIENT
