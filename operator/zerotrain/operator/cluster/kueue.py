"""Kueue's Workloads of the operator's jobs at the API server: a client, and one watch that starts with the
first job in a queue.

The status is read, changed and replaced at its version. Kueue writes it too, and the next pass repeats a
write that met a conflict.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence

import aiohttp

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.api import Api, Json, Request
from zerotrain.operator.cluster.discovery import discover
from zerotrain.operator.cluster.errors import ApiError, Forbidden, Gone, NotFound, error_of
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.listwatch import Listing, scoped
from zerotrain.operator.cluster.store import JobKey, owner_key
from zerotrain.operator.cluster.workload_status import (
    Flavor,
    StatusChange,
    advanced,
    flavors_of,
    may_release,
    queue_view,
    read_flavor,
)
from zerotrain.operator.constants import LABEL_JOB, LABEL_JOB_UID
from zerotrain.operator.reconcile.observe import QueueView
from zerotrain.operator.reconcile.plan import QueueStep
from zerotrain.operator.resources.kueue import workload_name

log = logging.getLogger(__name__)

WATCH_SECONDS = 300
MAX_PAUSE_S = 10.0

FLAVOR_AGE_S = 30.0
"""Seconds for which a ResourceFlavor is not read again."""


class WorkloadClient:
    """The Workload of one job at the API server."""

    def __init__(self, api: Api, version: str, job: ZeroTrainingJob) -> None:
        self._api = api
        self._path = (
            f"/apis/{version}/namespaces/{job.namespace}/workloads/{workload_name(job.name, job.uid)}"
        )

    async def delete(self) -> None:
        try:
            await self._api.call(Request(method="DELETE", path=self._path, kind="workloads"))
        except NotFound:
            log.debug("%s is gone already", self._path)

    async def advance(self, step: QueueStep, message: str) -> None:
        """Carry out one step on the Workload's status. Raises Conflict when Kueue wrote meanwhile."""
        try:
            found = await self._api.call(Request(method="GET", path=self._path, kind="workloads"))
        except NotFound:
            return
        generation = int(found["metadata"].get("generation", 0))
        change = StatusChange(step=step, message=message, at=self._api.time.now(), generation=generation)
        status = found.get("status", {})
        if step is QueueStep.RELEASE and not may_release(status):
            return
        status = advanced(status, change)
        body = {**found, "status": status}
        path = f"{self._path}/status"
        await self._api.call(Request(method="PUT", path=path, kind="workloads/status", body=body))


