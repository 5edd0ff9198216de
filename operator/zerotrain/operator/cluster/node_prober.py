"""Calls to workers on nodes that are not ready: the silence of their kubelet says nothing of the ranks.

Silence counts against a node only as far as its workers were called. So these calls have slots and a budget
of their own. Where dead nodes of other jobs take all of these, the nodes that were not called are remembered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster.channel import CallKind, NotAsked, WorkerChannel, share_of
from zerotrain.operator.cluster.job_state import JobState, JobStates
from zerotrain.operator.cluster.rate import InspectionBuckets
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.cluster.worker_poller import WorkerPoller, call_concurrently
from zerotrain.operator.reconcile import PodView

INTERVAL_S = 5.0
"""Seconds between two calls to the workers of a node that is not ready."""

CALLS_PER_SECOND = 100.0
"""Budget of calls: of thousands of nodes, each must be called well within the time after which a silent one
counts as lost."""

MISSED_S = 30.0
"""Seconds since the last call of a node after which a call that is not made leaves a gap, in which the worker
might have answered."""


@dataclass(slots=True)
class _Schedule:
    """Schedule of one job."""

    due: float = 0.0
    asked_at: dict[str, float] = field(default_factory=dict)
    """Time at which the last call ended, by the name of a node that is not ready."""


class NodeProber:
    """Caller that maintains `JobState.responded_at` and `.unasked`. `changed` is called when a node in
    `unasked` was called."""

    def __init__(
        self,
        *,
        job_states: JobStates,
        channel: WorkerChannel,
        changed: Callable[[JobKey], None],
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        self._job_states, self._channel, self._changed = job_states, channel, changed
        self._now, self._clock = now, clock
        self._schedules: dict[str, _Schedule] = {}
        self._budgets = InspectionBuckets(CALLS_PER_SECOND, clock)

    def forget_others(self, uids: Collection[str]) -> None:
        """Forget all jobs but these."""
        self._schedules = {uid: schedule for uid, schedule in self._schedules.items() if uid in uids}

    def begins(self, uid: str) -> bool:
        """Return whether `probe` is due for the job; the caller must then call it. A job has one round at a
        time."""
        schedule = self._schedules.setdefault(uid, _Schedule())
        is_due = schedule.due <= self._clock()
        if is_due:
            schedule.due = math.inf
        return is_due

    async def probe(self, key: JobKey, uid: str, attempt: int, pods: Iterable[PodView]) -> None:
        """Call one of the job's `pods` on each node that is not ready."""
        began, schedule = self._clock(), self._schedules.setdefault(uid, _Schedule())
        running = [pod for pod in pods if pod.started and not pod.ended]
        troubled = self._job_states.nodes.of(running)
        nodes = {name for name, view in troubled.items() if not view.ready and not view.gone}
        silent = {pod.node: pod for pod in running if pod.node is not None and pod.node in nodes}
        try:
            if silent:
                poller = WorkerPoller(channel=self._channel, key=key, uid=uid, attempt=attempt)
                await self._ask(poller, silent, schedule)
        finally:
            schedule.due = began + INTERVAL_S

    async def _ask(self, poller: WorkerPoller, silent: Mapping[str, PodView], schedule: _Schedule) -> None:
        # If the job is deleted meanwhile, `job_state` is no longer part of the states, and nothing is
        # remembered.
        job_state = self._job_states.of(poller.uid)
        job_state.unasked &= silent.keys()
        schedule.asked_at = {node: at for node, at in schedule.asked_at.items() if node in silent}
        if not self._budgets.of(len(silent)).try_take(len(silent)):
            for node in silent:
                self._miss(job_state, schedule, node)
            return

        async def ask(node: str) -> None:
            answer = await poller.report(silent[node], CallKind.PROBE)
            if isinstance(answer, NotAsked):
                self._miss(job_state, schedule, node)
                return
            schedule.asked_at[node] = self._clock()
            # Recorded at once: the calls to the others may take long to time out.
            if isinstance(answer, WorkerReport):
                job_state.responded_at[node] = self._now()
            if node in job_state.unasked:
                job_state.unasked.discard(node)
                self._changed(poller.key)  # the time at which the node counts as lost has changed

        living_first = sorted(silent, key=lambda node: node not in job_state.responded_at)
        await call_concurrently(ask, living_first, most=share_of(CallKind.PROBE))

    def _miss(self, job_state: JobState, schedule: _Schedule, node: str) -> None:
        if self._clock() - schedule.asked_at.get(node, -math.inf) >= MISSED_S:
            job_state.unasked.add(node)
