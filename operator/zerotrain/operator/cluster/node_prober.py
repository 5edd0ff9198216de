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
from zerotrain.operator.cluster.call_budget import CallBudgets
from zerotrain.operator.cluster.channel import Lane, NotAsked, WorkerChannel, share_of
from zerotrain.operator.cluster.job_state import JobState, JobStates
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.cluster.worker_poller import WorkerPoller, in_turn
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
class _Turn:
    """Schedule of one job."""

    due: float = 0.0
    asked_at: dict[str, float] = field(default_factory=dict)
    """Time at which the last call ended, by the name of a node that is not ready."""


class NodeProber:
    """Caller that maintains `JobState.heard` and `.unasked`. `changed` is called when a node in `unasked`
    was called."""

    def __init__(
        self,
        *,
        memories: JobStates,
        channel: WorkerChannel,
        changed: Callable[[JobKey], None],
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        self._memories, self._channel, self._changed = memories, channel, changed
        self._now, self._clock = now, clock
        self._turns: dict[str, _Turn] = {}
        self._budgets = CallBudgets(CALLS_PER_SECOND, clock())

    def forget_others(self, uids: Collection[str]) -> None:
        """Forget all jobs but these."""
        self._turns = {uid: turn for uid, turn in self._turns.items() if uid in uids}

    def begins(self, uid: str) -> bool:
        """Return whether `listen` is due for the job; the caller must then call it. A job has one round at a
        time."""
        turn = self._turns.setdefault(uid, _Turn())
        is_due = turn.due <= self._clock()
        if is_due:
            turn.due = math.inf
        return is_due

    async def listen(self, key: JobKey, uid: str, attempt: int, pods: Iterable[PodView]) -> None:
        """Call one of the job's `pods` on each node that is not ready."""
        began, turn = self._clock(), self._turns.setdefault(uid, _Turn())
        running = [pod for pod in pods if pod.started and not pod.ended]
        troubled = self._memories.nodes.of(running)
        nodes = {name for name, view in troubled.items() if not view.ready and not view.gone}
        silent = {pod.node: pod for pod in running if pod.node is not None and pod.node in nodes}
        try:
            if silent:
                asker = WorkerPoller(channel=self._channel, key=key, uid=uid, attempt=attempt)
                await self._ask(asker, silent, turn)
        finally:
            turn.due = began + INTERVAL_S

    async def _ask(self, asker: WorkerPoller, silent: Mapping[str, PodView], turn: _Turn) -> None:
        # If the job is deleted meanwhile, `memory` is no longer part of the memories, and nothing is
        # remembered.
        memory = self._memories.of(asker.uid)
        memory.unasked &= silent.keys()
        turn.asked_at = {node: at for node, at in turn.asked_at.items() if node in silent}
        if not self._budgets.of(len(silent)).take(len(silent), self._clock()):
            for node in silent:
                self._miss(memory, turn, node)
            return

        async def ask(node: str) -> None:
            answer = await asker.report(silent[node], Lane.LISTEN)
            if isinstance(answer, NotAsked):
                self._miss(memory, turn, node)
                return
            turn.asked_at[node] = self._clock()
            # Recorded at once: the calls to the others may take long to time out.
            if isinstance(answer, WorkerReport):
                memory.heard[node] = self._now()
            if node in memory.unasked:
                memory.unasked.discard(node)
                self._changed(asker.key)  # the time at which the node counts as lost has changed

        living_first = sorted(silent, key=lambda node: node not in memory.heard)
        await in_turn(ask, living_first, most=share_of(Lane.LISTEN))

    def _miss(self, memory: JobState, turn: _Turn, node: str) -> None:
        if self._clock() - turn.asked_at.get(node, -math.inf) >= MISSED_S:
            memory.unasked.add(node)
