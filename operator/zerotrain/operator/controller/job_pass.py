"""One pass over one job: observe, decide, write the status, emit events, act."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from pydantic import ValidationError

from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.api.packed import Packed
from zerotrain.operator.api.planning import PlanMissing, known_plan
from zerotrain.operator.api.validation import refusals
from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.events import EventWriter
from zerotrain.operator.cluster.executor import Executor, Unfinished
from zerotrain.operator.cluster.job_state import JobState, JobStates
from zerotrain.operator.cluster.jobs import JobCache, JobClient
from zerotrain.operator.cluster.store import JobKey, PodStore, owner_key
from zerotrain.operator.cluster.telemetry import Telemetry
from zerotrain.operator.controller.start_slots import StartSlots, has_begun, pods_to_create
from zerotrain.operator.controller.status_debounce import StatusDebounce, StatusHeld, is_patient
from zerotrain.operator.controller.work_queue import WorkQueue
from zerotrain.operator.reconcile import (
    CreateWorkers,
    KeepShared,
    Known,
    Observed,
    Plan,
    ProtectWorkers,
    RequestYield,
    reconcile,
)

RECHECK_S = 1.0
"""Seconds until the next pass after actions. The events that the actions cause bring a pass earlier, unless
they are lost."""

QUEUE_RECHECK_S = 5.0
"""Fewest seconds until the next pass for a deadline, while a job waits for a slot or its actions failed."""

BUSY_S = 0.1
"""Seconds of a status write above which the API server counts as busy: actions that can wait then get a pass
of their own, and no pass waits twice for a busy server."""

UNHURRIED = (CreateWorkers, ProtectWorkers)
"""Actions that can wait for a pass of their own, as nothing is lost before they run."""

BESIDE_TRAINING = (KeepShared, ProtectWorkers)
"""Actions for a job that trains. It has passes all the time, and a rejection lasts until somebody changes
something, so these wait for the backoff."""


class ActionHeld(Exception):
    """Error of a pass that left out an action that was rejected and whose next try waits."""


@dataclass(frozen=True, kw_only=True)
class PassContext:
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
    leads: Callable[[], bool]
    """Return whether no other replica can hold the lease yet. Called before every pass, because a process
    that was stopped for a while finds its asyncio events as it left them."""

    clock: Callable[[], datetime]
    """Clock of the API server: the times in the status and on pods are its own."""

    starts: StartSlots = field(default_factory=StartSlots)

    statuses: StatusDebounce = field(default_factory=StatusDebounce)
    """Statuses that wait for their write."""

    planning: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Semaphore for work beside the event loop, which makes a memory plan or judges a large configuration.
    One task at a time: two would only slow each other down."""

    writing_large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Semaphore for passes of jobs whose specs pass the limits, so that their statuses are written one by
    one. The API server reads and checks the whole object at each write; a few dozen objects of a megabyte at
    once keep it from answering for seconds."""


@dataclass(slots=True)
class JobPass:
    """One pass over one job."""

    context: PassContext
    key: JobKey
    job: Json
    """The newest body that the pass knows."""
    lost_attempt: int = field(default=0, init=False)
    """Attempt of the job's pods, if its status has none; 0 otherwise."""

    @property
    def uid(self) -> str:
        return str(self.job["metadata"]["uid"])

    @property
    def job_state(self) -> JobState:
        return self.context.job_states.of(self.uid)

    async def run(self) -> None:
        """Run the pass. Raises ActionRefused, ApiError, StatusHeld."""
        if self._stands_in_line():
            return
        await self._read_newest()
        observed = self._observe()
        plan = await self._decide(observed)
        if plan is None or not self._may_create(plan, observed):
            return
        began = time.monotonic()
        await self._write(plan)
        self.context.events.emit(self.job, plan.events)
        unhurried = plan.actions and all(isinstance(action, UNHURRIED) for action in plan.actions)
        if unhurried and time.monotonic() - began > BUSY_S:
            self._go_on()
            return
        try:
            await self._act(plan)
        except Exception:
            # The backoff must not outlast a deadline. A deadline that has passed must not remove the backoff.
            self._wake(plan, at_least_s=QUEUE_RECHECK_S)
            raise
        self._wake(plan)

    def _stands_in_line(self) -> bool:
        """Return whether the job is new and waits for a slot: a pass could only find out that it waits."""
        starts, workers = self.context.starts, self.job.get("spec", {}).get("workers")
        if "status" in self.job or not isinstance(workers, int) or starts.enter(self.key, pods=workers):
            return False
        quiet_s = starts.quiet_s(self.key)
        if quiet_s:
            self.context.queue.add_after(self.key, quiet_s)
        return bool(quiet_s)

    async def _read_newest(self) -> None:
        """Read the job anew if its pods show that it is old: no decision shall end in a write that
        conflicts. If it has no attempt even then, its status was reset: it is written before the pods are
        created. An attempt that is only older than its pods is believed, as pods can be forged."""
        newest = self.context.store.newest_attempt(owner_key(self.key.namespace, self.uid))
        if newest > _attempt_of(self.job):
            self.context.jobs.put(await self.context.client.get(self.key))
            self.job = self.context.jobs.get(self.key) or self.job
            self.lost_attempt = newest if _attempt_of(self.job) == 0 else 0

    def _observe(self) -> Observed:
        context = self.context
        observed = context.job_states.observe(self.key.namespace, self.uid, context.store)
        if (older := context.jobs.older_in_shortage(self.job)) is not None:
            observed = replace(observed, older_in_shortage=older)
        if self.lost_attempt:
            observed = replace(observed, lost_attempt=self.lost_attempt)
        if observed.problem is None and context.starts.quiet_s(self.key) == 0.0:
            observed = replace(observed, in_start_queue=True)
        return observed

    async def _decide(self, observed: Observed) -> Plan | None:
        """Return the plan, made beside the event loop where that takes long. None if the job changed
        meanwhile: it was edited, is gone, or was replaced by a new one."""
        context, job = self.context, self.job
        known = context.job_states.known(self.uid)
        if not known.has_read(job) and is_heavy(job):
            async with context.planning:
                await asyncio.to_thread(_check, job, known)
            if self._has_changed():
                return None
        try:
            return reconcile(job, observed, context.clock(), known, known_plan)
        except PlanMissing:
            async with context.planning:
                plan = await asyncio.to_thread(reconcile, job, observed, context.clock(), known)
            return None if self._has_changed() else plan

    def _has_changed(self) -> bool:
        """Return whether the job is not the one that the pass decides on. Its next pass is queued then."""
        changed = self.context.jobs.get(self.key) is not self.job
        if changed:
            self.context.queue.add(self.key)
        return changed

    def _may_create(self, plan: Plan, observed: Observed) -> bool:
        """Return whether the job has a slot for the pods that the plan creates. Otherwise it waits in a
        queue: a deadline ends it there as well, and a pass shows in the status that it waits."""
        starts = self.context.starts
        if starts.enter(self.key, pods=pods_to_create(plan), begun=has_begun(plan, observed)):
            return True
        self._wake(plan, at_least_s=QUEUE_RECHECK_S)
        quiet_s = starts.quiet_s(self.key)
        if observed.problem is None and not observed.in_start_queue and quiet_s is not None:
            self.context.queue.add_after(self.key, quiet_s)
        return False

    def _wake(self, plan: Plan, *, at_least_s: float = 0.0) -> None:
        """Queue a pass for the plan's next deadline."""
        if plan.wake_at is not None:
            wait_s = (plan.wake_at - self.context.clock()).total_seconds()
            self.context.queue.add_after(self.key, max(wait_s, at_least_s))

    async def _write(self, plan: Plan) -> None:
        """Write the plan's status, or leave it for a later pass if it decides nothing. Raises ApiError, and
        StatusHeld while a rejected write waits: then no action may run."""
        context, statuses = self.context, self.context.statuses
        if plan.status is None:
            statuses.settled(self.uid)
            return
        if (held_s := statuses.held_s(self.uid)) > 0:
            context.queue.add_after(self.key, held_s)
            raise StatusHeld(f"the write of its status was rejected and is retried in {held_s:.0f} s")
        before = context.job_states.known(self.uid).read_status(self.job)
        if is_patient(before, plan) and (wait_s := statuses.wait_s(self.uid)) > 0:
            context.queue.add_after(self.key, wait_s)  # later changes share the write
            return
        write = context.client.write_status(self.job, plan.status)
        self.job = await statuses.tried(self.uid, self.key, write)
        self._wrote(plan.status)

    def _wrote(self, status: ZeroTrainingJobStatus) -> None:
        """Keep the status that was written."""
        self.context.jobs.wrote(self.job)
        self.context.job_states.known(self.uid).keep_status(self.job, status)
        owner = owner_key(self.key.namespace, self.uid)
        self.context.store.expect(owner, attempt=status.attempt, workers=status.workers.desired)

    def _go_on(self) -> None:
        """Leave what remains to the next pass, which comes at once and keeps the job's slot."""
        self.job_state.making = True
        self.context.starts.stay(self.key)
        self.context.queue.add(self.key)

    async def _act(self, plan: Plan) -> None:
        """Perform the actions that are due. Raises ActionHeld if another one is not."""
        job_state, queue = self.job_state, self.context.queue
        job_state.making = False
        if not plan.actions:
            if job_state.problem is not None:  # no action is left that could be rejected
                job_state.problem = None
                queue.add(self.key)
            return
        held_s = job_state.refused_until - time.monotonic() if job_state.problem is not None else 0.0
        actions = plan.actions
        if held_s > 0:
            actions = tuple(item for item in actions if not isinstance(item, BESIDE_TRAINING))
        is_held = len(actions) < len(plan.actions)
        try:
            await self.context.executor.perform(self.job, actions)
        except Unfinished as error:
            self._go_on()
            if not error.made:
                return  # an earlier rejection may still hold
        cleared = job_state.problem is not None and not is_held
        if cleared:
            job_state.problem = None
        # Created objects are in the store already; an answer of a worker is in memory. Both may change the
        # plan. A worker that does not answer is asked again, but not at once: a refused connection takes no
        # time.
        state = job_state.yielding
        answered = state is not None and (state.acked_at is not None or state.refused)
        if cleared or (answered and any(isinstance(action, RequestYield) for action in actions)):
            queue.add(self.key)
        elif actions:
            queue.add_after(self.key, RECHECK_S)
        if is_held:
            queue.add_after(self.key, held_s)
            raise ActionHeld(f"an action was rejected and is tried again in {held_s:.0f} s")


def _attempt_of(job: Json) -> int:
    return int(job.get("status", {}).get("attempt") or 0)


HEAVY_BYTES = 4096
"""Bytes of a configuration above which it is first read and judged beside the event loop. At the size limit
of a spec that takes tens of milliseconds, and the user may change the spec at any time."""


def is_heavy(job: Json) -> bool:
    config = job.get("spec", {}).get("config")
    if isinstance(config, Packed):
        return len(config) > HEAVY_BYTES
    return config is not None and len(json_codec.write(config)) > HEAVY_BYTES


def _check(job: Json, known: Known) -> None:
    """Read the spec and compute its refusals. Both results are cached, errors included, for later passes."""
    with suppress(ValidationError):
        refusals(known.read_spec(job))
