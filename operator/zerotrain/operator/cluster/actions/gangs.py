"""Gangs: pod groups of attempts that are over, and the gates of pods whose peers all exist."""

from __future__ import annotations

import logging

from zerotrain.operator.cluster.actions.hands import PATHS, Hands, Unfinished, turn
from zerotrain.operator.cluster.api import STRATEGIC_PATCH, Json, Request
from zerotrain.operator.cluster.errors import NotFound
from zerotrain.operator.reconcile import ForgetGroup, OpenGates
from zerotrain.operator.resources.gang import GATE, RESOURCE, group_name

log = logging.getLogger(__name__)


async def forget(hands: Hands, body: Json, action: ForgetGroup) -> None:
    """Delete the group, unless one of that name belongs to somebody else."""
    meta = body["metadata"]
    name = group_name(meta["name"], action.attempt)
    path = f"/apis/{action.gang}/namespaces/{meta['namespace']}/{RESOURCE}/{name}"
    await hands.remove(path, kind=RESOURCE, job_uid=meta["uid"])
    hands.memories.of(meta["uid"]).ungrouped = action.attempt


async def open_gates(hands: Hands, body: Json, action: OpenGates) -> None:
    """Take our gate away and leave those of others; a pod that is gone needs none. Raises Unfinished."""
    namespace = body["metadata"]["namespace"]
    opened = await hands.creations.spread(
        namespace, iter(action.pods), lambda name: _open(hands, namespace, name), is_over=turn()
    )
    if opened < len(action.pods):
        raise Unfinished(opened)


async def _open(hands: Hands, namespace: str, name: str) -> None:
    request = Request(
        method="PATCH",
        path=f"{PATHS['Pod'].format(namespace=namespace)}/{name}",
        kind="pods",
        body={"spec": {"schedulingGates": [{"name": GATE, "$patch": "delete"}]}},
        content_type=STRATEGIC_PATCH,
    )
    try:
        hands.store.put(await hands.api.call(request), now=hands.api.time.now())
    except NotFound:
        log.debug("pod %s is gone already", name)
