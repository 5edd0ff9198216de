"""Gangs: pod groups of attempts that are over, and the gates of pods whose peers all exist."""

from __future__ import annotations

import asyncio
import logging

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions.hands import PATHS, Hands
from zerotrain.operator.cluster.api import STRATEGIC_PATCH, Json, Request
from zerotrain.operator.cluster.errors import NotFound
from zerotrain.operator.reconcile import OpenGates
from zerotrain.operator.resources.gang import GATE, RESOURCE, group_name, has_group

log = logging.getLogger(__name__)


async def forget(hands: Hands, job: ZeroTrainingJob, attempt: int) -> None:
    """Delete the group of an earlier attempt, if the gang of the current one is a scheduler's."""
    if not has_group(job.shape.gang):
        return
    name = group_name(job.name, attempt)
    path = f"/apis/{job.shape.gang}/namespaces/{job.namespace}/{RESOURCE}/{name}"
    try:
        await hands.api.call(Request(method="DELETE", path=path, kind=RESOURCE))
    except NotFound:
        log.debug("pod group %s is gone already", name)


async def open_gates(hands: Hands, body: Json, action: OpenGates) -> None:
    """Take our gate away and leave those of others; a pod that is gone needs none."""
    await asyncio.gather(*(_open(hands, body["metadata"]["namespace"], name) for name in action.pods))


async def _open(hands: Hands, namespace: str, name: str) -> None:
    request = Request(
        method="PATCH",
        path=f"{PATHS['Pod'].format(namespace=namespace)}/{name}",
        kind="pods",
        body={"spec": {"schedulingGates": [{"name": GATE, "$patch": "delete"}]}},
        content_type=STRATEGIC_PATCH,
    )
    async with hands.creations:
        try:
            hands.store.put(await hands.api.call(request), now=hands.api.time.now())
        except NotFound:
            log.debug("pod %s is gone already", name)
