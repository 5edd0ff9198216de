"""What every action works with: the API, the pods in memory, and how an object is made or found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from zerotrain.contract.text import one_line
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.api import MERGE_PATCH, Answer, Api, Json, Request
from zerotrain.operator.cluster.channel import WorkerChannel
from zerotrain.operator.cluster.creations import Creations
from zerotrain.operator.cluster.errors import AlreadyExists, ApiError, Conflict, Forbidden, NotFound
from zerotrain.operator.cluster.memory import Memories
from zerotrain.operator.cluster.store import PodStore, owner_key
from zerotrain.operator.constants import LABEL_ATTEMPT, LABEL_JOB, LABEL_JOB_UID, Reason
from zerotrain.operator.reconcile import Problem
from zerotrain.operator.resources import ResourceOptions
from zerotrain.operator.resources.security import IPC_LOCK

log = logging.getLogger(__name__)

PATHS = {
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
}


_OF_OTHERS = {"PodGroup": Reason.GANG_MISSING, "Workload": Reason.QUEUE_MISSING}
"""Kinds whose APIs come and go with somebody else's software, and what is missing then."""

_EXCEEDED = "exceeded quota"


class ActionRefused(Exception):
    """The API server does not let an action happen; the pass ends and the job's conditions say why."""

    def __init__(self, reason: Reason, message: str, *, lasting: bool = False) -> None:
        """`lasting`: only people can change what is refused."""
        message = one_line(message)
        super().__init__(message)
        self.problem = Problem(reason=str(reason), message=message, lasting=lasting)

    @property
    def may_exist(self) -> bool:
        """Whether the object may be there in spite of it: quotas are looked at before the storage, and a full
        one refuses also what exists already."""
        return self.problem.reason == Reason.QUOTA_EXCEEDED


class Unfinished(Exception):
    """An action has more to do than others can wait for: the job's next pass goes on with it.

    `made`: pods that were let in by then.
    """

    def __init__(self, made: int) -> None:
        super().__init__(f"{made} pods were let in, and more are left")
        self.made = made


TURN_S = 0.25
"""Pods are let in for so long in one pass. A job of thousands would not see a failure, a suspension or its
own deletion before the last of them."""


SHARED_S = 0.1
"""If what the pods share took so long to make, the API server is busy: the first pods would take as long
again, and are let in by a pass of their own."""


def turn() -> Callable[[], bool]:
    """Tells whether the turn that begins now is over."""
    return since_now(TURN_S)


def since_now(seconds: float) -> Callable[[], bool]:
    """Tells whether so much time has gone."""
    now_s = asyncio.get_running_loop().time
    until = now_s() + seconds
    return lambda: now_s() >= until


async def together(*acts: Awaitable[None]) -> None:
    """All of them at once, each to its end; then the first error is raised.

    `asyncio.gather` alone raises at once and leaves the others behind: they would go on beside the job's next
    pass, or after a replica that ends has given its lease back.
    """
    for outcome in await asyncio.gather(*acts, return_exceptions=True):
        if outcome is not None:
            raise outcome


