"""Requests for what lets an attempt start: the cluster's APIs, Kueue's admission, and the StorageClass of
volumes that must be encrypted.
"""

from __future__ import annotations

from zerotrain.operator.api import AttemptShape, ZeroTrainingJob
from zerotrain.operator.cluster.actions.context import ActionContext
from zerotrain.operator.cluster.api import Json, Request
from zerotrain.operator.cluster.discovery import discover as discover_apis
from zerotrain.operator.cluster.errors import Forbidden, NotFound
from zerotrain.operator.cluster.kueue import WorkloadClient
from zerotrain.operator.reconcile import AskQueue, AskStorageClass, DiscoverApis, StorageClassView
from zerotrain.operator.reconcile.plan import QueueStep
from zerotrain.operator.resources import worker_pod
from zerotrain.operator.resources.kueue import workload
from zerotrain.operator.resources.storage_class import declared_encryption

STORAGE_CLASSES = "/apis/storage.k8s.io/v1/storageclasses"


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


async def read_storage_class(context: ActionContext, body: Json, action: AskStorageClass) -> None:
    """Read the StorageClass into memory for the next pass. A rejection or a missing object is recorded as the
    result, too."""
    name, encryption, problem = action.name, None, None
    try:
        if action.claim:
            name = await _class_of_claim(context, body["metadata"]["namespace"], action.claim)
        if name:
            request = Request(method="GET", path=f"{STORAGE_CLASSES}/{name}", kind="storageclasses")
            encryption = declared_encryption(await context.api.call(request))
    except (Forbidden, NotFound) as error:
        problem = str(error)
    context.job_states.of(body["metadata"]["uid"]).storage_classes[action.field] = StorageClassView(
        field=action.field,
        claim=action.claim,
        name=name,
        at=context.api.time.now(),
        encryption=encryption,
        problem=problem,
    )


async def _class_of_claim(context: ActionContext, namespace: str, claim: str) -> str:
    """Return the StorageClass that the claim names; empty if it names none: then an administrator made its
    volume by hand. Everything else in the claim is set by a tenant and not trusted."""
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}"
    found = await context.api.call(Request(method="GET", path=path, kind="persistentvolumeclaims"))
    return str((found.get("spec") or {}).get("storageClassName") or "")