class WorkloadWatch:
    """Watch on the Workloads until `run()` is cancelled; idle until a job is in a queue. It covers the whole
    cluster or one namespace: then a rejection affects the jobs of that namespace alone."""

    def __init__(
        self,
        api: Api,
        job_states: JobStates,
        changed: Callable[[JobKey], None],
        namespace: str | None = None,
    ) -> None:
        self._api, self._job_states, self._changed = api, job_states, changed
        self._namespace, self._refused = namespace, False
        self._version: str | None = None
        self._collection = self._api_version = ""
        self._flavors: dict[str, tuple[Flavor, float]] = {}
        """Flavors by name, each with the time of its request: every event of every Workload of a flavor needs
        it."""
        self._alive_at: float | None = None

    @property
    def age_s(self) -> float | None:
        """Return the seconds since the last list, event or bookmark; None until the first list, and while the
        watch is rejected."""
        return None if self._alive_at is None or self._refused else time.monotonic() - self._alive_at

    async def run(self) -> None:
        await self._job_states.queues_wanted.wait()
        while True:
            started = asyncio.get_running_loop().time()
            try:
                if self._version is None:
                    await self._list()
                if self._version is not None:
                    await self._watch()
                if any(view.problem for view in self._job_states.queues.values()):
                    # A flavor that was created or became readable causes no event of the Workload.
                    self._version = None
            except Gone as error:
                log.info("Workload watch: %s; listing again", error)
                self._version = None
            except NotFound as error:
                log.warning("Workload watch: %s; looking for the versions that are served", error)
                self._version = self._job_states.apis = None
            except Forbidden as error:
                await self._be_refused(error)
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                log.warning("Workload watch: %r; trying again", error)
            lasted = asyncio.get_running_loop().time() - started
            await asyncio.sleep(random.uniform(0.05, 0.1) if lasted > MAX_PAUSE_S else random.uniform(0.5, 2))

    async def _be_refused(self, error: Forbidden) -> None:
        """Log the rejection once until access is granted, and mark the namespace's Workloads as incompletely
        known."""
        level = logging.DEBUG if self._refused else logging.WARNING
        log.log(level, "Workloads cannot be watched, and jobs in queues wait until they can: %s", error)
        self._refused, self._version = True, None
        self._job_states.queues_listed.discard(self._namespace)
        await asyncio.sleep(MAX_PAUSE_S)

    async def look(self) -> None:
        """Start the watch if Workloads of jobs exist. A replica that begins to lead calls this: a job whose
        `queueName` was removed while no replica led asks for no watch, and its Workload would keep its quota.
        """
        while not self._job_states.queues_wanted.is_set():
            try:
                if await self._any_left():
                    self._job_states.queues_wanted.set()
                return
            except Forbidden as error:
                log.info("cannot search for orphaned Workloads: %s", error)
                return
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                log.warning("cannot search for orphaned Workloads: %r; trying again", error)
                await asyncio.sleep(random.uniform(0.5, 2))

    async def _any_left(self) -> bool:
        version = (await discover(self._api)).kueue
        if version is None:
            return False
        params = {"labelSelector": LABEL_JOB, "limit": "1"}
        request = Request(method="GET", path=self._path(version), kind="workloads", params=params)
        try:
            return bool((await self._api.call(request)).get("items"))
        except NotFound:
            return False  # Kueue was removed from the cluster at this moment, with all its Workloads

    def _path(self, version: str) -> str:
        return scoped(f"/apis/{version}/workloads", [self._namespace] if self._namespace else [])[0]

    async def _list(self) -> None:
        apis = self._job_states.apis
        if apis is None or apis.kueue is None:
            apis = self._job_states.apis = await discover(self._api)
        if apis.kueue is None:
            await asyncio.sleep(MAX_PAUSE_S)
            return
        self._collection, self._api_version = self._path(apis.kueue), apis.kueue
        found, job_keys = dict[str, QueueView](), dict[str, JobKey]()
        listing = Listing(
            self._api, path=self._collection, kind="workloads", params={"labelSelector": LABEL_JOB}
        )
        async for text in listing:
            try:
                item = json_codec.read(text)
                if (key := _owner(item)) is not None:
                    found[key], job_keys[key] = await self._view(item), _job_key(item)
            except ApiError:
                raise
            except Exception:
                log.exception("skipping a Workload that cannot be read: %.200r", text)
        before = self._job_states.queues
        self._job_states.queues = {**self._of_others(before), **found}
        self._job_states.queues_listed.add(self._namespace)
        self._refused, self._alive_at = False, time.monotonic()
        for key, job_key in job_keys.items():
            if before.get(key) != found[key]:
                self._changed(job_key)
        self._version = str(listing.metadata["resourceVersion"])

    def _of_others(self, queues: Mapping[str, QueueView]) -> dict[str, QueueView]:
        """Return the views that the watches of other namespaces keep."""
        if self._namespace is None:
            return {}
        own = owner_key(self._namespace, "")
        return {key: view for key, view in queues.items() if not key.startswith(own)}

    async def _watch(self) -> None:
        params = {
            "labelSelector": LABEL_JOB,
            "resourceVersion": self._version or "",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        async for event in self._api.watch(self._collection, params, kind="workloads"):
            self._alive_at = time.monotonic()
            kind, item = event["type"], event["object"]
            if kind == "ERROR":
                raise error_of("WATCH workloads", int(item.get("code", 500)), str(item).encode())
            if kind != "BOOKMARK":
                try:
                    await self._take(kind, item)
                except ApiError:
                    raise
                except Exception:
                    log.exception("skipping a Workload that cannot be read: %.200r", item.get("metadata"))
            self._version = item["metadata"]["resourceVersion"]

    async def _take(self, kind: str, item: Json) -> None:
        key, queues = _owner(item), self._job_states.queues
        if key is None:
            return
        before = queues.get(key)
        if kind == "DELETED":
            queues.pop(key, None)
        else:
            queues[key] = await self._view(item)
        if queues.get(key) != before:
            self._changed(_job_key(item))

    async def _view(self, item: Json) -> QueueView:
        status, version = item.get("status", {}), item.get("apiVersion") or self._api_version
        names = flavors_of(status)
        flavors = [await self._flavor(version, name) for name in names] if names else []
        return queue_view(item, flavors)

    async def _flavor(self, version: str, name: str) -> Flavor:
        now = asyncio.get_running_loop().time()
        known = self._flavors.get(name)
        if known is not None and now - known[1] < FLAVOR_AGE_S:
            return known[0]
        path = f"/apis/{version}/resourceflavors/{name}"
        try:
            found = await self._api.call(Request(method="GET", path=path, kind="resourceflavors"))
        except NotFound:
            self._flavors.pop(name, None)
            return Flavor(problem=f"there is no ResourceFlavor {name}")
        except Forbidden:
            return Flavor(problem=f"ResourceFlavor {name} may not be read: grant `get` on resourceflavors")
        spec = found.get("spec", {})
        flavor = read_flavor(
            f"ResourceFlavor {name}", spec.get("nodeLabels", {}), spec.get("tolerations", ())
        )
        self._flavors[name] = flavor, now
        return flavor


def workload_watches(
    api: Api, job_states: JobStates, changed: Callable[[JobKey], None], namespaces: Sequence[str]
) -> list[WorkloadWatch]:
    """Return one watch for the whole cluster, or one for each namespace."""
    return [WorkloadWatch(api, job_states, changed, namespace) for namespace in namespaces or (None,)]


def _owner(item: Json) -> str | None:
    """Return the `owner_key` of the job that owns the Workload; None where the Workload only carries our
    labels. Any user who may create objects in some namespace could write those, and also the UID of another
    namespace's job."""
    meta = item["metadata"]
    labels = meta.get("labels", {})
    uid, name = labels.get(LABEL_JOB_UID), labels.get(LABEL_JOB)
    owned = any(owner.get("uid") == uid for owner in meta.get("ownerReferences", ()))
    if not owned or uid is None or name is None or meta["name"] != workload_name(name, uid):
        return None
    return owner_key(meta["namespace"], uid)


def _job_key(item: Json) -> JobKey:
    return JobKey(item["metadata"]["namespace"], item["metadata"]["labels"][LABEL_JOB])
