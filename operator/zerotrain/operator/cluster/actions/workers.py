"""Creation, yield and deletion of the objects of an attempt: worker pods and what they share, the disruption
budget, the pod group; and the pod that verifies a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import timedelta

from zerotrain.contract.channel_token import derive
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions.context import (
    CREATION_WINDOW_S,
    PATHS,
    SHARED_S,
    ActionContext,
    Unfinished,
    delete_options,
    owned,
    path_of,
    since_now,
    together,
)
from zerotrain.operator.cluster.actions.rejections import altered, name_taken
from zerotrain.operator.cluster.api import Json, Request
from zerotrain.operator.cluster.channel import CallKind, ChannelError, WorkerAddress, share_of
from zerotrain.operator.cluster.errors import AlreadyExists, Conflict, NotFound
from zerotrain.operator.cluster.store import owner_key
from zerotrain.operator.cluster.worker_calls import call_concurrently
from zerotrain.operator.constants import LABEL_ATTEMPT, LABEL_JOB_UID, LABEL_RANK
from zerotrain.operator.reconcile import (
    CreateVerification,
    CreateWorkers,
    DeletePods,
    DeleteWorkers,
    ForgetGroup,
    KeepShared,
    Protection,
    ProtectWorkers,
    RequestYield,
    UnprotectWorkers,
    YieldState,
)
from zerotrain.operator.resources import shared_objects, worker_pods
from zerotrain.operator.resources.gang import RESOURCE as POD_GROUPS
from zerotrain.operator.resources.gang import group_name
from zerotrain.operator.resources.pod import budget_name, disruption_budget
from zerotrain.operator.resources.verification import verification_pod

log = logging.getLogger(__name__)

SHARED_FRESH = timedelta(seconds=10)
"""Period in which the shared objects of an attempt are not checked again."""

DELETIONS = 16
"""Maximum of concurrent deletions of one job: those of a thousand pods must not take every connection."""

LIVE_PODS = "status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of the pods that have not ended, as judged by the API server at the request."""


YIELD_PATIENCE_S = 5.0
"""Seconds after which an error ends the requests: as long as one call may take."""


async def create(context: ActionContext, body: Json, action: CreateWorkers) -> None:
    job = ZeroTrainingJob.parse(body)
    is_over, is_busy = since_now(CREATION_WINDOW_S), since_now(SHARED_S)
    if await _ensure_shared(context, job, action.attempt) and is_busy():
        raise Unfinished(0)
    pods = worker_pods(job, action.attempt, action.indices, context.options)
    made = await context.creations.in_batches(
        job.namespace,
        pods,
        len(action.indices),
        lambda pod: create_pod(context, job, pod),
        first=_first_batch(context, job, action.attempt),
        is_over=is_over,
    )
    if made < len(action.indices):
        raise Unfinished(made)


async def keep_shared(context: ActionContext, body: Json, action: KeepShared) -> None:
    """Restore the shared objects, with one request for each object that exists."""
    job = ZeroTrainingJob.parse(body)
    objects = shared_objects(job, action.attempt, context.operator_key, context.options)
    if action.protected is not None:
        objects.append(disruption_budget(job, action.attempt, action.protected))
    await together(*(context.keep(job, item) for item in objects))
    context.job_states.of(job.uid).shared_at = context.api.time.now()


async def delete_attempt(context: ActionContext, body: Json, action: DeleteWorkers) -> None:
    meta = body["metadata"]
    selector = f"{LABEL_JOB_UID}={meta['uid']},{LABEL_ATTEMPT}={action.attempt}"
    if action.spared is not None:
        selector = f"{selector},{LABEL_RANK}!={action.spared}"
    fields = {} if action.ended else {"fieldSelector": LIVE_PODS}
    request = Request(
        method="DELETE",
        path=PATHS["Pod"].format(namespace=meta["namespace"]),
        kind="pods",
        params={"labelSelector": selector, **fields},
        body=delete_options(action.grace_s),
    )
    await context.api.call(request)


async def delete_pods(context: ActionContext, body: Json, action: DeletePods) -> None:
    places = asyncio.Semaphore(DELETIONS)

    async def delete(name: str, uid: str) -> None:
        async with places:
            await _delete(context, body, name, uid, action.grace_s)

    await together(*(delete(name, uid) for name, uid in action.names_uids))


async def _ensure_shared(context: ActionContext, job: ZeroTrainingJob, attempt: int) -> bool:
    """Create the shared objects of the attempt. Return whether this was the first time for the attempt."""
    job_state = context.job_states.of(job.uid)
    objects = shared_objects(job, attempt, context.operator_key, context.options)
    # The digest covers the attempt: objects that were deleted are recreated for the next one at the latest.
    digest = hash(repr((attempt, [item for item in objects if item["kind"] != "Secret"])))
    first = job_state.ensured != digest
    if not first:
        fresh = (
            job_state.shared_at is not None and context.api.time.now() < job_state.shared_at + SHARED_FRESH
        )
        objects = [] if fresh else [item for item in objects if item["kind"] == "Secret"]
    await together(*(context.ensure(job, item) for item in objects))
    if objects:
        job_state.ensured, job_state.shared_at = digest, context.api.time.now()
    return first


