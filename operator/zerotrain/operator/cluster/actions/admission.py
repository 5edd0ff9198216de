"""Requests for what lets an attempt start: the cluster's APIs, Kueue's admission."""

from __future__ import annotations

from zerotrain.operator.api import AttemptShape, ZeroTrainingJob
from zerotrain.operator.cluster.actions.context import ActionContext
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.discovery import discover as discover_apis
from zerotrain.operator.cluster.kueue import WorkloadClient
from zerotrain.operator.reconcile import AskQueue, DiscoverApis
from zerotrain.operator.reconcile.plan import QueueStep
from zerotrain.operator.resources import worker_pod
from zerotrain.operator.resources.kueue import workload


async def discover(context: ActionContext, body: Json, action: DiscoverApis) -> None:
    context.job_states.apis = await discover_apis(context.api)


async def ask_queue(context: ActionContext, body: Json, action: AskQueue) -> None:
    """Carry out one step of the job's Workload; the watch reports the result."""
    context.job_states.queues_wanted.set()
    version = context.job_states.apis.kueue if context.job_states.apis is not None else None
    if action.step is QueueStep.FOLLOW or version is None:
        return
    job = ZeroTrainingJob.parse(body)
    client = WorkloadClient(context.api, version, job)
    if action.step is QueueStep.CREATE:
        scheduling = job.spec.scheduling
        named = scheduling is not None and scheduling.priority_class_name is not None
        priority = await context.job_states.priorities.of(context.api, job) if named else None
        shape = AttemptShape(workers=action.workers, excluded_nodes=action.excluded_nodes)
        shaped = with_shape(job, shape)
        worker = worker_pod(shaped, job.status.attempt + 1, 0, context.options)
        await context.ensure(
            job, workload(shaped, version, action.workers, worker, priority, queue=action.queue)
        )
    elif action.step is QueueStep.DELETE:
        await client.delete()
    else:
        await client.advance(action.step, action.message)


def with_shape(job: ZeroTrainingJob, shape: AttemptShape) -> ZeroTrainingJob:
    """Return the job as it will be when an attempt of this shape runs."""
    return job.model_copy(update={"status": job.status.model_copy(update={"shape": shape})})
