"""The Services that the jobs of a namespace share to find worker 0: made for the first job that needs one,
deleted when no job is left that might.

They belong to no job, so the garbage collector cannot tell when they may go.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import timedelta

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions.hands import PATHS, ActionRefused, Hands, delete_options, name_taken
from zerotrain.operator.cluster.api import Json, Request
from zerotrain.operator.cluster.errors import AlreadyExists, ApiError, Conflict, NotFound
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.meeting_places import Place
from zerotrain.operator.cluster.scope import scoped
from zerotrain.operator.constants import FIELD_MANAGER, LABEL_JOB, RENDEZVOUS_SERVICES
from zerotrain.operator.resources import rendezvous_name, rendezvous_service

log = logging.getLogger(__name__)

FRESH = timedelta(seconds=10)
"""A Service that was found as it should be is not asked for again within this, however many jobs start."""

_PAGE = "500"
_MANAGED_BY = "app.kubernetes.io/managed-by"
_OURS = f"{_MANAGED_BY}={FIELD_MANAGER},!{LABEL_JOB}"
_COMPARED = ("clusterIP", "publishNotReadyAddresses", "selector")


async def ensure(hands: Hands, job: ZeroTrainingJob) -> None:
    """See to it that the job's ranks find worker 0. Raises ActionRefused where the name is somebody else's,
    ApiError."""
    item = rendezvous_service(job)
    if item is None:
        return
    known, place = hands.places, Place(job.namespace, item["metadata"]["name"])
    async with known.locks[place]:
        seen = known.seen.get(place)
        if seen is None or hands.api.time.now() >= seen + FRESH:
            await _see_to(hands, item, place)
            known.seen[place] = hands.api.time.now()


async def tidy(hands: Hands, scope: str | None, jobs: JobCache) -> None:
    """Delete those of a namespace (None: of all) that no job might use. `jobs` must know all jobs there. What
    the API server refuses is left for the next time."""
    try:
        await _tidy(hands, scope, jobs)
    except ApiError as error:
        log.warning("looking for the Services that no job might use: %s", error)


async def _tidy(hands: Hands, scope: str | None, jobs: JobCache) -> None:
    known = hands.places
    if scope not in known.listed:
        async for place in _there(hands, scope):
            known.seen.setdefault(place, None)
        known.listed.add(scope)
    wanted = _wanted(jobs)
    for place in [one for one in known.seen if scope in (None, one.namespace) and one not in wanted]:
        try:
            await _tidy_one(hands, place, jobs)
        except ApiError as error:
            log.warning("%s: deleting Service %s, which no job might use: %s", *place, error)


async def _tidy_one(hands: Hands, place: Place, jobs: JobCache) -> None:
    known = hands.places
    async with known.locks[place]:
        # A job that came meanwhile is among `jobs` before it asks for its Service.
        if place not in _wanted(jobs):
            known.seen[place] = None
            await _delete(hands, place)
            known.seen.pop(place, None)  # forgotten meanwhile where the lease was lost
    known.locks.pop(place, None)


def _wanted(jobs: JobCache) -> set[Place]:
    """Of all jobs, whatever they do: which of them will run again nobody knows."""
    return {Place(key.namespace, rendezvous_name(job["metadata"]["uid"])) for key, job in jobs}


async def _see_to(hands: Hands, item: Json, place: Place) -> None:
    found = await _read(hands, place) if place in hands.places.seen else None
    if found is None:
        try:
            await hands.post(item)
            return
        except AlreadyExists:
            found = await _read(hands, place)
        except ActionRefused as refusal:
            found = await _read(hands, place) if refusal.may_exist else None
            if found is None:
                raise
    if found is None:
        raise Conflict(f"Service {place.name} went while it was looked at")
    leaves = "deletionTimestamp" in found["metadata"]
    if leaves or any(found.get("spec", {}).get(name) != item["spec"][name] for name in _COMPARED):
        raise name_taken({"kind": "Service", **found}, way_out="delete it")


async def _read(hands: Hands, place: Place) -> Json | None:
    try:
        return await hands.api.call(Request(method="GET", path=_path(place), kind="services"))
    except NotFound:
        return None


async def _there(hands: Hands, scope: str | None) -> AsyncIterator[Place]:
    """Those that an operator made."""
    (path,) = scoped("/api/v1/services", () if scope is None else (scope,))
    params = {"labelSelector": _OURS, "limit": _PAGE}
    while True:
        answer = await hands.api.call(Request(method="GET", path=path, kind="services", params=params))
        for item in answer.get("items", ()):
            if item["metadata"]["name"] in RENDEZVOUS_SERVICES:
                yield Place(item["metadata"]["namespace"], item["metadata"]["name"])
        if not (more := answer["metadata"].get("continue")):
            return
        params = {**params, "continue": more}


async def _delete(hands: Hands, place: Place) -> None:
    """Only if it is ours still: a Service of that name that somebody else made is theirs."""
    found = await _read(hands, place)
    if found is None or found["metadata"].get("labels", {}).get(_MANAGED_BY) != FIELD_MANAGER:
        return
    options = {**delete_options(None), "preconditions": {"uid": found["metadata"]["uid"]}}
    try:
        await hands.api.call(Request(method="DELETE", path=_path(place), kind="services", body=options))
        log.info("%s: Service %s deleted, as no job is left that might use it", *place)
    except (NotFound, Conflict):
        log.debug("%s: Service %s is gone already, or is another one by now", *place)


def _path(place: Place) -> str:
    return f"{PATHS['Service'].format(namespace=place.namespace)}/{place.name}"