@dataclass(frozen=True, kw_only=True)
class Hands:
    """The context of all actions."""

    api: Api
    store: PodStore
    memories: Memories
    channel: WorkerChannel
    options: ResourceOptions
    operator_key: bytes
    creations: Creations

    async def ensure(self, job: ZeroTrainingJob, item: Json) -> None:
        """Make the object, or see that what is there belongs to this job and is up to date."""
        if item["kind"] == "Secret":
            await self._ensure_secret(job, item)
            return
        found = await self.find_or_make(job, item)
        if found is not None:
            await self._update(item, found)

    async def find_or_make(self, job: ZeroTrainingJob, item: Json) -> Json | None:
        """Make the object, or read the one of this job that is there by its name; None where it was made."""
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
        """Make an object of the running attempt again if somebody deleted it, or opened the policy."""
        try:
            if item["kind"] != "Secret":
                await self._update(item, await self._read(job, item))
                return
            await self.post(item)
        except AlreadyExists:
            return
        except ActionRefused as refusal:
            # The attempt's pods were let in behind it: most likely it is there. It is tried again when due.
            if not refusal.may_exist:
                raise
            return
        except NotFound:
            await self.ensure(job, item)
        log.warning("%s/%s: %s was gone and is made again", job.namespace, job.name, item["kind"])

    async def remove(self, path: str, *, kind: str, job_uid: str) -> None:
        """Delete the object, unless one of that name belongs to somebody else or is another one by now."""
        try:
            found = await self.api.call(Request(method="GET", path=path, kind=kind))
            if owned(found, job_uid):
                options = {**delete_options(None), "preconditions": {"uid": found["metadata"]["uid"]}}
                await self.api.call(Request(method="DELETE", path=path, kind=kind, body=options))
        except (NotFound, Conflict):
            log.debug("%s is gone already, or is another one by now", path)

    async def _ensure_secret(self, job: ZeroTrainingJob, item: Json) -> None:
        """Secrets are created and never read: their name tells the job's life, attempt and spec."""
        memory, name = self.memories.of(job.uid), item["metadata"]["name"]
        try:
            await self.post(item)
        except AlreadyExists:
            pass
        except ActionRefused as refusal:
            if not refusal.may_exist or not (memory.secret == name or self._has_pods(job, item)):
                raise
            return
        memory.secret = name

    def _has_pods(self, job: ZeroTrainingJob, secret: Json) -> bool:
        """Whether pods of the Secret's attempt exist: none is made before it."""
        pods, _ = self.store.of_job(owner_key(job.namespace, job.uid))
        return any(str(pod.attempt) == secret["metadata"]["labels"][LABEL_ATTEMPT] for pod in pods)

    async def _read(self, job: ZeroTrainingJob, item: Json) -> Json:
        """The object that is there; refused where it belongs to somebody else."""
        found = await self.api.call(Request(method="GET", path=path_of(item), kind=kind_of(item)))
        if not owned(found, job.uid):
            raise name_taken({"kind": item["kind"], **found})
        return found

    async def _update(self, item: Json, found: Json) -> None:
        """Bring an object that is there up to date."""
        patch: Json = {}
        if item["kind"] == "ConfigMap" and found.get("data") != item.get("data"):
            patch = {"data": _replacing(found.get("data") or {}, item["data"])}
        elif item["kind"] == "NetworkPolicy" and found.get("spec") != item["spec"]:
            # The installation's networks have changed, or somebody has opened the policy.
            patch = {"spec": _replacing(found.get("spec") or {}, item["spec"])}
        if patch:
            await self.merge(item, patch)

    async def merge(self, item: Json, patch: Json) -> None:
        """Change the object of that name."""
        path, kind = path_of(item), kind_of(item)
        await self.api.call(
            Request(method="PATCH", path=path, kind=kind, body=patch, content_type=MERGE_PATCH)
        )

    async def post(self, item: Json) -> Json:
        """Create; what was sent with the metadata it got. Raises AlreadyExists, ActionRefused, ApiError."""
        try:
            request = Request(
                method="POST", path=collection(item), kind=kind_of(item), body=item, answer=Answer.METADATA
            )
            made = await self.api.call(request)
            return {**item, "metadata": made.get("metadata", item["metadata"])}
        except Forbidden as error:
            raise _refusal(error, item) from error
        except (AlreadyExists, Conflict):
            raise
        except NotFound as error:
            if item["kind"] not in _OF_OTHERS:
                raise
            # Found once and gone since: its API was removed or upgraded. What is served is looked for anew.
            self.memories.apis = None
            raise ActionRefused(_OF_OTHERS[item["kind"]], f"{item['apiVersion']} is gone: {error}") from error
        except ApiError as error:
            if error.status in (400, 422):
                raise ActionRefused(Reason.API_REFUSED, str(error), lasting=True) from error
            raise


