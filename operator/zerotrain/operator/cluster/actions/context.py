"""Common base of all actions: the API client, the pods in memory, and the creation or lookup of objects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions.rejections import ActionRefused, name_taken, rejection_of
from zerotrain.operator.cluster.api import MERGE_PATCH, Answer, Api, Json, Request
from zerotrain.operator.cluster.channel import WorkerChannel
from zerotrain.operator.cluster.errors import AlreadyExists, ApiError, Conflict, Forbidden, NotFound
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.limits import Creations
from zerotrain.operator.cluster.store import PodStore, owner_key
from zerotrain.operator.constants import LABEL_ATTEMPT, Reason
from zerotrain.operator.resources import ResourceOptions

log = logging.getLogger(__name__)

PATHS = {
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
}


_OF_OTHERS = {
    "PodGroup": (
        Reason.GANG_MISSING,
        "Install its scheduler again, or set spec.suspend to true, choose another spec.scheduling.gang, and "
        "resume: the next attempt takes what is served then",
    ),
    "Workload": (
        Reason.QUEUE_MISSING,
        "Install Kueue again, or set spec.suspend to true, remove the queue's name, and resume",
    ),
}
"""Kinds whose APIs are installed and removed with other software: the reason to give when they are missing,
and the ways out."""


class Unfinished(Exception):
    """Error of an action that would delay other jobs too long: the job's next pass continues it.

    `made`: number of pods that were created by then.
    """

    def __init__(self, made: int) -> None:
        super().__init__(f"{made} pods were created, and more remain")
        self.made = made


CREATION_WINDOW_S = 0.25
"""Seconds for which one pass may create pods. Otherwise a job of thousands of pods would not notice a
failure, a suspension or its own deletion before the last of them."""


SHARED_S = 0.1
"""Seconds of creating the shared objects after which the API server counts as busy: the first pods would take
as long again, and a pass of their own creates them."""


def since_now(seconds: float) -> Callable[[], bool]:
    """Return a function that tells whether `seconds` have passed since now."""
    now_s = asyncio.get_running_loop().time
    until = now_s() + seconds
    return lambda: now_s() >= until


async def together(*acts: Awaitable[None]) -> None:
    """Run all of them at once, each to its end, then raise the first error.

    `asyncio.gather` alone raises at once and leaves the others behind: they would run concurrently with the
    job's next pass, or after a replica that ends has released its lease.
    """
    for outcome in await asyncio.gather(*acts, return_exceptions=True):
        if outcome is not None:
            raise outcome


@dataclass(frozen=True, kw_only=True)
class ActionContext:
    """Context of all actions."""

    api: Api
    store: PodStore
    job_states: JobStates
    channel: WorkerChannel
    options: ResourceOptions
    operator_key: bytes
    creations: Creations

    async def ensure(self, job: ZeroTrainingJob, item: Json) -> None:
        """Create the object, or check that the existing one belongs to this job and update it."""
        if item["kind"] == "Secret":
            await self._ensure_secret(job, item)
            return
        found = await self.find_or_make(job, item)
        if found is not None:
            await self._update(item, found)

    async def find_or_make(self, job: ZeroTrainingJob, item: Json) -> Json | None:
        """Create the object and return None, or return the existing one of this job by its name."""
        try:
            await self.post(item)
        except AlreadyExists:
            return await self._read(job, item)
        except ActionRefused as refusal:
            if not refusal.may_exist:
                raise
            try:
                return await self._read(job, item)
            except NotFound:
                raise refusal from None
        return None

    async def keep(self, job: ZeroTrainingJob, item: Json) -> None:
        """Recreate an object of the running attempt if it was deleted, and restore it if it was changed."""
        try:
            if item["kind"] != "Secret":
                await self._update(item, await self._read(job, item))
                return
            await self.post(item)
        except AlreadyExists:
            return
        except ActionRefused as refusal:
            # The attempt's pods were created after it: most likely it exists. The next check tries again.
            if not refusal.may_exist:
                raise
            return
        except NotFound:
            await self.ensure(job, item)
        log.warning("%s/%s: %s did not exist and is created again", job.namespace, job.name, item["kind"])

    async def remove(self, path: str, *, kind: str, job_uid: str) -> None:
        """Delete the object, unless the one of that name has another owner or has been replaced by now."""
        try:
            found = await self.api.call(Request(method="GET", path=path, kind=kind))
            if owned(found, job_uid):
                options = {**delete_options(None), "preconditions": {"uid": found["metadata"]["uid"]}}
                await self.api.call(Request(method="DELETE", path=path, kind=kind, body=options))
        except (NotFound, Conflict):
            log.debug("%s is deleted already or has been replaced", path)

    async def _ensure_secret(self, job: ZeroTrainingJob, item: Json) -> None:
        """Create a Secret. Secrets are never read: their name identifies the job's UID, attempt and spec."""
        job_state, name = self.job_states.of(job.uid), item["metadata"]["name"]
        try:
            await self.post(item)
        except AlreadyExists:
            pass
        except ActionRefused as refusal:
            if not refusal.may_exist or not (job_state.secret == name or self._has_pods(job, item)):
                raise
            return
        job_state.secret = name

    def _has_pods(self, job: ZeroTrainingJob, secret: Json) -> bool:
        """Return whether pods of the Secret's attempt exist: none is created before it."""
        pods, _ = self.store.of_job(owner_key(job.namespace, job.uid))
        return any(str(pod.attempt) == secret["metadata"]["labels"][LABEL_ATTEMPT] for pod in pods)

    async def _read(self, job: ZeroTrainingJob, item: Json) -> Json:
        """Return the existing object. Raises ActionRefused if it belongs to another owner."""
        found = await self.api.call(Request(method="GET", path=path_of(item), kind=kind_of(item)))
        if not owned(found, job.uid):
            raise name_taken({"kind": item["kind"], **found})
        return found

    async def _update(self, item: Json, found: Json) -> None:
        """Update an existing object."""
        patch: Json = {}
        if item["kind"] == "ConfigMap" and found.get("data") != item.get("data"):
            patch = {"data": _replacing(found.get("data") or {}, item["data"])}
        elif item["kind"] == "NetworkPolicy" and found.get("spec") != item["spec"]:
            # The installation's networks have changed, or a user has opened the policy.
            patch = {"spec": _replacing(found.get("spec") or {}, item["spec"])}
        if patch:
            await self.merge(item, patch)

    async def merge(self, item: Json, patch: Json) -> None:
        """Merge the patch into the existing object."""
        path, kind = path_of(item), kind_of(item)
        await self.api.call(
            Request(method="PATCH", path=path, kind=kind, body=patch, content_type=MERGE_PATCH)
        )

    async def post(self, item: Json) -> Json:
        """Create the object; return what was sent with the metadata that it got. Raises AlreadyExists,
        ActionRefused, ApiError."""
        try:
            request = Request(
                method="POST", path=collection(item), kind=kind_of(item), body=item, answer=Answer.METADATA
            )
            made = await self.api.call(request)
            return {**item, "metadata": made.get("metadata", item["metadata"])}
        except Forbidden as error:
            raise rejection_of(error, item) from error
        except (AlreadyExists, Conflict):
            raise
        except NotFound as error:
            if item["kind"] not in _OF_OTHERS:
                raise
            # It was served before, so its API was removed or upgraded. The next pass repeats the discovery.
            self.job_states.apis = None
            reason, way_out = _OF_OTHERS[item["kind"]]
            message = f"the cluster no longer serves {kind_of(item)} of {item['apiVersion']}. {way_out}"
            raise ActionRefused(reason, message, lasting=True) from error
        except ApiError as error:
            if error.status in (400, 422):
                raise ActionRefused(Reason.API_REFUSED, str(error), lasting=True) from error
            raise


