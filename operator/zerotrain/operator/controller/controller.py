"""Events that bring passes, the tasks that run them, and what follows a pass that fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

from zerotrain.operator.api.job_text import UNREAD
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
from zerotrain.operator.cluster.executor import ActionRefused
from zerotrain.operator.cluster.jobs import key_of, phase_of
from zerotrain.operator.cluster.store import JobKey, PodStore, owner_key
from zerotrain.operator.constants import Reason
from zerotrain.operator.controller.job_pass import RECHECK_S, ActionHeld, JobPass, PassContext
from zerotrain.operator.controller.status_debounce import StatusHeld
from zerotrain.operator.reconcile import Event
from zerotrain.operator.reconcile.plan import EventType

log = logging.getLogger(__name__)

PODS_SETTLE_S = 0.1
"""Seconds to wait for further changes of a job's pods. Pods of a job change together; one pass for all of
them saves as many status writes."""

START_SETTLE_S = 0.5
"""Seconds to wait instead while all pods of a job start well: only the last pod to get ready matters to the
user."""

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

REPORT_EVERY = 30
"""Number of unexpected errors of a job in a row of which the first is reported in an event: half an hour with
the longest backoff."""

STARTING = frozenset({"Pending", "Starting"})
"""Phases in the status during which pods are created and start."""


def conflict_backoff_s(lost: int) -> float:
    """Return the pause in seconds after `lost` write conflicts in a row."""
    if lost <= FREE_CONFLICTS:
        return 0.0
    return min(CONFLICT_BACKOFF_S * 2.0 ** min(lost - FREE_CONFLICTS - 1, 10), MAX_CONFLICT_BACKOFF_S)


@dataclass(frozen=True, kw_only=True)
class Controller(PassContext):
    """Passes of all jobs, and the events that bring them."""

    def job_changed(self, job: Json) -> None:
        """Take in a job from the watch and queue a pass if it changed."""
        if self.jobs.put(job):
            _expect(self.store, job)
            self.queue.add(key_of(job))

    def job_deleted(self, job: Json) -> None:
        """Clear what the operator holds in memory of a deleted job. Kubernetes deletes the job's objects by
        their ownerReferences."""
        uid = job["metadata"]["uid"]
        if self.jobs.remove(job):
            self.queue.forget(key_of(job))
            self.starts.forget(key_of(job))
        self.store.forget(owner_key(job["metadata"]["namespace"], uid))
        self.job_states.forget(uid)
        self.statuses.settled(uid)

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
                group.create_task(self._take_keys(group))

    async def resync(self, every_s: float) -> None:
        """List all jobs every `every_s` seconds: a watch that died silently must not cost a job."""
        while True:
            await asyncio.sleep(every_s)
            try:
                for namespace in self.client.scopes:
                    await self._list_again(namespace)
            except Exception:
                # Only this round fails. The next one must follow, or nothing is ever forgotten.
                log.exception("cannot list the jobs again")
            known = {job["metadata"]["uid"]: key for key, job in self.jobs}
            self.store.prune({owner_key(key.namespace, uid) for uid, key in known.items()})
            self.job_states.prune(known.keys())
            self.statuses.prune(known.keys())
            self.telemetry.count_jobs(self.phases())
            self.all_changed()

    def phases(self) -> Counter[str]:
        return Counter(phase_of(job) or "Pending" for _, job in self.jobs)

    async def _pass(self, key: JobKey) -> None:
        job = self.jobs.get(key)
        if job is None or not self._may_pass(key, job):
            return
        started = time.monotonic()
        try:
            async with self.writing_large if UNREAD in job else nullcontext():
                await JobPass(self, key, job).run()
            job_state = self.job_states.of(job["metadata"]["uid"])
            job_state.failures = job_state.conflicts = 0
        except Exception as error:
            await self._recover(key, job, error)
        finally:
            self.telemetry.reconcile_seconds.observe(time.monotonic() - started)

    def _may_pass(self, key: JobKey, job: Json) -> bool:
        """Return whether the job may have its pass now. Otherwise a later one is queued, or an event brings
        it."""
        if not self.may_act.is_set():
            return False
        if self.store.sight.since(key.namespace) is None:
            return False  # its pods cannot be read; the first list that succeeds brings the pass
        if not self.leads():
            self.queue.add_after(key, RECHECK_S)  # the next renewal shows whether the lease is still held
            return False
        if UNREAD in job and self.writing_large.locked():
            self.queue.add_after(key, LARGE_RECHECK_S)
            return False
        return True

    async def _recover(self, key: JobKey, job: Json, error: Exception) -> None:
        """Queue the next pass after one that ended with `error`."""
        held = self.jobs.get(key)
        if held is None or held["metadata"]["uid"] != job["metadata"]["uid"]:
            self.statuses.settled(job["metadata"]["uid"])  # deleted while its status was written
        match error:
            case Conflict():
                # Another client wrote between the operator's read and write: decide again on the stored
                # object.
                log.debug("%s: %s", key, error)
                await self._refresh(key)
                job_state = self.job_states.of(job["metadata"]["uid"])
                job_state.conflicts += 1
                self.queue.add_after(key, conflict_backoff_s(job_state.conflicts))
            case NotFound():
                # The job is gone, or something beside it (its namespace, a pod): then it still needs its
                # pass.
                await self._refresh(key)
                self.queue.add_after(key, MIN_BACKOFF_S)
            case ActionRefused():
                self._retry(key, job, error)
            case StatusHeld() | ActionHeld():
                log.debug("%s: %s", key, error)  # its next try is in the queue already
            case NotLeading():
                # The leader decides anew. So does this replica, if the next renewal shows that no other took
                # the lease.
                log.info("%s: %s", key, error)
                self.queue.add_after(key, RECHECK_S)
            case _:
                self.telemetry.reconcile_errors.inc()
                expected = isinstance(error, (Unavailable, Forbidden, Unprocessable))
                level = logging.WARNING if expected else logging.ERROR
                log.log(level, "%s: %s", key, error, exc_info=None if expected else error)
                self._retry(key, job, error)
                if not expected:
                    self._report_error(job, error)

    def _retry(self, key: JobKey, job: Json, error: Exception) -> None:
        job_state = self.job_states.of(job["metadata"]["uid"])
        job_state.failures += 1
        backoff = min(MIN_BACKOFF_S * 2.0 ** min(job_state.failures - 1, 10), MAX_BACKOFF_S)
        if isinstance(error, ActionRefused):
            # The message may change with every pass: it names the pod that was rejected first, or the usage
            # of others.
            known = job_state.problem is not None and job_state.problem.reason == error.problem.reason
            job_state.problem, job_state.refused_until = error.problem, time.monotonic() + backoff
            self.starts.refused(key)
            if not known:
                self.starts.stay(key)
                self.queue.add(key)  # run again at once, to show the problem in the conditions
                return
        self.queue.add_after(key, backoff)

    def _report_error(self, job: Json, error: Exception) -> None:
        """Emit an event on the job, whose status may stay as it is until the cause is corrected. Events are
        deleted after an hour, so a later failure emits another one."""
        failures = self.job_states.of(job["metadata"]["uid"]).failures
        if failures % REPORT_EVERY != 1:
            return
        message = (
            f"the operator fails to process this job (failure {failures} in a row) and tries again: "
            f"{type(error).__name__}: {error}"
        )
        attempt = int(job.get("status", {}).get("attempt") or 0)
        event = Event(reason=Reason.INTERNAL_ERROR, message=message, type=EventType.WARNING, attempt=attempt)
        self.events.emit(job, (event,))

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

    async def _take_keys(self, group: asyncio.TaskGroup) -> None:
        was_late = False
        while not was_late:
            key = await self.queue.get()
            alarm = asyncio.get_running_loop().call_later(LATE_S, self._replace, key, group)
            try:
                await self._pass(key)
            finally:
                alarm.cancel()
                for following in self.starts.leave(key):
                    self.queue.add(following)
                was_late = self.queue.done(key)
                self.telemetry.queue_depth.set(len(self.queue))

    def _replace(self, key: JobKey, group: asyncio.TaskGroup) -> None:
        """Mark the pass of `key` late, and start another task that takes keys in place of the one that it
        holds up."""
        self.queue.passes.late(key)
        for following in self.starts.grant():
            self.queue.add(following)
        group.create_task(self._take_keys(group))

    async def _list_again(self, namespace: str | None) -> None:
        alive = set[str]()
        try:
            async for job in self.client.list(namespace):
                alive.add(job["metadata"]["uid"])
                try:
                    if self.jobs.put(job):
                        _expect(self.store, job)
                except Exception:  # one job that cannot be parsed must not cost the others their listing
                    log.exception("skipping the job with UID %s", job["metadata"]["uid"])
        except ApiError as error:  # a namespace that cannot be listed must not stop the listing of others
            log.warning("cannot list the jobs again: %s", error)
            return
        for key, job in self.jobs:
            if namespace in (None, key.namespace) and job["metadata"]["uid"] not in alive:
                await self._refresh(key)


def _expect(store: PodStore, job: Json) -> None:
    """Tell the pod store the job's current attempt and number of workers. Standby replicas do so as well: the
    views of pods of attempts that are over would fill their memory."""
    status, meta = job.get("status", {}), job["metadata"]
    attempt, workers = status.get("attempt"), (status.get("workers") or {}).get("desired")
    if attempt and workers:
        store.expect(owner_key(meta["namespace"], meta["uid"]), attempt=attempt, workers=workers)
