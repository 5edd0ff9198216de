"""Asks workers on nodes that are not ready: their kubelet's silence says nothing of the ranks.

A silence counts against a node only as far as somebody listened. So the questions draw on slots and on a
budget of their own, and where dead nodes of other jobs take all of these, it is remembered who was not asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster.asking import Asker, in_turn
from zerotrain.operator.cluster.call_budget import CallBudgets
from zerotrain.operator.cluster.channel import Lane, NotAsked, WorkerChannel, share_of
from zerotrain.operator.cluster.memory import JobMemory, Memories
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.reconcile import PodView

INTERVAL_S = 5.0
"""Between two questions to the workers of a node that is not ready."""

CALLS_PER_SECOND = 100.0
"""Each node of thousands must be heard well within the time after which a silent one counts as lost."""

MISSED_S = 30.0
"""A question that is not made so long after the last one leaves a gap: the worker might have answered."""


@dataclass(slots=True)
class _Turn:
    """Of one job."""

    due: float = 0.0
    asked_at: dict[str, float] = field(default_factory=dict)
    """By node that is not ready: when the last question was over."""


class NodeListener:
    """Keeps `JobMemory.heard` and `.unasked`; `changed` is called when a node that was unasked was asked."""

    def __init__(
        self,
        *,
        memories: Memories,
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
        """All jobs but these."""
        self._turns = {uid: turn for uid, turn in self._turns.items() if uid in uids}

    def begins(self, uid: str) -> bool:
        """Whether it is time to `listen` to the job's workers, which must follow. A job has one round at a
        time."""
        turn = self._turns.setdefault(uid, _Turn())
        is_due = turn.due <= self._clock()
        if is_due:
            turn.due = math.inf
        return is_due

    async def listen(self, key: JobKey, uid: str, attempt: int, pods: Iterable[PodView]) -> None:
        """Ask one of the job's `pods` on each node that is not ready."""
        began, turn = self._clock(), self._turns.setdefault(uid, _Turn())
        running = [pod for pod in pods if pod.started and not pod.ended]
        troubled = self._memories.nodes.of(running)
        nodes = {name for name, view in troubled.items() if not view.ready and not view.gone}
        silent = {pod.node: pod for pod in running if pod.node is not None and pod.node in nodes}
        try:
            if silent:
                asker = Asker(channel=self._channel, key=key, uid=uid, attempt=attempt)
                await self._ask(asker, silent, turn)
        finally:
            turn.due = began + INTERVAL_S

    async def _ask(self, asker: Asker, silent: Mapping[str, PodView], turn: _Turn) -> None:
        # Of a job that is deleted meanwhile this is no part any more, and nothing is remembered.
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
            # At once: the others may take long to say nothing.
            if isinstance(answer, WorkerReport):
                memory.heard[node] = self._now()
            if node in memory.unasked:
                memory.unasked.discard(node)
                self._changed(asker.key)  # when it counts as lost is another moment now

        living_first = sorted(silent, key=lambda node: node not in memory.heard)
        await in_turn(ask, living_first, most=share_of(Lane.LISTEN))

    def _miss(self, memory: JobMemory, turn: _Turn, node: str) -> None:
        if self._clock() - turn.asked_at.get(node, -math.inf) >= MISSED_S:
            memory.unasked.add(node)