def _first_batch(context: ActionContext, job: ZeroTrainingJob, attempt: int) -> int:
    """Return the size of the first batch: as many pods as earlier passes made, unless one was rejected."""
    if context.job_states.of(job.uid).problem is not None:
        return 1
    pods, _ = context.store.of_job(owner_key(job.namespace, job.uid))
    return max(sum(pod.attempt == attempt for pod in pods), 1)


async def create_pod(context: ActionContext, job: ZeroTrainingJob, pod: Json) -> None:
    """Create a pod of the job, or find the one that was created before. Raises ActionRefused, ApiError."""
    try:
        made = await context.post(pod)
    except AlreadyExists:
        try:
            made = await context.api.call(Request(method="GET", path=path_of(pod), kind="pods"))
        except NotFound:
            return  # it was deleted between the two requests; the next pass handles that
        labels = made["metadata"].get("labels") or {}
        if not owned(made, job.uid) and labels.get(LABEL_JOB_UID) != job.uid:
            raise name_taken(made) from None
    if (error := altered(pod, made, is_owned=owned(made, job.uid))) is not None:
        raise error
    context.store.put(made, now=context.api.time.now())


async def _delete(context: ActionContext, body: Json, name: str, uid: str, grace_s: int) -> None:
    path = f"{PATHS['Pod'].format(namespace=body['metadata']['namespace'])}/{name}"
    options = {**delete_options(grace_s), "preconditions": {"uid": uid}}
    try:
        await context.api.call(Request(method="DELETE", path=path, kind="pods", body=options))
    except (NotFound, Conflict):
        log.debug("pod %s is deleted already or has been replaced", name)


async def forget_group(context: ActionContext, body: Json, action: ForgetGroup) -> None:
    """Delete the group, unless the object of that name has another owner."""
    meta = body["metadata"]
    name = group_name(meta["name"], action.attempt)
    path = f"/apis/{action.gang}/namespaces/{meta['namespace']}/{POD_GROUPS}/{name}"
    await context.remove(path, kind=POD_GROUPS, job_uid=meta["uid"])
    context.job_states.of(meta["uid"]).ungrouped = action.attempt


async def protect(context: ActionContext, body: Json, action: ProtectWorkers) -> None:
    job = ZeroTrainingJob.parse(body)
    await context.ensure(job, disruption_budget(job, action.attempt, action.workers))
    context.job_states.of(job.uid).protection = Protection(attempt=action.attempt, exists=True)


async def unprotect(context: ActionContext, body: Json, action: UnprotectWorkers) -> None:
    """Delete the attempt's budget, unless the object of that name has another owner."""
    meta = body["metadata"]
    name = budget_name(meta["name"], action.attempt)
    path = f"{PATHS['PodDisruptionBudget'].format(namespace=meta['namespace'])}/{name}"
    await context.remove(path, kind="poddisruptionbudgets", job_uid=meta["uid"])
    context.job_states.of(meta["uid"]).protection = Protection(attempt=action.attempt, exists=False)


async def create_verification(context: ActionContext, body: Json, action: CreateVerification) -> None:
    """Create the pod. The job's NetworkPolicy exists since its first attempt. Raises ActionRefused,
    ApiError."""
    job = ZeroTrainingJob.parse(body)
    pod = verification_pod(job, action.pod, action.checkpoint, action.limit_s, context.options)
    async with context.creations.slots(job.namespace):
        await create_pod(context, job, pod)


async def request_yield(context: ActionContext, body: Json, action: RequestYield) -> None:
    """Request a yield of all workers, and keep the answer, or why there is none, in memory for the next pass.

    All workers must accept. One that does not accept is no reason to leave out the others: ranks that were
    asked would leave those that were not. But a pass must not wait for a thousand workers that are cut off.
    """
    begun = time.monotonic()
    meta = body["metadata"]
    token = derive(context.operator_key, meta["uid"], action.attempt)
    pods = ((action.pod, action.pod_ip), *action.others)
    answers = await call_concurrently(
        lambda worker: _ask_to_yield(context, worker, action.attempt, token),
        [WorkerAddress(namespace=meta["namespace"], pod=pod, ip=ip) for pod, ip in pods],
        most=share_of(CallKind.YIELD),
        enough=lambda error: error is not None and time.monotonic() - begun >= YIELD_PATIENCE_S,
    )
    errors = [error for error in answers.values() if error is not None]
    state = YieldState(attempt=action.attempt, acked_at=context.api.time.now())
    if errors:
        refused = any(error.final for error in errors)
        state = YieldState(attempt=action.attempt, error=str(errors[0]), refused=refused)
    context.job_states.of(meta["uid"]).yielding = state


async def _ask_to_yield(
    context: ActionContext, worker: WorkerAddress, attempt: int, token: str
) -> ChannelError | None:
    try:
        await context.channel.request_yield(worker, attempt=attempt, token=token)
    except ChannelError as error:
        log.warning("cannot request a yield from %s: %s", worker.pod, error)
        return error
    return None
