"""Slots of jobs that create pods: a few create, and the others wait in a queue without a pass.

A thousand jobs that begin together would each wait for the pods of all others in the middle of a pass. Each
namespace has a queue for jobs of few pods and one for large jobs. The next free slot is for the queue whose
jobs hold the fewest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.reconcile import CreateWorkers, Observed, Plan

LARGE = 24
"""Maximum number of pods that a small job creates."""

MAX_SMALL, MAX_SMALL_OF_ONE = 16, 8
"""Maximum number of small jobs that create at once, of all namespaces and of one. A namespace in which a pass
takes long does not count among all."""

MAX_LARGE, MAX_LARGE_OF_ONE = 4, 1
"""The same of large jobs. Two of a namespace that together exceed its quota would each get a part."""

TIGHT_S = 600.0
"""Seconds after a rejection in which all jobs of several pods use the queue of large ones."""

QUIET_S = 30.0
"""Seconds for which a small job waits without a status that says so: most start sooner."""


class _Queue(NamedTuple):
    namespace: str
    is_large: bool


class _Waiting(NamedTuple):
    queue: _Queue
    has_begun: bool
    since: float


class StartSlots:
    """Jobs with a slot, and jobs that wait for one."""

    def __init__(
        self,
        is_late: Callable[[str], bool] = lambda namespace: False,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_late` returns whether a pass takes long in a namespace."""
        self._is_late, self._clock = is_late, clock
        self._holders: dict[JobKey, _Queue] = {}
        """Jobs with a slot, including those whose pass is still to come, and the queue of each."""
        self._staying: set[JobKey] = set()
        """Holders that keep their slot at the next `leave`."""
        self._waiting: dict[JobKey, _Waiting] = {}
        """Waiting jobs in order."""
        self._refused_at: dict[str, float] = {}
        """Time of the last rejection by namespace."""

    def enter(self, key: JobKey, *, pods: int, begun: bool = False) -> bool:
        """Return whether the job may create `pods` pods now. If not, it waits in its queue, before the others
        if it has `begun`: its pods hold nodes."""
        if pods <= 0 or key in self._holders:
            return True
        queue = _Queue(key.namespace, pods > LARGE or (pods > 1 and self._is_tight(key.namespace)))
        if self._is_open(queue):
            self.forget(key)
            self._holders[key] = queue
            return True
        before = self._waiting.get(key)
        since = self._clock() if before is None else before.since
        self._waiting[key] = _Waiting(queue, begun, since)
        return False

    def forget(self, key: JobKey) -> None:
        """Remove the job from its queue. If it has a slot, its pass finds out that the job is gone."""
        self._waiting.pop(key, None)

    def quiet_s(self, key: JobKey) -> float | None:
        """Return for how many more seconds the job waits in its queue without a status that says so; None
        if it does not wait. Large jobs say it at once, as others create for minutes."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return None
        return 0.0 if waiting.queue.is_large else max(waiting.since + QUIET_S - self._clock(), 0.0)

    def stay(self, key: JobKey) -> None:
        """Keep the job's slot beyond the pass that ends now: it left pods for the next pass to create."""
        if key in self._holders:
            self._staying.add(key)

    def leave(self, key: JobKey) -> list[JobKey]:
        """Release the job's slot after a pass, unless the job stays. Return the jobs that get slots now."""
        if key in self._staying:
            self._staying.discard(key)
            return []
        return self.grant() if self._holders.pop(key, None) is not None else []

    def grant(self) -> list[JobKey]:
        """Give away the free slots. Return the jobs that got them."""
        granted = []
        while queues := set(filter(self._is_open, {item.queue for item in self._waiting.values()})):
            held = Counter(self._holders.values())
            *_, key = min(
                (held[item.queue], not item.has_begun, place, key)
                for place, (key, item) in enumerate(self._waiting.items())
                if item.queue in queues
            )
            self._holders[key] = self._waiting.pop(key).queue
            granted.append(key)
        return granted

    def refused(self, key: JobKey) -> None:
        """Record that the API server rejected pods of the job."""
        now = self._clock()
        self._refused_at = {namespace: at for namespace, at in self._refused_at.items() if now - at < TIGHT_S}
        self._refused_at[key.namespace] = now

    def _is_tight(self, namespace: str) -> bool:
        at = self._refused_at.get(namespace)
        return at is not None and self._clock() - at < TIGHT_S

    def _is_open(self, queue: _Queue) -> bool:
        of_all, of_one = (MAX_LARGE, MAX_LARGE_OF_ONE) if queue.is_large else (MAX_SMALL, MAX_SMALL_OF_ONE)
        alike = [held.namespace for held in self._holders.values() if held.is_large == queue.is_large]
        if alike.count(queue.namespace) >= of_one:
            return False
        return self._is_late(queue.namespace) or sum(not self._is_late(name) for name in alike) < of_all


def pods_to_create(plan: Plan) -> int:
    """Return the number of workers that the plan creates."""
    return sum(len(action.indices) for action in plan.actions if isinstance(action, CreateWorkers))


def has_begun(plan: Plan, observed: Observed) -> bool:
    """Return whether some pods exist of the attempt that the plan creates pods for."""
    attempts = {action.attempt for action in plan.actions if isinstance(action, CreateWorkers)}
    return any(pod.attempt in attempts for pod in observed.pods)
