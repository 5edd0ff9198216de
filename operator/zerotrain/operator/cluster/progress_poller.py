"""Polling of the workers' progress: worker 0 of every running job, and all workers where a job seems to stand
still.

The operator calls the workers, and the workers never call the operator. They need no credentials, and a flood
of ranks cannot reach the operator. The interval grows with the number of jobs, and inspections of all workers
draw on a budget of their own, so that the calls per second stay bounded whatever hangs. A job has at most one
call of a kind in flight, however long its workers take to answer. A call that got no slot says nothing of its
worker. Workers on nodes that are not ready are called by `NodeProber`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from zerotrain.contract.progress import Progress
from zerotrain.contract.worker_environment import WORKER_HTTP_PORT
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.channel import CallKind, NotAsked, SilentChannel, WorkerChannel
from zerotrain.operator.cluster.job_state import JobState, JobStates
from zerotrain.operator.cluster.jobs import JobCache, phase_of
from zerotrain.operator.cluster.limits import InspectionBuckets
from zerotrain.operator.cluster.store import JobKey, PodStore, owner_key
from zerotrain.operator.cluster.worker_calls import (
    Answer,
    NodeProber,
    WorkerCalls,
    any_not_asked,
    none_reachable,
    timed_out,
)
from zerotrain.operator.reconcile import PodView, stragglers
from zerotrain.operator.reconcile.hangs import HangLimits, is_met, stands_still, suspect_after_s
from zerotrain.operator.reconcile.inspection import inspect

log = logging.getLogger(__name__)

POLLED_PHASES = frozenset({"Starting", "Running", "Suspending", "Yielding"})
PROBED_PHASES = POLLED_PHASES | {"Pending"}
"""Phases in which workers may run and be lost with their node, which includes the time in which other workers
still wait for their image."""

INSPECTED_PHASES = frozenset({"Starting", "Running"})
TICK_S = 0.5
MIN_INTERVAL_S = 2.0
CALLS_PER_SECOND = 100.0
"""Budget of polls over all jobs: beyond 200 running jobs each one is polled less often."""

PASS_INTERVAL_S = 10.0
"""Minimum seconds between two passes for records that say only that the step moved: each pass costs a
millisecond."""

SILENT_S = 30.0
"""Seconds without an answer of worker 0 after which all workers are inspected."""

UNRESPONSIVE_S = 120.0
"""Seconds without an answer after which the user is told that something keeps the operator from its worker: a
launcher answers within seconds of its start, whatever the ranks do."""

INSPECTION_INTERVAL_S = 15.0
ALARM_INTERVAL_S = 5.0
"""Seconds between two inspections while the status reports a hang: the attempt ends only after another
inspection."""

MAX_UNREACHABLE_INTERVAL_S = 240.0
"""Maximum seconds between two inspections of a job none of whose workers can be reached. Each inspection
without any answer doubles the interval."""

UNRESPONSIVE_AFTER = 2
"""Number of consecutive calls that time out before the job is polled in `CallKind.UNRESPONSIVE`; one may be
lost."""

INSPECTION_CALLS_PER_SECOND = 25.0

MAX_IDLE_S = 30 * 86_400.0
"""Largest idle time that is believed of a step that was just reported."""


@dataclass(slots=True)
class _Poll:
    """State of the polling of one job."""

    key: JobKey
    answered_at: float
    silent_since: float | None = None
    """Time since which worker 0 runs and does not answer."""
    unanswered_at: float = -math.inf
    """Time of the last call that worker 0 did not answer."""
    skipped: bool = False
    """Whether a poll since then got no slot."""
    timeouts: int = 0
    """Number of consecutive calls to worker 0 that timed out."""
    due: float = 0.0
    asked_at: float = -math.inf
    """Time of the last call to worker 0 that was made; calls that got no slot do not count."""
    polling: bool = False
    """Whether a call to worker 0 is in flight."""
    inspecting: bool = False
    """Whether an inspection of all workers is in progress."""
    inspected_at: float = -math.inf
    failed_inspections: int = 0
    """Number of consecutive inspections that reached no worker."""
    sample_round: int = 0
    """Index of the sample of workers that an inspection calls first. It stays at the sample that answered
    last."""
    seen: tuple[int, int, str] = (0, 0, "")
    step: tuple[int, int] | None = None
    """Attempt and step of the last record."""
    news: object = None
    """Content of the last record that is worth a pass at once."""
    passed_at: float = -math.inf

    @property
    def is_unresponsive(self) -> bool:
        """Return whether worker 0 has been unresponsive for UNRESPONSIVE_S. Time in which it was not called
        does not count."""
        return self.silent_since is not None and self.unanswered_at - self.silent_since >= UNRESPONSIVE_S

    def inspection_due(self, interval_s: float) -> float:
        """Return the time from which on the next inspection may be made."""
        return self.inspected_at + min(
            interval_s * 2.0 ** min(self.failed_inspections, 10), MAX_UNREACHABLE_INTERVAL_S
        )


class ProgressPoller:
    """Poller of the workers, until `run()` is cancelled. `changed` is called when a record has news."""

    def __init__(
        self,
        *,
        jobs: JobCache,
        store: PodStore,
        job_states: JobStates,
        channel: WorkerChannel,
        changed: Callable[[JobKey], None],
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is the time that passes are decided at; `clock` paces the polling."""
        self._jobs, self._store, self._job_states = jobs, store, job_states
        self._channel, self._changed = channel, changed
        self._now, self._clock = now, clock
        self._polls: dict[str, _Poll] = {}
        self._looking = InspectionBuckets(INSPECTION_CALLS_PER_SECOND, clock)
        # The listener has budgets of its own: an inspection of thousands of workers would otherwise keep
        # those on silent nodes from being called.
        self._prober = NodeProber(
            job_states=job_states, channel=channel, changed=changed, now=now, clock=clock
        )

    @property
    def unresponsive(self) -> int:
        """Return how many jobs have an unresponsive worker 0 that runs. May be called from any thread."""
        return sum(poll.is_unresponsive for poll in list(self._polls.values()))

    async def run(self) -> None:
        """Poll the jobs that are due, twice a second. An unresponsive worker delays its own job alone."""
        pending: set[asyncio.Task[None]] = set()
        while True:
            pending |= self.start_due()
            await asyncio.sleep(TICK_S)
            pending = {task for task in pending if not task.done()}

    def start_due(self) -> set[asyncio.Task[None]]:
        """Start one call for every job that is due, and return the tasks."""
        running = self._jobs.in_phases(POLLED_PHASES)
        active = [*running, *self._jobs.in_phases(PROBED_PHASES - POLLED_PHASES)]
        self._forget(running, active)
        interval, now = max(MIN_INTERVAL_S, len(running) / CALLS_PER_SECOND), self._clock()
        started = set()
        # The number of jobs does not slow this down: the time after which a silent node counts as lost does
        # not grow with it either.
        for key, job in active if self._job_states.nodes.any_silent() else ():
            uid = job["metadata"]["uid"]
            if self._prober.begins(uid):
                attempt = int(job["status"].get("attempt", 0))
                pods = self._started(key.namespace, uid, attempt)
                started.add(asyncio.create_task(self._prober.probe(key, uid, attempt, pods)))
        due: list[tuple[_Poll, Json]] = []
        for key, job in running:
            poll = self._polls.setdefault(job["metadata"]["uid"], _Poll(key=key, answered_at=now))
            if poll.due <= now and not poll.polling:
                due.append((poll, job))
        # When slots are scarce, the jobs that have waited longest get them.
        for poll, job in sorted(due, key=lambda item: item[0].asked_at):
            poll.due, poll.polling = now + interval, True
            started.add(asyncio.create_task(self._ask(poll, job)))
        return started

    async def _ask(self, poll: _Poll, job: Json) -> None:
        """Call worker 0, and then all workers if an inspection is called for and none is in progress."""
        try:
            suspects = await self._pull(poll.key, job, poll)
        finally:
            poll.polling = False
        if suspects and not poll.inspecting:
            poll.inspecting = True
            try:
                await self._inspect(poll.key, job, suspects, poll)
            finally:
                poll.inspecting = False

    async def _pull(self, key: JobKey, job: Json, poll: _Poll) -> Mapping[int, PodView]:
        """Poll worker 0 and return the workers to inspect, if any."""
        uid, attempt = job["metadata"]["uid"], int(job["status"].get("attempt", 0))
        started = {pod.index: pod for pod in self._started(key.namespace, uid, attempt)}
        pods = {index: pod for index, pod in started.items() if not pod.ended}
        # Worker 0 may have completed while others hang in their last work: then only those are inspected.
        begun = self._clock()
        kind = CallKind.UNRESPONSIVE if poll.timeouts >= UNRESPONSIVE_AFTER else CallKind.POLL
        calls = WorkerCalls(channel=self._channel, key=key, uid=uid, attempt=attempt)
        answer = await calls.report(pods[0], kind) if 0 in pods else None
        if isinstance(answer, NotAsked):
            poll.skipped = True
        if self._jobs.get(key) is None or isinstance(answer, NotAsked):
            return {}  # a deleted job must not be remembered; without a call nothing is known
        poll.asked_at = begun
        poll.timeouts = poll.timeouts + 1 if timed_out(answer) else 0
        report = _report_in(answer)
        self._record_silence(key, uid, poll, silent=0 in pods and report is None)
        if report is not None:
            poll.failed_inspections = 0
        if 0 not in started:
            return {}
        if report is not None and report.ranks:
            self._take(key, uid, report, poll)
        is_suspect = phase_of(job) in INSPECTED_PHASES and self._is_suspect(job, report, poll)
        return pods if is_suspect else {}

    def _record_silence(self, key: JobKey, uid: str, poll: _Poll, *, silent: bool) -> None:
        """Record whether worker 0 can be reached at all. Where pods run nothing (`SilentChannel`), no worker
        answers."""
        if not silent or isinstance(self._channel, SilentChannel):
            poll.silent_since = None
        else:
            now = self._clock()
            if poll.silent_since is None:
                poll.silent_since = now
            elif poll.skipped:
                poll.silent_since += now - poll.unanswered_at
            poll.unanswered_at = now
        poll.skipped = False
        job_state, unresponsive = self._job_states.of(uid), poll.is_unresponsive
        if job_state.unresponsive == unresponsive:
            return
        job_state.unresponsive = unresponsive
        if unresponsive:
            log.warning(
                "%s/%s: worker 0 runs but has not responded for %d s; allow the operator to reach its TCP "
                "port %d",
                key.namespace,
                key.name,
                UNRESPONSIVE_S,
                WORKER_HTTP_PORT,
            )
        self._changed(key)

    def _take(self, key: JobKey, uid: str, report: WorkerReport, poll: _Poll) -> None:
        job_state, progress = self._job_states.of(uid), report.ranks[0]
        job_state.progress = progress
        step = (progress.attempt, progress.step)
        if step != poll.step or job_state.step_moved_at is None:
            poll.step, job_state.step_moved_at = step, self._now() - _idle(progress)
        poll.answered_at = self._clock()
        seen = (progress.attempt, progress.step, str(progress.phase))
        if seen != poll.seen:
            poll.seen, job_state.inspection = seen, None
        alarmed = self._has_alarm(key)
        # A checkpoint may become durable or prove damaged while the step stands still. An alarm ends with a
        # step that moves.
        news = (
            (progress.attempt, progress.phase, progress.step > 0, progress.total_steps),
            (progress.checkpoint, progress.rejected_checkpoints, progress.resumed_from),
            # Only the level counts: the seconds change with every record.
            stragglers.level_of(progress, _straggler_percent(self._jobs.get(key))),
        )
        if alarmed or news != poll.news or poll.answered_at - poll.passed_at >= PASS_INTERVAL_S:
            poll.news, poll.passed_at = news, poll.answered_at
            self._changed(key)

    def _has_alarm(self, key: JobKey) -> bool:
        job = self._jobs.get(key)
        return job is not None and job.get("status", {}).get("hang") is not None

    def _is_suspect(self, job: Json, report: WorkerReport | None, poll: _Poll) -> bool:
        if report is None or not report.ranks:
            return self._clock() - poll.answered_at >= SILENT_S
        first = report.ranks[0]
        if first.motion is None:
            return False  # a program that never reports
        return first.motion.idle_seconds >= suspect_after_s(_limits(job), first)

    async def _inspect(self, key: JobKey, job: Json, pods: Mapping[int, PodView], poll: _Poll) -> None:
        """Ask every worker whether it moves, if an inspection is due and the budget allows it."""
        now, uid, attempt = self._clock(), job["metadata"]["uid"], int(job["status"]["attempt"])
        budget = self._looking.of(len(pods))
        # The alarm usually comes from the last inspection; one that may end it comes sooner.
        alarmed = self._has_alarm(key)
        due = poll.inspection_due(ALARM_INTERVAL_S if alarmed else INSPECTION_INTERVAL_S)
        if now < due or not budget.try_take(len(pods)):
            return
        poll.inspected_at = now
        kind = CallKind.SAMPLE if poll.failed_inspections else CallKind.INSPECT
        calls = WorkerCalls(channel=self._channel, key=key, uid=uid, attempt=attempt)
        answers = await calls.inspection_reports(pods, kind, sample_round=poll.sample_round)
        budget.refund(len(pods) - len(answers))
        if self._jobs.get(key) is None or any_not_asked(answers.values()):
            return
        unreachable = none_reachable(answers.values())
        poll.failed_inspections, poll.sample_round = (
            (poll.failed_inspections + 1, poll.sample_round + 1) if unreachable else (0, poll.sample_round)
        )
        job_state: JobState = self._job_states.of(uid)
        reports = {index: _report_in(answer) for index, answer in answers.items()}
        found = inspect(reports, attempt=attempt, at=self._now())
        keeps = alarmed or not is_met(found) or stands_still(_limits(job), found)
        job_state.inspection = found if keeps else None
        self._changed(key)

    def _started(self, namespace: str, uid: str, attempt: int) -> Iterable[PodView]:
        present, _ = self._store.of_job(owner_key(namespace, uid))
        return [pod for pod in present if pod.attempt == attempt and pod.started]

    def _forget(self, running: Sequence[tuple[JobKey, Json]], active: Sequence[tuple[JobKey, Json]]) -> None:
        asked, probed = ({job["metadata"]["uid"] for _, job in jobs} for jobs in (running, active))
        for uid, poll in self._polls.items():
            # The flag belongs to the attempt that is over. The next one may wait for its nodes, unpolled, for
            # hours.
            if uid not in asked and self._job_states.knows(uid) and self._job_states.of(uid).unresponsive:
                self._job_states.of(uid).unresponsive = False
                self._changed(poll.key)
        self._polls = {uid: poll for uid, poll in self._polls.items() if uid in asked}
        self._prober.forget_others(probed)


def _report_in(answer: Answer | None) -> WorkerReport | None:
    return answer if isinstance(answer, WorkerReport) else None


def _idle(progress: Progress) -> timedelta:
    """Return how long the step had stood still when it was reported, by the launcher's clock, which never
    jumps."""
    idle_s = progress.motion.idle_seconds if progress.motion is not None else 0.0
    return timedelta(seconds=min(max(idle_s, 0.0), MAX_IDLE_S)) if math.isfinite(idle_s) else timedelta(0)


def _straggler_percent(job: Json | None) -> int:
    policy = (job or {}).get("spec", {}).get("hangPolicy") or {}
    return policy.get("stragglerPercent") or stragglers.DEFAULT_PERCENT


def _limits(job: Json) -> HangLimits:
    """Return the job's limits without the doubling for earlier hangs: early inspections cost calls only."""
    policy = job.get("spec", {}).get("hangPolicy")
    return HangLimits.read(policy if isinstance(policy, Mapping) else None)