def _replacing(found: Json, wanted: Json) -> Json:
    """Return the merge patch that makes `found` equal to `wanted`: null removes a key that would stay."""
    patch: Json = {key: None for key in found if key not in wanted}
    for key, value in wanted.items():
        present = found.get(key)
        nested = isinstance(present, dict) and isinstance(value, dict)
        patch[key] = _replacing(present or {}, value) if nested else value
    return patch


def collection(item: Json) -> str:
    """Return the collection's path. The API version tells apart kinds that several schedulers and queues
    share by name."""
    other = f"/apis/{item['apiVersion']}/namespaces/{{namespace}}/{item['kind'].lower()}s"
    return PATHS.get(item["kind"], other).format(namespace=item["metadata"]["namespace"])


def path_of(item: Json) -> str:
    return f"{collection(item)}/{item['metadata']['name']}"


def kind_of(item: Json) -> str:
    return collection(item).rsplit("/", 1)[-1]


def owned(item: Json, job_uid: str) -> bool:
    owners = item["metadata"].get("ownerReferences", ())
    return any(owner.get("uid") == job_uid for owner in owners)


def delete_options(grace_s: int | None) -> Json:
    options: Json = {"propagationPolicy": "Background"}
    return options if grace_s is None else {**options, "gracePeriodSeconds": grace_s}
