"""Discovery of what admission needs of the whole cluster, when a job wants it: the gang schedulers and queues
that the API server serves, with their versions, and the values of PriorityClasses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.api import Api, Json, Request
from zerotrain.operator.cluster.errors import Forbidden, NotFound
from zerotrain.operator.reconcile.observe import ClusterApis
from zerotrain.operator.resources.gang import GROUPS, RESOURCE, VERSIONS
from zerotrain.operator.resources.kueue import KUEUE_GROUP, KUEUE_VERSIONS

log = logging.getLogger(__name__)

PRIORITY_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"

PRIORITIES_MAX_AGE_S = 10.0
"""Seconds for which a list is reused by later requests."""


async def discover(api: Api) -> ClusterApis:
    """Return the gang schedulers and the Kueue version that the cluster serves. Raises ApiError."""
    gangs = {}
    for gang, group in GROUPS.items():
        found = await _first_served(api, group, VERSIONS[gang], RESOURCE)
        if found is not None:
            gangs[gang] = found
    kueue = await _first_served(api, KUEUE_GROUP, KUEUE_VERSIONS, "workloads")
    return ClusterApis(at=api.time.now(), gangs=gangs, kueue=kueue)


async def _first_served(api: Api, group: str, versions: Sequence[str], resource: str) -> str | None:
    """Return the first of `versions` that the cluster serves with the resource; None if there is none."""
    served = {item["version"] for item in (await _get(api, f"/apis/{group}")).get("versions", ())}
    for version in versions:
        name = f"{group}/{version}"
        if version not in served:
            continue
        listed = await _get(api, f"/apis/{name}")
        if any(item["name"] == resource for item in listed.get("resources", ())):
            return name
    return None


async def _get(api: Api, path: str) -> dict[str, list[dict[str, str]]]:
    try:
        return await api.call(Request(method="GET", path=path, kind="discovery"))
    except NotFound:
        return {}


class Priorities:
    """PriorityClasses of the cluster, listed once for all jobs that need them within seconds: each waiting
    job requests its value in every pass until it has one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._classes: list[Json] = []
        self._listed_at = -math.inf
        self._refused = False
        self._lock = asyncio.Lock()

    async def of(self, api: Api, job: ZeroTrainingJob) -> int:
        """Return the priority of the job's workers, from its class or else the cluster's default. A class
        that does not exist counts as 0; the API server will reject the pods and name it."""
        scheduling = job.spec.scheduling
        wanted = scheduling.priority_class_name if scheduling is not None else None
        asked_at = self._clock()
        async with self._lock:
            found = self._find(wanted) if asked_at - self._listed_at <= PRIORITIES_MAX_AGE_S else None
            # A class that is not in the list may be newer than the list.
            if found is None and (wanted is not None or asked_at - self._listed_at > PRIORITIES_MAX_AGE_S):
                await self._list(api)
                found = self._find(wanted)
        return found or 0

    async def _list(self, api: Api) -> None:
        started = self._clock()
        try:
            listed = await api.call(Request(method="GET", path=PRIORITY_CLASSES, kind="priorityclasses"))
        except Forbidden as error:
            # An operator for a few namespaces need not have access to them.
            if not self._refused:
                log.warning("priority classes cannot be read, all jobs count as priority 0: %s", error)
            self._refused, listed = True, {}
        self._classes, self._listed_at = listed.get("items", []), started

    def _find(self, wanted: str | None) -> int | None:
        for item in self._classes:
            if item["metadata"]["name"] == wanted or (wanted is None and item.get("globalDefault")):
                return int(item["value"])
        return None
