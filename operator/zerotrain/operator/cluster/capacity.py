"""Reads nodes and pods while some job waits for room, and judges all claims together.

Nothing is asked of the API server while nobody waits. One reading serves all claims; the next one comes the
later the longer a reading takes, so that a large cluster is not read all the time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from zerotrain.operator.cluster.api import Api, Json, Request
from zerotrain.operator.cluster.errors import ApiError, Forbidden
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.memory import Memories
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.constants import LABEL_HELPER, LABEL_JOB
from zerotrain.operator.reconcile import job_uid_of, worker_of
from zerotrain.operator.reconcile.capacity import (
    VERDICT_AGE_S,
    Claim,
    Demand,
    Kept,
    NodeUse,
    Verdict,
    admit,
)
from zerotrain.operator.reconcile.clock import parse_time
from zerotrain.operator.reconcile.placement import kind_of, node_of
from zerotrain.operator.resources.amounts import MILLI, PODS, Amounts, add, requests_of
from zerotrain.operator.resources.gang import GATE

log = logging.getLogger(__name__)

PAGE = 500
PERIOD_S = 5.0
"""Between two readings while jobs wait."""
MAX_PERIOD_S = 30.0
"""The same while all that ask are running jobs that could grow, and nothing changes: nobody stands still
meanwhile, and growth waits for lasting room anyway."""
SETTLE_S = 0.5
"""New claims come in bursts; one reading judges them together and in their order."""
DUTY = 20
"""A reading is followed by at least so many times its length without one."""
STARTING_S = 30.0
"""So long a job that was let in counts although its pods have not shown up."""
SLACK = 2.0
"""Times the distance to the next reading that a verdict stays good: that reading may take longer."""
STUCK_S = 60.0
"""So long a worker that the scheduler finds no place for counts as one that starts."""
BLIND_S = 60.0
"""For an operator with namespaces of its own, which may see all nodes but not the pods on them: a large
cluster has many nodes. For others a refusal is a matter of moments, as while an API server starts."""
RUNNING_PODS = "status.phase!=Succeeded,status.phase!=Failed"


_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """One reading of the cluster, as `admit` wants it."""

    nodes: list[NodeUse] = field(default_factory=list)
    unbound: dict[str, Claim] = field(default_factory=dict)
    """By UID of the job: workers that exist and have no node yet."""
    seen: dict[str, int] = field(default_factory=dict)
    """By UID of the job: its workers, with or without a node."""


class CapacityBoard:
    """`run()` until cancelled; `changed` is called with the key of every job whose verdict changed."""

    def __init__(
        self,
        api: Api,
        memories: Memories,
        changed: Callable[[JobKey], None],
        may_act: asyncio.Event,
        jobs: JobCache,
        blind_s: float = 0.0,
    ) -> None:
        """`blind_s`: so long nothing is read again where a part was refused."""
        self._api, self._memories, self._changed, self._may_act = api, memories, changed, may_act
        self._jobs, self._blind_s = jobs, blind_s
        self._starting: dict[str, tuple[Claim, float]] = {}
        """Claims that were let in, and when."""
        self._kept: Mapping[str, Kept] = {}
        """By UID: nodes that jobs kept by the last round."""
        self._period_s = PERIOD_S
        self._blind_until: float | None = None
        """By `time.monotonic()`; None where nothing was ever refused."""

    async def run(self) -> None:
        while True:
            await self._next_round()
            started = time.monotonic()
            try:
                await self._judge()
            except Forbidden as error:
                self._be_blind(error)
                self._let_all_in()
            except ApiError as error:
                log.warning("reading the cluster's capacity: %s", error)
            except Exception:
                # One object that is not understood must not end the admission of all jobs.
                log.exception("reading the cluster's capacity")
            await asyncio.sleep(DUTY * (time.monotonic() - started))

    async def _next_round(self) -> None:
        """At once for a new claim, else after the period, and not at all while nobody waits."""
        await self._may_act.wait()
        waiting = bool(self._memories.claims)
        try:
            await asyncio.wait_for(self._memories.claims_changed.wait(), self._period_s if waiting else None)
        except TimeoutError:
            return
        self._memories.claims_changed.clear()
        self._period_s = PERIOD_S
        await asyncio.sleep(SETTLE_S)

    async def _judge(self) -> None:
        if not self._memories.claims:
            return
        started = time.monotonic()
        if self._blind_until is not None and started < self._blind_until:
            self._let_all_in()
            return
        snapshot = await self._read()
        claims = list(self._memories.claims.values())
        starting = [*snapshot.unbound.values(), *self._not_seen_yet(snapshot)]
        # Pure, and seconds long with thousands of nodes: not on the event loop.
        verdicts = await asyncio.to_thread(
            admit, snapshot.nodes, claims, starting, kept=self._kept, now=self._api.time.now()
        )
        now = self._api.time.now()
        self._kept = {uid: item.keeps for uid, item in verdicts.items() if item.keeps is not None}
        changed = any(self._differs(claim, verdicts[claim.uid]) for claim in claims)
        calm = not changed and all(claim.growing for claim in claims)
        self._period_s = min(2 * self._period_s, MAX_PERIOD_S) if calm else PERIOD_S
        again_s = self._period_s + SETTLE_S + (DUTY + 1) * (time.monotonic() - started)
        for claim in claims:
            verdict = verdicts[claim.uid]
            # Who is let in has its place kept for STARTING_S; all others hear of every reading.
            good_for_s = STARTING_S if _lets_in(claim, verdict) else max(VERDICT_AGE_S, SLACK * again_s)
            self._tell(claim, replace(verdict, at=now, good_for_s=good_for_s))

    def _be_blind(self, error: Forbidden) -> None:
        if self._blind_until is None:
            log.warning("the cluster's room cannot be counted, so that no job waits for it: %s", error)
        self._blind_until = time.monotonic() + self._blind_s

    def _let_all_in(self) -> None:
        """Who may not see the cluster's nodes and pods cannot say that there is no room: nobody waits for a
        count that never comes, and nobody grows on a guess."""
        now = self._api.time.now()
        for claim in list(self._memories.claims.values()):
            workers = claim.demand.workers
            fits = 0 if claim.growing else workers
            self._tell(
                claim,
                Verdict(
                    admitted=not claim.growing, workers=workers, fits=fits, at=now, good_for_s=STARTING_S
                ),
            )

    def _tell(self, claim: Claim, verdict: Verdict) -> None:
        uid = claim.uid
        # By value: passes repeat their question while the round runs.
        if self._memories.claims.get(uid) != claim or not self._memories.knows(uid):
            return  # withdrawn, or another question by now
        if _lets_in(claim, verdict):
            self._memories.claims.pop(uid)
            self._starting[uid] = (claim, time.monotonic())
        is_news = self._differs(claim, verdict)
        self._memories.of(uid).capacity = verdict
        if is_news:
            namespace, _, name = claim.name.partition("/")
            self._changed(JobKey(namespace, name))

    def _differs(self, claim: Claim, verdict: Verdict) -> bool:
        """Whether it says something else than the last one did."""
        before = self._memories.of(claim.uid).capacity if self._memories.knows(claim.uid) else None
        return before is None or replace(before, at=verdict.at, good_for_s=verdict.good_for_s) != verdict

    def _not_seen_yet(self, snapshot: Snapshot) -> list[Claim]:
        """What is left of the jobs that were let in: pods that are still to be created."""
        left = []
        for uid, (claim, since) in list(self._starting.items()):
            missing = claim.demand.workers - snapshot.seen.get(uid, 0)
            if missing <= 0 or time.monotonic() - since > STARTING_S:
                del self._starting[uid]
            else:
                left.append(replace(claim, demand=replace(claim.demand, workers=missing)))
        return left

    async def _read(self) -> Snapshot:
        nodes = [node async for node in self._items("/api/v1/nodes", {})]
        reader = SnapshotReader(nodes, self._owner, now=self._api.time.now())
        async for pod in self._items("/api/v1/pods", {"fieldSelector": RUNNING_PODS}):
            reader.take(pod)
        return reader.snapshot()

    def _owner(self, pod: Mapping[str, Any]) -> str | None:
        """UID of the job that the pod is a part of. Labels are its author's word, and so is an owner of
        another namespace or a rank that the job does not have: whoever may create pods could take all room
        without using any."""
        uid, meta = job_uid_of(pod), pod["metadata"]
        if uid is None:
            return None
        job = self._jobs.get(JobKey(meta["namespace"], meta["labels"].get(LABEL_JOB, "")))
        if job is None or job["metadata"]["uid"] != uid:
            return None
        return uid if LABEL_HELPER in meta["labels"] or _is_worker(meta, job) else None

    async def _items(self, path: str, params: Mapping[str, str]) -> AsyncIterator[Json]:
        kind = path.rsplit("/", 1)[-1]
        query = {**params, "limit": str(PAGE)}
        while True:
            answer = await self._api.call(Request(method="GET", path=path, kind=kind, params=query))
            for item in answer.get("items", ()):
                yield item
            more = answer["metadata"].get("continue")
            if not more:
                return
            query = {**query, "continue": more}


def _is_worker(meta: Mapping[str, Any], job: Json) -> bool:
    """Whether it is a worker of the job's attempt: status is written before its pods are made."""
    place, status = worker_of(meta), job.get("status", {})
    if place is None:
        return False
    attempt, index = place
    return bool(attempt == status.get("attempt") and index < (status.get("workers") or {}).get("desired", 0))


