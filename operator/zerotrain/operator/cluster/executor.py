"""Carries out a plan's actions. Each may be repeated: names decide, and what exists is not made again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from zerotrain.contract.channel_token import derive
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.api import MERGE_PATCH, Api, Json, Request
from zerotrain.operator.cluster.channel import ChannelError, Worker, WorkerChannel
from zerotrain.operator.cluster.errors import AlreadyExists, ApiError, Conflict, Forbidden, NotFound
from zerotrain.operator.cluster.jobs import JobClient
from zerotrain.operator.cluster.memory import Memories
from zerotrain.operator.cluster.store import PodStore
from zerotrain.operator.constants import LABEL_ATTEMPT, LABEL_JOB_UID, Reason
from zerotrain.operator.reconcile import (
    Action,
    CreateWorkers,
    DeleteJob,
    DeletePods,
    DeleteWorkers,
    Problem,
    RequestYield,
    YieldState,
)
from zerotrain.operator.resources import ResourceOptions, shared_objects, worker_pods

log = logging.getLogger(__name__)

MAX_CREATIONS = 64
"""Pods in creation at once, over all jobs: more only queue up inside the API server."""

_PATHS = {
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
}


class ActionRefused(Exception):
    """The API server does not let an action happen; the pass ends and the job's conditions say why."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(reason=str(reason), message=message)


