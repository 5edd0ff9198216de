"""Estimate of free capacity: the nodes' allocatable resources minus the requests of their pods, read once.

It considers node selectors, taints and counted resources; preferences, affinities, volumes and claimed
devices are left to the scheduler. So the estimate may be too high, and then a larger attempt finds no nodes
and goes back to the size that ran.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.actions.context import ActionContext
from zerotrain.operator.cluster.actions.prerequisites import with_shape
from zerotrain.operator.cluster.api import Api, Json
from zerotrain.operator.cluster.errors import Forbidden
from zerotrain.operator.cluster.listwatch import Listing
from zerotrain.operator.reconcile import Capacity, ReadCapacity, job_uid_of
from zerotrain.operator.resources import worker_pod
from zerotrain.operator.resources.amounts import MILLI, PODS, at_most, requests_of

PAUSE = 9
"""Length of the pause after a reading, in lengths of the reading: all jobs together may read a tenth of the
time, however often each of them wants to grow. A large cluster has a hundred megabytes of pods."""

_LIVE = "status.phase!=Succeeded,status.phase!=Failed"
_KEEPING_OFF = ("NoSchedule", "NoExecute")


async def read(context: ActionContext, body: Json, action: ReadCapacity) -> None:
    """Put the estimate into the job's memory. Do nothing while the reading for another job goes on, or soon
    after it: the next pass asks again."""
    states, now_s = context.job_states, asyncio.get_running_loop().time
    if states.reading.locked() or now_s() < states.reads_again_at:
        return
    async with states.reading:
        began = now_s()
        job = with_shape(ZeroTrainingJob.parse(body), action.shape)
        spec = worker_pod(job, job.status.attempt + 1, 0, context.options)["spec"]
        try:
            fits = await _fits(context.api, spec, action.shape.excluded_nodes, job.uid)
        except Forbidden:
            fits = None  # the scheduler decides
        states.reads_again_at = now_s() + PAUSE * (now_s() - began)
    if context.job_states.knows(job.uid):
        found = Capacity(at=context.api.time.now(), workers=action.shape.workers, fits=fits)
        context.job_states.of(job.uid).capacity = found


async def _fits(api: Api, spec: Json, excluded: Sequence[str], uid: str) -> int | None:
    """Return how many workers with this pod spec would fit if those of the job `uid` were gone; None if that
    cannot be estimated."""
    wanted = {**requests_of(spec), PODS: MILLI}
    if spec.get("resourceClaims"):
        return None
    offered, free = set[str](), dict[str, Counter[str]]()
    async for node in _items(api, "nodes", {}):
        allocatable = node.get("status", {}).get("allocatable", {})
        offered |= allocatable.keys()
        name = node["metadata"]["name"]
        if name not in excluded and _is_suitable(spec, node):
            free[name] = Counter({key: at_most(allocatable[key]) for key in wanted if key in allocatable})
    if any(amount > 0 and name not in offered for name, amount in wanted.items()):
        return None  # dynamic resource allocation, or no node offers it
    async for pod in _items(api, "pods", {"fieldSelector": _LIVE}):
        node_name = pod["spec"].get("nodeName")
        if node_name in free and job_uid_of(pod) != uid:
            free[node_name].subtract({**requests_of(pod["spec"]), PODS: MILLI})
    return sum(_slots(wanted, amounts) for amounts in free.values())


def _slots(wanted: Mapping[str, int], free: Mapping[str, int]) -> int:
    return max(0, min(free.get(name, 0) // amount for name, amount in wanted.items() if amount > 0))


def _is_suitable(spec: Json, node: Json) -> bool:
    labels, held = node["metadata"].get("labels", {}), node.get("spec", {})
    if any(labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
        return False
    taints = [taint for taint in held.get("taints", ()) if taint.get("effect") in _KEEPING_OFF]
    tolerations = spec.get("tolerations", ())
    return not held.get("unschedulable") and all(
        any(_tolerates(item, taint) for item in tolerations) for taint in taints
    )


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    key = toleration.get("key")
    if toleration.get("operator") == "Exists":
        return key in (None, "", taint["key"])
    return bool(key == taint["key"]) and toleration.get("value", "") == taint.get("value", "")


async def _items(api: Api, kind: str, params: Mapping[str, str]) -> AsyncIterator[Json]:
    """Iterate over the objects one by one: one that is large or cannot be read affects no other."""
    async for text in Listing(api, path=f"/api/v1/{kind}", kind=kind, params=params):
        with suppress(ValueError):
            yield json_codec.read(text)
