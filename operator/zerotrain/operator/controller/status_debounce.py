"""Time of a status write: at once for a decision, together with later changes for counts, and after a pause
for a status that the API server rejected.

While pods start, their counts and the messages about them change with every event, and a write of a status
costs the API server as much as a pod. A rejection lasts until an administrator changes something, and passes
come all the time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass

from zerotrain.contract.text import cut
from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.errors import ApiError
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.reconcile import CreateWorkers, Plan

WAIT_PER_JOB_S, MAX_WAIT_S = 0.3, 10.0
"""Seconds for which counts wait per waiting job, and at most. Most pods of a job run before that, and the
status that says so includes the counts."""
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
MAX_MESSAGE_CHARS = 300
"""Maximum number of characters of one rejection in the answer of /readyz."""

PATIENT = frozenset({"workers", "ranks", "conditions", "pods_created", "progress", "start_time"})
"""Fields for users and dashboards, which decide nothing. Until `pods_created` is written, an operator that
restarts recreates a pod that was deleted meanwhile within its attempt, which does no harm. `start_time` is
that of the write, so it may be some seconds late."""


class StatusHeld(Exception):
    """Error of a pass that may not act, because its status was rejected and the next try waits."""


def is_patient(before: ZeroTrainingJobStatus, plan: Plan) -> bool:
    """Return whether the plan only updates PATIENT fields and creates pods of an attempt that is written."""
    after = plan.status
    if after is None or plan.events or any(not isinstance(item, CreateWorkers) for item in plan.actions):
        return False
    changed = {name for name in type(after).model_fields if getattr(after, name) != getattr(before, name)}
    return changed <= PATIENT


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refusal:
    key: JobKey
    message: str
    times: int
    """Number of rejections in a row."""
    due: float


class StatusDebounce:
    """Statuses that wait for their write, by the UID of their job."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        """Time at which the counts of each job began to wait."""
        self._refused: dict[str, _Refusal] = {}

    def __len__(self) -> int:
        """Return the number of statuses that cannot be written."""
        return len(self._refused)

    def held_s(self, uid: str) -> float:
        """Return the seconds until a rejected status is tried again, in which the job may not act."""
        found = self._refused.get(uid)
        return max(found.due - self._clock(), 0.0) if found is not None else 0.0

    def wait_s(self, uid: str) -> float:
        """Return the seconds for which the counts of this job wait, so that later changes share the write."""
        since = self._since.setdefault(uid, self._clock())
        return max(since + min(WAIT_PER_JOB_S * len(self._since), MAX_WAIT_S) - self._clock(), 0.0)

    async def tried(self, uid: str, key: JobKey, write: Awaitable[Json]) -> Json:
        """Await the write and return its answer. Errors are raised again; a rejection is recorded first."""
        self._since.pop(uid, None)
        try:
            written = await write
        except ApiError as error:
            if error.is_refusal:
                self.refused(uid, key, error)
            raise
        self.settled(uid)
        return written

    def refused(self, uid: str, key: JobKey, error: ApiError) -> None:
        before = self._refused.get(uid)
        times = before.times + 1 if before is not None else 1
        pause_s = min(MIN_PAUSE_S * 2.0 ** min(times - 1, 10), MAX_PAUSE_S)
        message = cut(str(error), MAX_MESSAGE_CHARS)
        self._refused[uid] = _Refusal(key=key, message=message, times=times, due=self._clock() + pause_s)

    def settled(self, uid: str) -> None:
        """End all waiting: the status is written or equals the stored one, or the job is gone."""
        self._since.pop(uid, None)
        self._refused.pop(uid, None)

    def prune(self, alive: Set[str]) -> None:
        """Drop jobs that are not among `alive`: each that is never settled delays all others."""
        for uid in (self._since.keys() | self._refused.keys()) - alive:
            self.settled(uid)

    def lines(self) -> list[str]:
        """Return one line for the user; empty when all statuses can be written."""
        if not self._refused:
            return []
        first = next(iter(self._refused.values()))
        count = len(self._refused)
        jobs = "1 job" if count == 1 else f"{count} jobs"
        return [
            f"the status of {jobs} cannot be written, so the status shown is outdated; "
            f"{first.key.namespace}/{first.key.name}: {first.message}. Check that the "
            "CustomResourceDefinition is of this version and that the operator may update "
            "zerotrainingjobs/status"
        ]
