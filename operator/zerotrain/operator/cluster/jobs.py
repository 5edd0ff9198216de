"""Reading and writing jobs: the newest known body of each, and the one status write of a pass."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.api.job_text import kept, read_job
from zerotrain.operator.api.status import CheckpointStatus, ProgressStatus
from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.api import Answer, Api, Json, Request
from zerotrain.operator.cluster.errors import NotFound, Unavailable
from zerotrain.operator.cluster.listwatch import Listing, scoped
from zerotrain.operator.cluster.store import JobKey, version_of
from zerotrain.operator.constants import API_VERSION, GROUP, KIND, PLURAL, VERSION

log = logging.getLogger(__name__)

ALL_JOBS = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
SERVED_AGAIN_S = 2.0
"""Seconds between two requests that ask whether the API server serves the CRD."""


def job_path(key: JobKey) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{key.namespace}/{PLURAL}/{key.name}"


class _ByPhase(dict[JobKey, Json]):
    """Jobs with an index of their keys by phase. Most jobs of a cluster have ended, and the readers that look
    for the others twice a second skip them. Only assignment and `del` maintain the index."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[str, dict[JobKey, None]] = {}
        self._phases: dict[JobKey, str] = {}
        """Phase under which each key is indexed: a job whose body was changed in place must still be found
        there."""

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
    """Newest body of every job, from watch events and from the answers to our own writes."""

    def __init__(self) -> None:
        self._jobs = _ByPhase()

    def put(self, job: Json) -> bool:
        """Keep `job` unless a newer body is known. Return whether it was new."""
        key = key_of(job)
        old = self._jobs.get(key)
        # This also holds for two jobs of one name in succession: resource versions are counted over all
        # objects of a kind, and late events of the first job must not hide the second.
        if old is not None and version_of(job) <= version_of(old):
            return False
        self._jobs[key] = kept(job)
        return True

    def wrote(self, job: Json) -> None:
        """Keep the answer to a write of ours. It must not bring back a job that was deleted."""
        held = self._jobs.get(key_of(job))
        if held is not None and held["metadata"]["uid"] == job["metadata"]["uid"]:
            self.put(job)

    def remove(self, job: Mapping[str, Any]) -> bool:
        """Forget a deleted job, unless another job has its name by now. Return whether it was forgotten."""
        key = key_of(job)
        held = self._jobs.get(key)
        if held is None or held["metadata"]["uid"] != job["metadata"]["uid"]:
            return False
        del self._jobs[key]
        return True

    def get(self, key: JobKey) -> Json | None:
        return self._jobs.get(key)

    def in_phases(self, phases: Iterable[str]) -> list[tuple[JobKey, Json]]:
        """Return the jobs whose status has one of `phases`; "" stands for jobs without a status."""
        return [(key, self._jobs[key]) for phase in phases for key in self._jobs.keys_in(phase)]

    def older_in_shortage(self, job: Json) -> str | None:
        """Return the name of the oldest job of the namespace that is older than `job` and lacks a part of
        what it needs: such jobs give it back one after the other. None unless `job` itself lacks a part or
        gave its part back, as no other job needs to know."""
        status = job.get("status", {})
        if not (status.get("shortage") or status.get("givenBack")):
            return None
        own, namespace = _age(job), job["metadata"]["namespace"]
        older = [
            age
            for key, other in self.in_phases(("Pending", "Starting"))
            if key.namespace == namespace and other["status"].get("shortage") and (age := _age(other)) < own
        ]
        return min(older)[1] if older else None

    def __iter__(self) -> Iterator[tuple[JobKey, Json]]:
        return iter(list(self._jobs.items()))


def _age(job: Json) -> tuple[str, str]:
    """Return a key that orders jobs of one namespace by age; the API server's timestamps are whole
    seconds."""
    return job["metadata"].get("creationTimestamp", ""), job["metadata"]["name"]


def phase_of(job: Mapping[str, Any]) -> str:
    """Return the phase of the job's status; "" before there is a status."""
    return str(job.get("status", {}).get("phase", ""))


def with_kind(job: Json) -> Json:
    """Return the job with its API version and kind, which items of a list lack."""
    return {"apiVersion": API_VERSION, "kind": KIND, **job}


def key_of(job: Mapping[str, Any]) -> JobKey:
    return JobKey(job["metadata"]["namespace"], job["metadata"]["name"])


def status_body(status: ZeroTrainingJobStatus) -> Json:
    """Return the status as it is sent to the API server. Parts that are empty and read back as the same value
    are left out: the API server checks, copies and assigns every field to its manager at every write."""
    silent = {name for name, nothing in _NOTHING.items() if getattr(status, name) == nothing}
    body = _without_empty_lists(
        status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=silent)
    )
    if status.shape is not None:
        body["shape"] = status.shape.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return body


_NOTHING = {"progress": ProgressStatus(), "checkpoint": CheckpointStatus()}


def _without_empty_lists(part: Json) -> Json:
    """Return `part` without empty lists. An empty mapping may have a meaning and stays."""
    return {
        name: _without_empty_lists(value) if isinstance(value, dict) else value
        for name, value in part.items()
        if value != []
    }


class JobClient:
    """Client for jobs at the API server."""

    def __init__(self, api: Api, namespaces: Sequence[str] = ()) -> None:
        self._api, self._namespaces = api, tuple(namespaces)

    async def wait_until_served(self) -> None:
        """Wait until the API server serves the CRD. An API server that cannot answer is waited for, as it may
        be in an upgrade. Outside of a cluster, one that has not answered yet may be a wrong address, and
        Unavailable is raised."""
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
        return read_job(text, json_codec.read)

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """Return what is listed separately: the namespaces, or None for the whole cluster."""
        return self._namespaces or (None,)

    async def list(self, namespace: str | None = None) -> AsyncIterator[Json]:
        """Iterate over the jobs of one scope."""
        (path,) = scoped(ALL_JOBS, () if namespace is None else (namespace,))
        async for text in Listing(self._api, path=path, kind=PLURAL):
            try:
                yield with_kind(read_job(text, json_codec.read))
            except ValueError as error:
                log.warning("skipping a job that cannot be read: %s: %.200r", error, text)

    async def write_status(self, job: Json, status: ZeroTrainingJobStatus) -> Json:
        """Replace the status of exactly the version that was reconciled. Raises Conflict when a newer version
        exists, NotFound when the job is gone."""
        # The API server reads nothing but the status from the body, so the spec is not sent.
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
        answer = read_job(await self._api.call_raw(request), json_codec.read)
        return {**job, "metadata": answer["metadata"], "status": body["status"]}

    async def delete(self, job: Json) -> None:
        """Delete exactly the version that was reconciled; its objects follow by their ownerReferences. Raises
        Conflict when a newer version exists: the edit may be one that keeps the job."""
        meta = job["metadata"]
        preconditions = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        body = {"propagationPolicy": "Background", "preconditions": preconditions}
        await self._api.call(Request(method="DELETE", path=job_path(key_of(job)), kind=PLURAL, body=body))
