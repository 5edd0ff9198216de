"""The disruption budget of an attempt: created, and deleted with the attempt's end."""

from __future__ import annotations

import contextlib

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions.hands import PATHS, Hands
from zerotrain.operator.cluster.api import Json, Request
from zerotrain.operator.cluster.errors import NotFound
from zerotrain.operator.reconcile import Protection, ProtectWorkers, UnprotectWorkers
from zerotrain.operator.resources.budget import budget_name, disruption_budget

KIND = "PodDisruptionBudget"


async def protect(hands: Hands, body: Json, action: ProtectWorkers) -> None:
    job = ZeroTrainingJob.parse(body)
    await hands.ensure(job, disruption_budget(job, action.attempt, action.workers))
    hands.memories.of(job.uid).protection = Protection(attempt=action.attempt, exists=True)


async def unprotect(hands: Hands, body: Json, action: UnprotectWorkers) -> None:
    meta = body["metadata"]
    path = f"{PATHS[KIND].format(namespace=meta['namespace'])}/{budget_name(meta['name'], action.attempt)}"
    with contextlib.suppress(NotFound):
        await hands.api.call(Request(method="DELETE", path=path, kind="poddisruptionbudgets"))
    hands.memories.of(meta["uid"]).protection = Protection(attempt=action.attempt, exists=False)
