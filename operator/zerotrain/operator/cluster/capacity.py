"""Reads nodes and pods while some job waits for room, and judges all claims together.

Nothing is asked of the API server while nobody waits. One reading serves all claims; the next one comes the
later the longer a reading takes, so that a large cluster is not read all the time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zerotrain.operator.api import Phase
from zerotrain.operator.cluster.api import Api, Json, Request
from zerotrain.operator.cluster.errors import ApiError, Forbidden
from zerotrain.operator.cluster.jobs import JobCache
from zerotrain.operator.cluster.memory import Memories
from zerotrain.operator.cluster.snapshot import Movement, Snapshot, SnapshotReader
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.constants import LABEL_HELPER, LABEL_JOB
from zerotrain.operator.reconcile import job_uid_of, worker_of
from zerotrain.operator.reconcile.capacity import admit
from zerotrain.operator.reconcile.claims import VERDICT_AGE_S, Claim, Kept, Verdict
from zerotrain.operator.reconcile.placement import node_of

log = logging.getLogger(__name__)

PAGES = {"/api/v1/nodes": 100, "/api/v1/pods": 500}
"""Objects in one answer. A node names its images and is ten times as long as a pod."""
PERIOD_S = 5.0
"""Between two readings while jobs wait."""
MAX_PERIOD_S = 30.0
"""The same while all that ask are running jobs that could grow, and nothing changes: nobody stands still
meanwhile, and growth waits for lasting room anyway."""
SETTLE_S = 0.5
"""New claims come in bursts; one reading judges them together and in their order."""
DUTY = 20
"""A reading is followed by at least so many times its length without one,"""
MAX_PAUSE_S = 60.0
"""but by no more than this: jobs wait meanwhile that there may be room for."""
STARTING_S = 30.0
"""So long a job that was let in counts although no more of its pods show up."""
SLACK = 2.0
"""Times the distance to the next reading that a verdict stays good: that reading may take longer."""
BLIND_S = 60.0
"""For an operator with namespaces of its own, which may see all nodes but not the pods on them: a large
cluster has many nodes. For others a refusal is a matter of moments, as while an API server starts."""
MOMENT_S = 60.0
"""A refusal that lasts no longer is waited out, where the operator may see the whole cluster as a rule."""
BEGINNING = (Phase.PENDING, Phase.STARTING)
RUNNING_PODS = "status.phase!=Succeeded,status.phase!=Failed"


@dataclass(slots=True)
class _Start:
    """A job that was let in and whose pods are still to be made."""

    claim: Claim
    moved_at: float
    """When more of its pods were seen, or when it was let in."""
    seen: int = 0
    """The most of its pods that a reading has shown."""


class CapacityBoard:
    """`run()` until cancelled; `changed` is called with the key of every job whose verdict changed."""

    def __init__(
        self,
        api: Api,
        memories: Memories,
        changed: Callable[[JobKey], None],
        may_act: asyncio.Event,
        jobs: JobCache,
        claim_of: Callable[[Json], Awaitable[Claim | None]],
        blind_s: float = 0.0,
    ) -> None:
        """`claim_of`: what a job was let in for that has begun and lacks pods. `blind_s`: so long nothing is
        read again where a part was refused."""
        self._api, self._memories, self._changed, self._may_act = api, memories, changed, may_act
        self._jobs, self._claim_of, self._blind_s = jobs, claim_of, blind_s
        self._starting: dict[str, _Start] = {}
        """By UID: claims that were let in."""
        self._recalls = True
        """Until it is known whom the operator before this one had let in."""
        self._movement = Movement()
        self._kept: Mapping[str, Kept] = {}
        """By UID: nodes that jobs kept by the last round."""
        self._period_s = PERIOD_S
        self._refused_since: float | None = None
        """By `time.monotonic()`: when the refusals began that no reading has ended."""
        self._blind_until: float | None = None
        """By `time.monotonic()`; None where nothing was ever refused."""

    async def run(self) -> None:
        while True:
            await self._next_round()
            started = time.monotonic()
            try:
                await self._judge()
            except Forbidden as error:
                if self._is_momentary():
                    log.warning("reading the cluster's capacity: %s", error)
                else:
                    self._be_blind(error)
                    self._let_all_in()
            except ApiError as error:
                log.warning("reading the cluster's capacity: %s", error)
                started = time.monotonic()  # its time went into waiting for an answer
            except Exception:
                # One object that is not understood must not end the admission of all jobs.
                log.exception("reading the cluster's capacity")
            await asyncio.sleep(_pause_s(time.monotonic() - started))

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
        self._refused_since = None
        if self._recalls:
            await self._recall()
            self._recalls = False
        claims = list(self._memories.claims.values())
        for claim in claims:
            if not claim.growing:  # it asks anew: what it was let in for before is over
                self._starting.pop(claim.uid, None)
        starting = [*self._movement.unbound(snapshot, time.monotonic()), *self._not_seen_yet(snapshot)]
        # Pure, and seconds long with thousands of nodes: not on the event loop.
        verdicts = await asyncio.to_thread(
            admit, snapshot.nodes, claims, starting, kept=self._kept, now=self._api.time.now()
        )
        now = self._api.time.now()
        self._kept = {uid: item.keeps for uid, item in verdicts.items() if item.keeps is not None}
        changed = any(self._differs(claim, verdicts[claim.uid]) for claim in claims)
        calm = not changed and all(claim.growing for claim in claims)
        self._period_s = min(2 * self._period_s, MAX_PERIOD_S) if calm else PERIOD_S
        took_s = time.monotonic() - started
        again_s = self._period_s + SETTLE_S + took_s + _pause_s(took_s)
        for claim in claims:
            verdict = verdicts[claim.uid]
            # Who is let in has its place kept for STARTING_S; all others hear of every reading.
            good_for_s = STARTING_S if _lets_in(claim, verdict) else max(VERDICT_AGE_S, SLACK * again_s)
            self._tell(claim, replace(verdict, at=now, good_for_s=good_for_s))

    def _is_momentary(self) -> bool:
        """Whether a refusal may be one of an API server that starts, or of a role that is being replaced: who
        is let in cannot be taken back. An operator with namespaces of its own was never meant to see."""
        now_s = time.monotonic()
        self._refused_since = now_s if self._refused_since is None else self._refused_since
        return not self._blind_s and now_s - self._refused_since < MOMENT_S

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
                    admitted=not claim.growing,
                    workers=workers,
                    fits=fits,
                    counted=False,
                    at=now,
                    good_for_s=STARTING_S,
                ),
            )

    def _tell(self, claim: Claim, verdict: Verdict) -> None:
        uid = claim.uid
        # By value: passes repeat their question while the round runs.
        if self._memories.claims.get(uid) != claim or not self._memories.knows(uid):
            return  # withdrawn, or another question by now
        if _lets_in(claim, verdict):
            self._memories.claims.pop(uid)
            self._starting[uid] = _Start(claim, moved_at=time.monotonic())
        is_news = self._differs(claim, verdict)
        self._memories.of(uid).capacity = verdict
        if is_news:
            namespace, _, name = claim.name.partition("/")
            self._changed(JobKey(namespace, name))

    def _differs(self, claim: Claim, verdict: Verdict) -> bool:
        """Whether it says something else than the last one did."""
        before = self._memories.of(claim.uid).capacity if self._memories.knows(claim.uid) else None
        return before is None or replace(before, at=verdict.at, good_for_s=verdict.good_for_s) != verdict

    def recall(self) -> None:
        """This replica begins to lead: others may have let jobs in meanwhile, and ended those that it had."""
        self._starting.clear()
        self._recalls = True

    async def _recall(self) -> None:
        """Attempts that an operator before this one began: what was kept for them was its memory."""
        for key, body in self._jobs.in_phases(BEGINNING):
            try:
                claim = await self._claim_of(body)
            except ApiError:
                raise
            except Exception:
                # As above: what its own pass does not understand either.
                log.exception("job %s/%s keeps no room", key.namespace, key.name)
                continue
            if claim is not None:
                self._starting.setdefault(claim.uid, _Start(claim, moved_at=time.monotonic()))

    def _not_seen_yet(self, snapshot: Snapshot) -> list[Claim]:
        """What is left of the jobs that were let in: pods that are still to be created."""
        left, now_s = [], time.monotonic()
        for uid, start in list(self._starting.items()):
            seen = snapshot.seen.get(uid, 0)
            if seen > start.seen:  # those of a large job come for minutes
                start.seen, start.moved_at = seen, now_s
            missing = start.claim.demand.workers - seen
            if missing <= 0 or now_s - start.moved_at > STARTING_S:
                del self._starting[uid]
            else:
                left.append(replace(start.claim, demand=replace(start.claim.demand, workers=missing)))
        return left

    async def _read(self) -> Snapshot:
        # What counts of each node, as it comes: the JSON of thousands would be most of the operator's memory.
        nodes = [node_of(node) async for node in self._items("/api/v1/nodes", {})]
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
        query = {**params, "limit": str(PAGES[path])}
        while True:
            answer = await self._api.call(Request(method="GET", path=path, kind=kind, params=query))
            for item in answer.get("items", ()):
                yield item
            more = answer["metadata"].get("continue")
            if not more:
                return
            query = {**query, "continue": more}


def _pause_s(reading_s: float) -> float:
    return min(DUTY * reading_s, MAX_PAUSE_S)


def _is_worker(meta: Mapping[str, Any], job: Json) -> bool:
    """Whether it is a worker of the job's attempt: status is written before its pods are made."""
    place, status = worker_of(meta), job.get("status", {})
    if place is None:
        return False
    attempt, index = place
    return bool(attempt == status.get("attempt") and index < (status.get("workers") or {}).get("desired", 0))


def _lets_in(claim: Claim, verdict: Verdict) -> bool:
    return verdict.admitted and not claim.growing