def _refusal(error: Forbidden, item: Json) -> ActionRefused:
    """The way out of what the API server's own admission says. Its text is cut to begin with what is wrong:
    which of the pods was refused first differs from pass to pass."""
    told = str(error)
    if "ephemeral-storage" in told:
        told += ". The limit is spec.scratch.ephemeralStorage: lower it to what the namespace allows"
    if _EXCEEDED in told:
        return ActionRefused(Reason.QUOTA_EXCEEDED, told[told.index(_EXCEEDED) :])
    if "violates PodSecurity" not in told:
        return ActionRefused(Reason.API_REFUSED, told, lasting=True)
    way_out = "Take out of the job what it names, or let the namespace allow it"
    if IPC_LOCK in told:
        way_out = (
            "spec.resources.rdma needs IPC_LOCK, which the level privileged alone allows. Make the job anew "
            "without it, or let the namespace allow it"
        )
    said, namespace = told[told.index("violates PodSecurity") :], item["metadata"]["namespace"]
    label = f"pod-security.kubernetes.io/enforce={_least_level(said)}"
    command = f"kubectl label namespace {namespace} {label} --overwrite"
    return ActionRefused(Reason.POD_SECURITY, f"{said}. {way_out}: {command}", lasting=True)


_BEYOND_BASELINE = (
    IPC_LOCK,
    "host namespaces",
    "hostPath volume",
    "hostPort",
    "hostProcess",
    "non-default capabilities",
    "privileged (",
    "/proc mount",
    "procMount",
    "forbidden sysctls",
    "seLinux",
    "forbidden AppArmor",
)
"""What the level baseline forbids, too, in the words of Pod Security's checks."""


def _least_level(said: str) -> str:
    """The strictest level that lets the pods in which this refuses."""
    is_restricted = said.startswith('violates PodSecurity "restricted')
    return (
        "baseline" if is_restricted and not any(word in said for word in _BEYOND_BASELINE) else "privileged"
    )


def _replacing(found: Json, wanted: Json) -> Json:
    """The merge patch that makes `found` equal to `wanted`: null takes a key away that would stay."""
    patch: Json = {key: None for key in found if key not in wanted}
    for key, value in wanted.items():
        present = found.get(key)
        nested = isinstance(present, dict) and isinstance(value, dict)
        patch[key] = _replacing(present or {}, value) if nested else value
    return patch


def collection(item: Json) -> str:
    return _path(item).format(namespace=item["metadata"]["namespace"])


def path_of(item: Json) -> str:
    return f"{collection(item)}/{item['metadata']['name']}"


def kind_of(item: Json) -> str:
    return _path(item).rsplit("/", 1)[-1]


def _path(item: Json) -> str:
    """Kinds that several schedulers and queues share by name are told apart by their API version."""
    other = f"/apis/{item['apiVersion']}/namespaces/{{namespace}}/{item['kind'].lower()}s"
    return PATHS.get(item["kind"], other)


def owned(item: Json, job_uid: str) -> bool:
    owners = item["metadata"].get("ownerReferences", ())
    return any(owner.get("uid") == job_uid for owner in owners)


def name_taken(item: Json) -> ActionRefused:
    meta, kind = item["metadata"], item.get("kind") or "object"
    labels = meta.get("labels") or {}
    name, uid = labels.get(LABEL_JOB), labels.get(LABEL_JOB_UID)
    if name and uid and not meta.get("ownerReferences"):
        # As `kubectl delete --cascade=orphan` leaves it. A NetworkPolicy that goes opens the pods it is for.
        told = (
            f"{kind} {meta['name']} is left over from an earlier job {name} (uid {uid}), whose pods may "
            f"still run: end them (kubectl delete pods -l {LABEL_JOB_UID}={uid}), then delete it"
        )
        return ActionRefused(Reason.NAME_TAKEN, told, lasting=True)
    leaving = " and is being deleted" if meta.get("deletionTimestamp") else "; delete it or rename the job"
    told = f"{kind} {meta['name']} belongs to somebody else{leaving}"
    return ActionRefused(Reason.NAME_TAKEN, told, lasting=not meta.get("deletionTimestamp"))


def delete_options(grace_s: int | None) -> Json:
    options: Json = {"propagationPolicy": "Background"}
    return options if grace_s is None else {**options, "gracePeriodSeconds": grace_s}
