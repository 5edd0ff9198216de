"""Pass over one job: observe, decide, write the status, emit events, act. Tasks take keys from the queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from pydantic import ValidationError

from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.api.admission import refusals
from zerotrain.operator.api.job_text import UNREAD
from zerotrain.operator.api.planning import PlanMissing, known_plan
from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.errors import (
    ApiError,
    Conflict,
    Forbidden,
    NotFound,
    NotLeading,
    Unavailable,
    Unprocessable,
)
from zerotrain.operator.cluster.events import EventWriter
from zerotrain.operator.cluster.executor import ActionRefused, Executor, Unfinished
from zerotrain.operator.cluster.job_state import JobStates
from zerotrain.operator.cluster.jobs import JobCache, JobClient, phase_of
from zerotrain.operator.cluster.store import JobKey, PodStore, owner_key
from zerotrain.operator.cluster.telemetry import Telemetry
from zerotrain.operator.controller.beginnings import has_begun, is_new, pods_to_create
from zerotrain.operator.controller.pacing import Pace
from zerotrain.operator.controller.shortages import older_in_shortage
from zerotrain.operator.controller.starts import StartLines
from zerotrain.operator.controller.status_writes import StatusHeld, StatusWrites
from zerotrain.operator.controller.work_queue import WorkQueue
from zerotrain.operator.reconcile import Known, Plan, ProtectWorkers, RequestYield, can_wait, reconcile

log = logging.getLogger(__name__)

PODS_SETTLE_S = 0.1
"""Seconds to wait for further changes of a job's pods. Pods of a job change together; one pass for all of
them saves as many status writes."""

START_SETTLE_S = 0.5
"""Seconds to wait instead while all pods of a job start well: only the last pod to get ready matters to the
user."""

RECHECK_S = 1.0
"""Seconds until the next pass after actions. The events that the actions cause bring a pass earlier, unless
they are lost."""

LINE_RECHECK_S = 5.0
"""Fewest seconds until the next pass for a deadline, while a job waits in line or its actions failed."""

LARGE_RECHECK_S = 1.0
"""Seconds between two attempts of a job whose spec passes the limits to get its pass."""

LATE_S = 2.0
"""Seconds after which a pass counts as late: it waits for something that hangs, usually a webhook of its
namespace."""

MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0

FREE_CONFLICTS = 3
"""Write conflicts in a row after which the pass is repeated at once. After more of them, another client
writes all the time."""

CONFLICT_BACKOFF_S, MAX_CONFLICT_BACKOFF_S = 0.1, 5.0


BUSY_S = 0.1
"""Seconds of a status write above which the API server counts as busy: actions that can wait then get a pass
of their own."""

UNHURRIED = (ProtectWorkers,)
"""Actions that can wait for a pass of their own, as nothing is lost before they run."""

STARTING = frozenset({"Pending", "Starting"})
"""Phases in the status during which pods are created and start."""


def conflict_backoff_s(lost: int) -> float:
    """Return the pause in seconds after `lost` write conflicts in a row."""
    if lost <= FREE_CONFLICTS:
        return 0.0
    return min(CONFLICT_BACKOFF_S * 2.0 ** min(lost - FREE_CONFLICTS - 1, 10), MAX_CONFLICT_BACKOFF_S)


def _attempt(job: Json) -> int:
    return int(job.get("status", {}).get("attempt") or 0)


def _always() -> bool:
    return True


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, kw_only=True)
class Controller:
    """Dependencies and state of the passes."""

    queue: WorkQueue[JobKey]
    jobs: JobCache
    store: PodStore
    job_states: JobStates
    client: JobClient
    executor: Executor
    events: EventWriter
    telemetry: Telemetry
    may_act: asyncio.Event
    """Event that is set while this replica leads and its pod store is complete."""
    pace: Pace = field(default_factory=Pace)
    starts: StartLines[JobKey] = field(default_factory=StartLines)
    leads: Callable[[], bool] = _always
    """Return whether no other replica can hold the lease yet. Called before every pass, because a process
    that was stopped for a while finds its asyncio events as it left them."""

    writes: StatusWrites = field(default_factory=StatusWrites)
    """Statuses that the API server rejected."""

    planning: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Semaphore for work beside the event loop, which makes a memory plan or judges a large configuration.
    One task at a time: two would only slow each other down."""

    writing_large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Semaphore for passes of jobs whose specs pass the limits, so that their statuses are written one by
    one. The API server reads and checks the whole object at each write; a few dozen objects of a megabyte at
    once keep it from answering for seconds."""

    clock: Callable[[], datetime] = _now
    """Clock of the API server: the times in the status and on pods are its own."""

    def job_changed(self, job: Json) -> None:
        """Take in a job from the watch and queue a pass if it changed."""
        if self.jobs.put(job):
            _expect(self.store, job)
            self.queue.add(JobKey(job["metadata"]["namespace"], job["metadata"]["name"]))

    def job_deleted(self, job: Json) -> None:
        """Clear what the operator holds in memory of a deleted job. Kubernetes deletes the job's objects by
        their ownerReferences."""
        uid = job["metadata"]["uid"]
        if self.jobs.remove(job):
            key = JobKey(job["metadata"]["namespace"], job["metadata"]["name"])
            self.queue.forget(key)
            self.starts.forget(key)
        self.store.forget(owner_key(job["metadata"]["namespace"], uid))
        self.job_states.forget(uid)
        self.pace.settled(uid)
        self.writes.settled(uid)

    def pods_changed(self, key: JobKey) -> None:
        job = self.jobs.get(key)
        if job is None:
            return  # the event of the job itself brings the pass
        starts = phase_of(job) in STARTING
        quiet = starts and self.store.all_start_well(owner_key(key.namespace, job["metadata"]["uid"]))
        self.queue.add_after(key, START_SETTLE_S if quiet else PODS_SETTLE_S)

    def node_changed(self, name: str) -> None:
        """Queue the jobs on a node that became NotReady, was cordoned, tainted or deleted, or has
        recovered."""
        for key in self.store.on_node(name):
            self.queue.add(key)

    def all_changed(self, namespace: str | None = None) -> None:
        """Queue a pass for every job, of one namespace or of all."""
        for key, _ in self.jobs:
            if namespace in (None, key.namespace):
                self.queue.add(key)

    async def work(self, passes: int = 1) -> None:
        """Take keys until cancelled, with `passes` passes at once, not counting late ones. An operation that
        hangs in one namespace delays the passes of others by no more than `LATE_S`."""
        async with asyncio.TaskGroup() as group:
            for _ in range(passes):
                group.create_task(_take_keys(self, group))

    async def resync(self, every_s: float) -> None:
        """List all jobs every `every_s` seconds: a watch that died silently must not cost a job."""
        while True:
            await asyncio.sleep(every_s)
            try:
                for namespace in self.client.scopes:
                    await _list_again(self, namespace)
            except Exception:
                # Only this round fails. The next one must follow, or nothing is ever forgotten.
                log.exception("cannot list the jobs again")
            known = {job["metadata"]["uid"]: key for key, job in self.jobs}
            self.store.prune({owner_key(key.namespace, uid) for uid, key in known.items()})
            self.job_states.prune(known.keys())
            self.pace.prune(known.keys())
            self.writes.prune(known.keys())
            self.telemetry.count_jobs(self.phases())
            self.all_changed()

    def phases(self) -> Counter[str]:
        return Counter(phase_of(job) or "Pending" for _, job in self.jobs)

    async def _pass(self, key: JobKey) -> None:
        job = self.jobs.get(key)
        if job is None or not self.may_act.is_set():
            return
        if self.store.sight.since(key.namespace) is None:
            return  # its pods cannot be read; the first list that succeeds brings the pass
        if not self.leads():
            self.queue.add_after(key, RECHECK_S)  # the next renewal shows whether the lease is still held
            return
        if UNREAD in job and self.writing_large.locked():
            self.queue.add_after(key, LARGE_RECHECK_S)
            return
        started = time.monotonic()
        try:
            async with self.writing_large if UNREAD in job else nullcontext():
                await self._reconcile(key, job)
            job_state = self.job_states.of(job["metadata"]["uid"])
            job_state.failures = job_state.conflicts = 0
        except Conflict as error:
            # Another client wrote between the operator's read and write: decide again on the stored object.
            log.debug("%s: %s", key, error)
            await self._refresh(key)
            job_state = self.job_states.of(job["metadata"]["uid"])
            job_state.conflicts += 1
            self.queue.add_after(key, conflict_backoff_s(job_state.conflicts))
        except NotFound:
            # The job is gone, or something beside it (its namespace, a pod): then it still needs its pass.
            await self._refresh(key)
            self.queue.add_after(key, MIN_BACKOFF_S)
        except ActionRefused as error:
            self._retry(key, job, error)
        except StatusHeld as error:
            log.debug("%s: %s", key, error)  # its next try is in the queue already
        except NotLeading as error:
            # The leader decides anew. So does this replica, if the next renewal shows that no other took the
            # lease.
            log.info("%s: %s", key, error)
            self.queue.add_after(key, RECHECK_S)
        except Exception as error:
            self.telemetry.reconcile_errors.inc()
            expected = isinstance(error, (Unavailable, Forbidden, Unprocessable))
            log.log(
                logging.WARNING if expected else logging.ERROR, "%s: %s", key, error, exc_info=not expected
            )
            self._retry(key, job, error)
        finally:
            self.telemetry.reconcile_seconds.observe(time.monotonic() - started)

    async def _reconcile(self, key: JobKey, job: Json) -> None:
        if is_new(job) and self.starts.stand(key):
            return
        if self.store.is_ahead(owner_key(key.namespace, job["metadata"]["uid"]), _attempt(job)):
            # The cached job is old: read it first, so that no decision ends in a write that would conflict.
            self.jobs.put(await self.client.get(key))
            job = self.jobs.get(key) or job
        uid = job["metadata"]["uid"]
        known = self.job_states.known(uid)
        if not known.has_read(job) and is_heavy(job):
            async with self.planning:
                await asyncio.to_thread(_check, job, known)
            if self.jobs.get(key) is not job:
                self.queue.add(key)
                return
        observed = self.job_states.observe(key.namespace, uid, self.store)
        if (older := older_in_shortage(self.jobs, job)) is not None:
            observed = replace(observed, older_in_shortage=older)
        if is_queued := observed.problem is None and self.starts.is_in_line(key):
            observed = replace(observed, in_start_queue=True)
        try:
            plan = reconcile(job, observed, self.clock(), known, known_plan)
        except PlanMissing:
            async with self.planning:
                plan = await asyncio.to_thread(reconcile, job, observed, self.clock(), known)
            if self.jobs.get(key) is not job:  # edited meanwhile, gone, or replaced by a new job
                self.queue.add(key)
                return
        if not self.starts.enter(key, pods=pods_to_create(plan), begun=has_begun(plan, observed)):
            self._wake(key, plan, at_least_s=LINE_RECHECK_S)  # a deadline also ends a job that waits in line
            if observed.problem is None and not is_queued and self.starts.is_in_line(key):
                self.queue.add(key)  # to show it in the status
            return
        is_busy = False
        if plan.status is None:
            self.pace.settled(uid)
            self.writes.settled(uid)
        else:
            began = time.monotonic()
            job = await self._write(key, job, plan.status, patient=can_wait(known.read_status(job), plan))
            is_busy = time.monotonic() - began > BUSY_S
        self.events.emit(job, plan.events)
        if is_busy and plan.actions and all(isinstance(action, UNHURRIED) for action in plan.actions):
            self.queue.add(key)
            return
        try:
            await self._act(key, job, plan)
        except Exception:
            # The backoff must not outlast a deadline. A deadline that has passed must not remove the backoff.
            self._wake(key, plan, at_least_s=LINE_RECHECK_S)
            raise
        self._wake(key, plan)

    def _wake(self, key: JobKey, plan: Plan, *, at_least_s: float = 0.0) -> None:
        """Queue a pass for the plan's next deadline."""
        if plan.wake_at is not None:
            self.queue.add_after(key, max((plan.wake_at - self.clock()).total_seconds(), at_least_s))

    async def _write(self, key: JobKey, job: Json, status: ZeroTrainingJobStatus, *, patient: bool) -> Json:
        """Write the status, or leave it for a later pass if it is `patient`. Return the job as known
        afterwards. Raises ApiError, and StatusHeld while a rejected write waits: then no action may run."""
        uid = job["metadata"]["uid"]
        if (wait_s := self.writes.wait_s(uid)) > 0:
            self.queue.add_after(key, wait_s)
            raise StatusHeld(f"the write of its status was rejected and is retried in {wait_s:.0f} s")
        if patient and (wait_s := self.pace.wait_s(uid, starts=status.phase in STARTING)) > 0:
            self.queue.add_after(key, wait_s)  # later changes share the write
            return job
        self.pace.settled(uid)
        job = await self.writes.tried(uid, key, self.client.write_status(job, status))
        self.jobs.wrote(job)
        self.job_states.known(uid).keep_status(job, status)
        owner = owner_key(key.namespace, uid)
        self.store.expect(owner, attempt=status.attempt, workers=status.workers.desired)
        return job

    async def _act(self, key: JobKey, job: Json, plan: Plan) -> None:
        job_state = self.job_states.of(job["metadata"]["uid"])
        job_state.making = False
        if not plan.actions:
            if job_state.problem is not None:  # no action is left that could be rejected
                job_state.problem = None
                self.queue.add(key)
            return
        try:
            await self.executor.perform(job, plan.actions)
        except Unfinished as error:
            job_state.making = True
            self.starts.stay(key)
            self.queue.add(key)
            if not error.made:
                return  # an earlier rejection may still hold
        cleared, job_state.problem = job_state.problem is not None, None
        # Created objects are in the store already; an answer of a worker is in memory. Both may change the
        # plan. A worker that does not answer is asked again, but not at once: a refused connection takes no
        # time.
        state = job_state.yielding
        answered = state is not None and (state.acked_at is not None or state.refused)
        if cleared or (answered and any(isinstance(action, RequestYield) for action in plan.actions)):
            self.queue.add(key)
        else:
            self.queue.add_after(key, RECHECK_S)

    def _retry(self, key: JobKey, job: Json, error: Exception) -> None:
        job_state = self.job_states.of(job["metadata"]["uid"])
        job_state.failures += 1
        backoff = min(MIN_BACKOFF_S * 2.0 ** min(job_state.failures - 1, 10), MAX_BACKOFF_S)
        if isinstance(error, ActionRefused):
            # The message may change with every pass: it names the pod that was rejected first, or the usage
            # of others.
            known = job_state.problem is not None and job_state.problem.reason == error.problem.reason
            job_state.problem = error.problem
            self.starts.refused(key)
            if not known:
                self.starts.stay(key)
                self.queue.add(key)  # run again at once, to show the problem in the conditions
                return
        self.queue.add_after(key, backoff)

    async def _refresh(self, key: JobKey) -> None:
        """Read the job again; forget it if it is gone."""
        held = self.jobs.get(key)
        try:
            self.jobs.put(await self.client.get(key))
        except NotFound:
            if held is not None:
                self.job_deleted(held)
        except ApiError as error:
            log.warning("%s: cannot read the job again: %s", key, error)
            self.queue.add_after(key, MIN_BACKOFF_S)


