"""Reading and writing jobs: the newest known body of each, the one status write of a pass."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.api.job_text import kept, read_job
from zerotrain.operator.api.status import CheckpointStatus, ProgressStatus
from zerotrain.operator.cluster import words
from zerotrain.operator.cluster.api import Answer, Api, Json, Request
from zerotrain.operator.cluster.errors import NotFound, Unavailable
from zerotrain.operator.cluster.paging import Listing
from zerotrain.operator.cluster.scope import scoped
from zerotrain.operator.cluster.store import JobKey, version_of
from zerotrain.operator.constants import API_VERSION, GROUP, KIND, PLURAL, VERSION

log = logging.getLogger(__name__)

ALL_JOBS = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
SERVED_AGAIN_S = 2.0
"""Between two questions whether our kind is served."""


def job_path(key: JobKey) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{key.namespace}/{PLURAL}/{key.name}"


class _ByPhase(dict[JobKey, Json]):
    """Jobs, and the keys of each phase: most jobs of a cluster have ended, and who looks for the others twice
    a second passes them by. Only assignment and `del` keep the keys."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[str, dict[JobKey, None]] = {}
        self._phases: dict[JobKey, str] = {}
        """Where each key stands: one whose body was changed in place must still be found there."""

    def __setitem__(self, key: JobKey, job: Json) -> None:
        self._forget(key)
        super().__setitem__(key, job)
        phase = self._phases[key] = phase_of(job)
        self._keys.setdefault(phase, {})[key] = None

    def __delitem__(self, key: JobKey) -> None:
        self._forget(key)
        super().__delitem__(key)

    def keys_in(self, phase: str) -> Iterable[JobKey]:
        return self._keys.get(phase, ())

    def _forget(self, key: JobKey) -> None:
        if key in self._phases:
            del self._keys[self._phases.pop(key)][key]


class JobCache:
    """The newest body of every job, from watch events and from the answers to our own writes, with the first
    status that is decided and not written yet."""

    def __init__(self) -> None:
        self._jobs = _ByPhase()
        self._owed: dict[str, Json] = {}
        """First statuses that no write has carried yet, by the job's UID."""
        self._doubted: set[str] = set()
        """UIDs of jobs without a status that were known before this replica led, and not heard of since."""

    def put(self, job: Json) -> bool:
        """Keep `job` unless a newer one is known; whether it was news."""
        key = key_of(job)
        old = self._jobs.get(key)
        # Also of two lives of one name: versions are counted over all objects of a kind, and late news of
        # the first must not hide the second.
        if old is not None and version_of(job) <= version_of(old):
            return False
        job = kept(job)
        uid = job["metadata"]["uid"]
        self._doubted.discard(uid)
        if old is not None and old["metadata"]["uid"] != uid:
            self._settle(old["metadata"]["uid"])
        if "status" in job:
            self._owed.pop(uid, None)
        elif uid in self._owed:  # an edit of the spec, or a label
            job = {**job, "status": self._owed[uid]}
        self._jobs[key] = job
        return True

    def wrote(self, job: Json) -> None:
        """Keep the answer to a write of ours. It must not bring back a job that is gone."""
        held = self._jobs.get(key_of(job))
        if held is not None and held["metadata"]["uid"] == job["metadata"]["uid"]:
            self.put(job)

    def owe(self, job: Json, status: Json) -> Json:
        """The job with its first status, kept as if it were written until a body comes that has one."""
        self._owed[job["metadata"]["uid"]] = status
        body = {**job, "status": status}
        self._jobs[key_of(job)] = body
        return body

    def owes(self, uid: str) -> bool:
        """Whether the job's status is ours alone so far."""
        return uid in self._owed

    def doubt(self) -> None:
        """This replica begins to lead: somebody else may have begun what it knows of without a status."""
        self._doubted = {job["metadata"]["uid"] for job in self._jobs.values() if "status" not in job}

    def doubts(self, uid: str) -> bool:
        """Whether the job may have a status that this replica has not heard of."""
        return uid in self._doubted

    def remove(self, job: Mapping[str, Any]) -> bool:
        """Forget a deleted job, unless its name is another job's by now."""
        self._settle(job["metadata"]["uid"])
        key = key_of(job)
        held = self._jobs.get(key)
        if held is None or held["metadata"]["uid"] != job["metadata"]["uid"]:
            return False
        del self._jobs[key]
        return True

    def _settle(self, uid: str) -> None:
        """Nothing is open of this life any more."""
        self._owed.pop(uid, None)
        self._doubted.discard(uid)

    def get(self, key: JobKey) -> Json | None:
        return self._jobs.get(key)

    def in_phases(self, phases: Iterable[str]) -> list[tuple[JobKey, Json]]:
        """Those whose status says one of `phases`; "" is that of a job without any."""
        return [(key, self._jobs[key]) for phase in phases for key in self._jobs.keys_in(phase)]

    def __iter__(self) -> Iterator[tuple[JobKey, Json]]:
        return iter(list(self._jobs.items()))