def _is_stuck(pod: Mapping[str, Any], now: datetime) -> bool:
    """Whether the pod uses no room and will not soon: the scheduler has no place for it, or may not look for
    one. Room that it cannot have is others'."""
    if any(gate.get("name") != GATE for gate in pod["spec"].get("schedulingGates", ())):
        return True
    conditions = pod.get("status", {}).get("conditions", ())
    found: Mapping[str, Any] = next((item for item in conditions if item.get("type") == "PodScheduled"), {})
    since = parse_time(found.get("lastTransitionTime"))
    refused = found.get("status") == "False" and found.get("reason") == "Unschedulable"
    return refused and since is not None and now - since > timedelta(seconds=STUCK_S)


def _lets_in(claim: Claim, verdict: Verdict) -> bool:
    return verdict.admitted and not claim.growing


class SnapshotReader:
    """Adds up pods by node; their JSON is dropped as it comes. `owner` tells the job of a pod."""

    def __init__(
        self,
        nodes: Iterable[Mapping[str, Any]],
        owner: Callable[[Mapping[str, Any]], str | None],
        *,
        now: datetime,
    ) -> None:
        self._nodes = [node_of(node) for node in nodes]
        self._owner, self._now = owner, now
        self._lasting: dict[str, dict[int, Amounts]] = {}
        self._ours: dict[str, dict[str, dict[int, Amounts]]] = {}
        self._unbound: dict[str, Claim] = {}
        self._seen: dict[str, int] = {}

    def take(self, pod: Mapping[str, Any]) -> None:
        spec, meta = pod["spec"], pod["metadata"]
        uid, node = self._owner(pod), spec.get("nodeName")
        if uid is not None and LABEL_HELPER not in meta["labels"]:
            self._seen[uid] = self._seen.get(uid, 0) + 1
        if node is None:
            if uid is not None and not _is_stuck(pod, self._now):
                self._count_unbound(uid, pod)
            return
        held = self._lasting if uid is None else self._ours.setdefault(uid, {})
        amounts = held.setdefault(node, {}).setdefault(int(spec.get("priority") or 0), {})
        add(amounts, {**requests_of(spec), PODS: MILLI})

    def snapshot(self) -> Snapshot:
        uses = [
            NodeUse(
                node=node,
                lasting=self._lasting.get(node.name, {}),
                ours={uid: held[node.name] for uid, held in self._ours.items() if node.name in held},
            )
            for node in self._nodes
        ]
        return Snapshot(nodes=uses, unbound=self._unbound, seen=self._seen)

    def _count_unbound(self, uid: str, pod: Mapping[str, Any]) -> None:
        known = self._unbound.get(uid)
        if known is None:
            demand = Demand(workers=1, kind=kind_of(pod), priority=int(pod["spec"].get("priority") or 0))
            claim = Claim(uid=uid, name="", created=_EPOCH, demand=demand)
        else:
            claim = replace(known, demand=replace(known.demand, workers=known.demand.workers + 1))
        self._unbound[uid] = claim