@dataclass(frozen=True, kw_only=True)
class Executor:
    """The hands of the operator."""

    api: Api
    store: PodStore
    memories: Memories
    channel: WorkerChannel
    options: ResourceOptions
    operator_key: bytes
    creations: asyncio.Semaphore

    async def perform(self, body: Json, actions: Sequence[Action]) -> None:
        """All actions in order. Raises ActionRefused, ApiError."""
        for action in actions:
            match action:
                case CreateWorkers():
                    await self._create(ZeroTrainingJob.parse(body), action)
                case DeleteWorkers():
                    await self._delete_attempt(body, action)
                case DeletePods():
                    await asyncio.gather(
                        *(self._delete(body, name, uid, action.grace_s) for name, uid in action.names_uids)
                    )
                case RequestYield():
                    await self._request_yield(body, action)
                case DeleteJob():
                    await JobClient(self.api).delete(body)

    async def _create(self, job: ZeroTrainingJob, action: CreateWorkers) -> None:
        await self._ensure_shared(job, action.attempt)
        pods = worker_pods(job, action.attempt, action.indices, self.options)
        # The first refusal stops those that wait: a quota refuses a thousand pods for the same reason.
        try:
            async with asyncio.TaskGroup() as group:
                for pod in pods:
                    group.create_task(self._create_pod(job, pod))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _ensure_shared(self, job: ZeroTrainingJob, attempt: int) -> None:
        memory = self.memories.of(job.uid)
        objects = shared_objects(job, attempt, self.operator_key, self.options)
        # With the attempt: what somebody deleted is made again at the latest for the next one.
        digest = hash(repr((attempt, [item for item in objects if item["kind"] != "Secret"])))
        if memory.ensured == digest:
            objects = [item for item in objects if item["kind"] == "Secret"]
        await asyncio.gather(*(self._ensure(job, item) for item in objects))
        memory.ensured = digest

    async def _ensure(self, job: ZeroTrainingJob, item: Json) -> None:
        try:
            await self._post(item)
        except AlreadyExists:
            # Secrets are created and never read: the name holds the attempt, the content is derived from it.
            if item["kind"] != "Secret":
                await self._adopt(job, item)

    async def _adopt(self, job: ZeroTrainingJob, item: Json) -> None:
        """Bring an object of an earlier attempt up to date; refuse one that belongs to somebody else."""
        path = f"{_collection(item)}/{item['metadata']['name']}"
        kind = _kind(item)
        found = await self.api.call(Request(method="GET", path=path, kind=kind))
        if not _owned(found, job.uid):
            raise _name_taken(found)
        if item["kind"] == "ConfigMap" and found.get("data") != item.get("data"):
            patch = {
                "metadata": {"annotations": item["metadata"].get("annotations", {})},
                "data": item["data"],
            }
            request = Request(method="PATCH", path=path, kind=kind, body=patch, content_type=MERGE_PATCH)
            await self.api.call(request)

    async def _create_pod(self, job: ZeroTrainingJob, pod: Json) -> None:
        async with self.creations:
            try:
                made = await self._post(pod)
            except AlreadyExists:
                path = f"{_collection(pod)}/{pod['metadata']['name']}"
                try:
                    made = await self.api.call(Request(method="GET", path=path, kind="pods"))
                except NotFound:
                    return  # it went between the two requests; the next pass sees what that means
                if not _owned(made, job.uid):
                    raise _name_taken(made) from None
        self.store.put(made, now=datetime.now(UTC))

    async def _post(self, item: Json) -> Json:
        try:
            return await self.api.call(
                Request(method="POST", path=_collection(item), kind=_kind(item), body=item)
            )
        except Forbidden as error:
            reason = Reason.QUOTA_EXCEEDED if "exceeded quota" in str(error) else Reason.API_REFUSED
            raise ActionRefused(reason, str(error)) from error
        except (AlreadyExists, Conflict):
            raise
        except ApiError as error:
            if error.status in (400, 422):
                raise ActionRefused(Reason.API_REFUSED, str(error)) from error
            raise

    async def _delete_attempt(self, body: Json, action: DeleteWorkers) -> None:
        meta = body["metadata"]
        selector = f"{LABEL_JOB_UID}={meta['uid']},{LABEL_ATTEMPT}={action.attempt}"
        path = _PATHS["Pod"].format(namespace=meta["namespace"])
        request = Request(
            method="DELETE",
            path=path,
            kind="pods",
            params={"labelSelector": selector},
            body=_delete_options(action.grace_s),
        )
        await self.api.call(request)

    async def _delete(self, body: Json, name: str, uid: str, grace_s: int) -> None:
        path = f"{_PATHS['Pod'].format(namespace=body['metadata']['namespace'])}/{name}"
        options = {**_delete_options(grace_s), "preconditions": {"uid": uid}}
        try:
            await self.api.call(Request(method="DELETE", path=path, kind="pods", body=options))
        except (NotFound, Conflict):
            log.debug("pod %s is gone already, or is another one by now", name)

    async def _request_yield(self, body: Json, action: RequestYield) -> None:
        meta = body["metadata"]
        worker = Worker(namespace=meta["namespace"], pod=action.pod, ip=action.pod_ip)
        token = derive(self.operator_key, meta["uid"], action.attempt)
        state = YieldState(attempt=action.attempt, acked_at=datetime.now(UTC))
        try:
            await self.channel.request_yield(worker, attempt=action.attempt, token=token)
        except ChannelError as error:
            log.warning("asking %s to yield: %s", action.pod, error)
            state = YieldState(attempt=action.attempt, error=str(error), refused=error.final)
        self.memories.of(meta["uid"]).yielding = state


def _collection(item: Json) -> str:
    return _PATHS[item["kind"]].format(namespace=item["metadata"]["namespace"])


def _kind(item: Json) -> str:
    return _PATHS[item["kind"]].rsplit("/", 1)[-1]


def _owned(item: Json, job_uid: str) -> bool:
    owners = item["metadata"].get("ownerReferences", ())
    return any(owner.get("uid") == job_uid for owner in owners)


def _name_taken(item: Json) -> ActionRefused:
    meta = item["metadata"]
    leaving = " and is being deleted" if meta.get("deletionTimestamp") else "; delete it or rename the job"
    kind = item.get("kind") or "object"
    return ActionRefused(Reason.NAME_TAKEN, f"{kind} {meta['name']} belongs to somebody else{leaving}")


def _delete_options(grace_s: int | None) -> Json:
    options: Json = {"propagationPolicy": "Background"}
    return options if grace_s is None else {**options, "gracePeriodSeconds": grace_s}
