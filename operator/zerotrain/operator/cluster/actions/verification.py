"""Creation of the pod that verifies a checkpoint."""

from __future__ import annotations

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions.context import ActionContext
from zerotrain.operator.cluster.actions.workers import create_pod
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.reconcile import CreateVerification
from zerotrain.operator.resources.verification import verification_pod


async def create(context: ActionContext, body: Json, action: CreateVerification) -> None:
    """Create the pod. The job's NetworkPolicy exists since its first attempt. Raises ActionRefused,
    ApiError."""
    job = ZeroTrainingJob.parse(body)
    pod = verification_pod(job, action.pod, action.checkpoint, action.limit_s, context.options)
    async with context.creations.slots(job.namespace):
        await create_pod(context, job, pod)
