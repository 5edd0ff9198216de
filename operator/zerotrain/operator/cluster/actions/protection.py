"""PodDisruptionBudget of an attempt: created for it, and deleted with its end."""

from __future__ import annotations

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions.context import PATHS, ActionContext
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.reconcile import Protection, ProtectWorkers, UnprotectWorkers
from zerotrain.operator.resources.pod import budget_name, disruption_budget

KIND = "PodDisruptionBudget"
RESOURCE = "poddisruptionbudgets"


async def protect(context: ActionContext, body: Json, action: ProtectWorkers) -> None:
    job = ZeroTrainingJob.parse(body)
    await context.ensure(job, disruption_budget(job, action.attempt, action.workers))
    context.job_states.of(job.uid).protection = Protection(attempt=action.attempt, exists=True)


async def unprotect(context: ActionContext, body: Json, action: UnprotectWorkers) -> None:
    """Delete the attempt's budget, unless the object of that name has another owner."""
    meta = body["metadata"]
    name = budget_name(meta["name"], action.attempt)
    path = f"{PATHS[KIND].format(namespace=meta['namespace'])}/{name}"
    await context.remove(path, kind=RESOURCE, job_uid=meta["uid"])
    context.job_states.of(meta["uid"]).protection = Protection(attempt=action.attempt, exists=False)
