"""Asking for what lets an attempt start: the cluster's APIs, room for all workers, Kueue's admission."""

from __future__ import annotations

from dataclasses import replace

from zerotrain.operator.api import AttemptShape, ZeroTrainingJob
from zerotrain.operator.api.scheduling import TopologyPolicy
from zerotrain.operator.cluster.actions.hands import Hands
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.discovery import discover as discover_apis
from zerotrain.operator.cluster.kueue import WorkloadClient
from zerotrain.operator.reconcile import AskQueue, AskRoom, DiscoverApis
from zerotrain.operator.reconcile.claims import Claim, Demand
from zerotrain.operator.reconcile.clock import parse_time
from zerotrain.operator.reconcile.placement import kind_of
from zerotrain.operator.reconcile.queues import QueueStep
from zerotrain.operator.resources import worker_pod
from zerotrain.operator.resources.gang import OPERATOR
from zerotrain.operator.resources.kueue import workload


async def discover(hands: Hands, body: Json, action: DiscoverApis) -> None:
    hands.memories.apis = await discover_apis(hands.api)


async def ask_room(hands: Hands, body: Json, action: AskRoom) -> None:
    """Leave a claim that is judged again and again until it is withdrawn; the answer comes into memory."""
    uid = body["metadata"]["uid"]
    memory = hands.memories.of(uid)
    if action.shape is None:
        hands.memories.claims.pop(uid, None)
        memory.capacity = memory.question = None
        return
    job = _shaped(ZeroTrainingJob.parse(body), action.shape)
    claim = replace(await _claim(hands, body, job, _next_attempt(job)), growing=action.growing)
    if not hands.memories.knows(uid):  # deleted meanwhile: nobody would take its claim back
        return
    if memory.question != action:
        memory.capacity, memory.question = None, action  # an older word answers another question
    if hands.memories.claims.get(uid) != claim:
        hands.memories.claims[uid] = claim
        hands.memories.claims_changed.set()


async def claim_of_begun(hands: Hands, body: Json) -> Claim | None:
    """What an attempt was let in for by our own count that has begun and lacks pods; None for all others."""
    job = ZeroTrainingJob.parse(body)
    status = job.status
    if status.shape is None or status.shape.gang != OPERATOR or status.pods_created:
        return None
    if job.spec.suspend or "deletionTimestamp" in body["metadata"]:
        return None  # it makes no more
    return await _claim(hands, body, job, status.attempt)


async def _claim(hands: Hands, body: Json, job: ZeroTrainingJob, attempt: int) -> Claim:
    priority = await hands.memories.priorities.of(hands.api, job)
    created = parse_time(body["metadata"].get("creationTimestamp"))
    if created is None:
        raise ValueError(f"job {job.name} has no metadata.creationTimestamp")
    scheduling = job.spec.scheduling
    demand = Demand(
        workers=job.shape.workers,
        kind=kind_of(worker_pod(job, attempt, 0, hands.options)),
        priority=priority.value,
        preempts=priority.preempts,
        topology_key=scheduling.topology_key if scheduling is not None else None,
        spread=scheduling is not None and scheduling.topology_policy is TopologyPolicy.SPREAD,
    )
    return Claim(uid=job.uid, name=f"{job.namespace}/{job.name}", created=created, demand=demand)


async def ask_queue(hands: Hands, body: Json, action: AskQueue) -> None:
    """One step of the job's Workload; the watch brings what became of it."""
    hands.memories.queues_wanted.set()
    version = hands.memories.apis.kueue if hands.memories.apis is not None else None
    if action.step is QueueStep.FOLLOW or version is None:
        return
    job = ZeroTrainingJob.parse(body)
    client = WorkloadClient(hands.api, version, job)
    if action.step is QueueStep.CREATE:
        scheduling = job.spec.scheduling
        named = scheduling is not None and scheduling.priority_class_name is not None
        priority = (await hands.memories.priorities.of(hands.api, job)).value if named else None
        shape = AttemptShape(workers=action.workers, excluded_nodes=action.excluded_nodes)
        shaped = _shaped(job, shape)
        worker = worker_pod(shaped, _next_attempt(job), 0, hands.options)
        await hands.ensure(job, workload(shaped, version, action.workers, worker, priority))
    elif action.step is QueueStep.DELETE:
        await client.delete()
    else:
        await client.advance(action.step, action.message)


def _shaped(job: ZeroTrainingJob, shape: AttemptShape) -> ZeroTrainingJob:
    """The job as it will be when an attempt of this shape runs."""
    return job.model_copy(update={"status": job.status.model_copy(update={"shape": shape})})


def _next_attempt(job: ZeroTrainingJob) -> int:
    return job.status.attempt + 1
