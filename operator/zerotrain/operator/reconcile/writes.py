"""Status writes that may be delayed and combined with later ones. The controller asks before it writes.

While pods start, their counts and the messages about them change with every event. With a thousand jobs
starting, a write for each change would cost the API server more than the pods do.
"""

from __future__ import annotations

from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.reconcile.plan import CreateWorkers, Plan

PATIENT = frozenset({"workers", "ranks", "conditions", "pods_created", "progress"})
"""Fields for users and dashboards.

`pods_created` matters only to an operator that restarts. Until it is written, such an operator recreates a
pod that was deleted meanwhile within its attempt, which does no harm.
"""


def can_wait(before: ZeroTrainingJobStatus, plan: Plan) -> bool:
    """Return whether the plan only updates PATIENT fields and creates pods that were decided on before.

    An attempt that begins changes other fields.
    """
    after = plan.status
    if after is None or plan.events or any(not isinstance(item, CreateWorkers) for item in plan.actions):
        return False
    changed = {name for name in type(after).model_fields if getattr(after, name) != getattr(before, name)}
    return changed <= PATIENT