HEAVY_BYTES = 4096
"""Bytes of a configuration above which it is first read and judged beside the event loop. At the size limit
of a spec that takes tens of milliseconds, and the user may change the spec at any time."""


def is_heavy(job: Json) -> bool:
    config = job.get("spec", {}).get("config")
    return config is not None and len(json_codec.write(config)) > HEAVY_BYTES


def _check(job: Json, known: Known) -> None:
    """Read the spec and compute its refusals. Both results are cached, errors included, for later passes."""
    with suppress(ValidationError):
        refusals(known.read_spec(job))


async def _take_keys(controller: Controller, group: asyncio.TaskGroup) -> None:
    was_late = False
    while not was_late:
        key = await controller.queue.get()
        alarm = asyncio.get_running_loop().call_later(LATE_S, _replace, controller, key, group)
        try:
            await controller._pass(key)
        finally:
            alarm.cancel()
            for following in controller.starts.leave(key):
                controller.queue.add(following)
            was_late = controller.queue.done(key)
            controller.telemetry.queue_depth.set(len(controller.queue))


def _replace(controller: Controller, key: JobKey, group: asyncio.TaskGroup) -> None:
    """Mark the pass of `key` late, and start another task that takes keys in place of the one that it holds
    up."""
    controller.queue.passes.late(key)
    for following in controller.starts.late(key):
        controller.queue.add(following)
    group.create_task(_take_keys(controller, group))


async def _list_again(controller: Controller, namespace: str | None) -> None:
    alive = set[str]()
    try:
        async for job in controller.client.list(namespace):
            alive.add(job["metadata"]["uid"])
            try:
                if controller.jobs.put(job):
                    _expect(controller.store, job)
            except Exception:  # one job that cannot be parsed must not cost the others their listing
                log.exception("skipping the job with UID %s", job["metadata"]["uid"])
    except ApiError as error:  # a namespace that cannot be listed must not stop the listing of others
        log.warning("cannot list the jobs again: %s", error)
        return
    for key, job in controller.jobs:
        if namespace in (None, key.namespace) and job["metadata"]["uid"] not in alive:
            await controller._refresh(key)


def _expect(store: PodStore, job: Json) -> None:
    """Tell the pod store the job's current attempt and number of workers. Standby replicas do so as well: the
    views of pods of attempts that are over would fill their memory."""
    status, meta = job.get("status", {}), job["metadata"]
    attempt, workers = status.get("attempt"), (status.get("workers") or {}).get("desired")
    if attempt and workers:
        store.expect(owner_key(meta["namespace"], meta["uid"]), attempt=attempt, workers=workers)