def phase_of(job: Mapping[str, Any]) -> str:
    """As the status says; "" before there is one."""
    return str(job.get("status", {}).get("phase", ""))


def with_kind(job: Json) -> Json:
    """Items of a list come without it."""
    return {"apiVersion": API_VERSION, "kind": KIND, **job}


def key_of(job: Mapping[str, Any]) -> JobKey:
    return JobKey(job["metadata"]["namespace"], job["metadata"]["name"])


def status_body(status: ZeroTrainingJobStatus) -> Json:
    """As the API server takes it. What says nothing and reads back as such is left out: the API server
    checks, copies and assigns every field to its manager at every write."""
    silent = {name for name, nothing in _NOTHING.items() if getattr(status, name) == nothing}
    body = _without_empty_lists(
        status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=silent)
    )
    if status.shape is not None:
        body["shape"] = status.shape.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return body


_NOTHING = {"progress": ProgressStatus(), "checkpoint": CheckpointStatus()}


def _without_empty_lists(part: Json) -> Json:
    """An empty part may stand for itself and stays."""
    said = {name: value for name, value in part.items() if value != []}
    return {
        name: _without_empty_lists(value) if isinstance(value, dict) else value
        for name, value in said.items()
    }


class JobClient:
    """Jobs at the API server."""

    def __init__(self, api: Api, namespaces: Sequence[str] = ()) -> None:
        self._api, self._namespaces = api, tuple(namespaces)

    async def wait_until_served(self) -> None:
        """Until the API server knows our kind. One that cannot answer is waited for, as it may be upgraded
        right now; but from outside a cluster one that nothing was heard of yet may be a wrong address, and
        the error is raised."""
        address_is_known, is_away = self._api.connection.in_cluster, False
        while True:
            try:
                if await self._is_served():
                    return
                log.warning("the API server does not know %s.%s yet; apply crds/", PLURAL, GROUP)
                address_is_known, is_away = True, False
            except Unavailable as error:
                address_is_known = address_is_known or error.status != 0
                if not address_is_known:
                    raise
                if not is_away:
                    log.warning("the API server is not available, waiting for it: %s", error)
                is_away = True
            await asyncio.sleep(SERVED_AGAIN_S)

    async def _is_served(self) -> bool:
        path = f"/apis/{GROUP}/{VERSION}"
        try:
            known = await self._api.call(Request(method="GET", path=path, kind="discovery"))
        except NotFound:
            return False
        return any(item["name"] == PLURAL for item in known.get("resources", ()))

    async def get(self, key: JobKey) -> Json:
        text = await self._api.call_raw(Request(method="GET", path=job_path(key), kind=PLURAL))
        return read_job(text, words.read)

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """What is listed one by one: the namespaces, or None for the whole cluster."""
        return self._namespaces or (None,)

    async def list(self, namespace: str | None = None) -> AsyncIterator[Json]:
        """The jobs of one scope."""
        (path,) = scoped(ALL_JOBS, () if namespace is None else (namespace,))
        async for text in Listing(self._api, path=path, kind=PLURAL):
            try:
                yield with_kind(read_job(text, words.read))
            except ValueError as error:
                log.warning("a job that cannot be read is passed over: %s: %.200r", error, text)

    async def write_status(self, job: Json, status: ZeroTrainingJobStatus) -> Json:
        """Replace the status of exactly the version that was reconciled. Raises Conflict when it is not the
        newest any more, NotFound when the job is gone."""
        # The API server takes nothing but the status from it, so the spec need not make the way there.
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {
                name: job["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")
            },
            "status": status_body(status),
        }
        path = f"{job_path(key_of(job))}/status"
        request = Request(method="PUT", path=path, kind=f"{PLURAL}/status", body=body, answer=Answer.METADATA)
        answer = read_job(await self._api.call_raw(request), words.read)
        return {**job, "metadata": answer["metadata"], "status": body["status"]}

    async def delete(self, job: Json) -> None:
        """Delete exactly the version that was reconciled; its objects follow by their ownerReferences. Raises
        Conflict when it is not the newest any more: the edit may be one that keeps the job."""
        meta = job["metadata"]
        preconditions = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        body = {"propagationPolicy": "Background", "preconditions": preconditions}
        await self._api.call(Request(method="DELETE", path=job_path(key_of(job)), kind=PLURAL, body=body))
