"""The working memory of one pass: a status that grows field by field, and the plan's lists.

Nothing here talks to the cluster; the finished draft becomes a `Plan`, with a status only if it changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from zerotrain.contract.text import one_line
from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.api.planning import Planner, plan_job
from zerotrain.operator.constants import LABEL_JOB, LABEL_JOB_UID
from zerotrain.operator.reconcile.attempts import AttemptView, view_attempt
from zerotrain.operator.reconcile.clock import moment
from zerotrain.operator.reconcile.job import JobView
from zerotrain.operator.reconcile.nodes import NO_LOSSES, Loss, Signs, losses, patience
from zerotrain.operator.reconcile.observe import Observed
from zerotrain.operator.reconcile.plan import Action, Event, EventType, Plan

MAX_TEXT = 1000
"""Longest text that a status field or an event carries; an event's note may hold 1,024 bytes."""


@dataclass(kw_only=True, slots=True)
class Draft:
    """What the pass knows and what it has decided so far."""

    job: JobView
    observed: Observed
    now: datetime
    status: ZeroTrainingJobStatus
    plan_job: Planner = plan_job
    """Where memory plans come from."""
    stalled: tuple[str, str] | None = None
    """Reason and message of a spec that the user must change."""
    held: tuple[str, str] | None = None
    """Reason and message of what the next attempt waits for."""
    failed: tuple[str, str] | None = None
    """Reason and message of the job's end, in the pass that decides it."""
    progress_is_news: bool = True
    """Whether what the ranks reported is worth a status write of its own."""
    events: list[Event] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    wakes: list[datetime] = field(default_factory=list)
    _view: tuple[tuple[int, int, bool], AttemptView] | None = None
    """The last one, and what it was made from."""

    @property
    def stamp(self) -> datetime:
        """The pass's time as status stores it: whole seconds, like every metav1.Time."""
        return self.now.replace(microsecond=0)

    @property
    def size(self) -> int:
        """Workers of the current attempt."""
        shape = self.status.shape
        return shape.workers if shape is not None else self.job.spec.workers

    def set(self, **updates: Any) -> None:
        """Replace fields of the status by name. Raises TypeError for a name that status does not have."""
        unknown = updates.keys() - ZeroTrainingJobStatus.model_fields.keys()
        if unknown:  # model_copy would keep the value and never write it
            raise TypeError(f"status has no field {', '.join(sorted(unknown))}")
        self.status = self.status.model_copy(update=updates)

    def emit(self, reason: str, message: str, *, warning: bool = False) -> None:
        kind = EventType.WARNING if warning else EventType.NORMAL
        self.events.append(
            Event(reason=str(reason), message=stored(message), type=kind, attempt=self.status.attempt)
        )

    def act(self, action: Action) -> None:
        self.actions.append(action)

    def wake(self, at: datetime) -> None:
        # A moment that has passed would make the queue spin; the next event brings such a pass anyway.
        self.wakes.append(max(at, self.now + timedelta(milliseconds=50)))

    def view(self) -> AttemptView:
        """The current attempt's workers."""
        # Asked for several times in a pass; a thousand workers are worth looking at once.
        basis = (self.status.attempt, self.size, self.status.pods_created)
        if self._view is None or self._view[0] != basis:
            timeout = timedelta(seconds=self.job.spec.run_policy.termination_timeout_seconds)
            view = view_attempt(
                self.status.attempt,
                self.size,
                self.observed,
                created=self.status.pods_created,
                stuck_before=self.now - timeout,
                losses=self.losses(),
                own_program=bool(self.job.spec.command),
            )
            self._view = (basis, view)
        return self._view[1]

    def losses(self) -> Mapping[str, Loss]:
        """Nodes whose workers count as lost, by name."""
        if not self.observed.nodes:
            return NO_LOSSES
        return losses(self.observed.nodes, self.signs(), now=self.now)

    def signs(self) -> Signs:
        """What tells of the workers on nodes that are not ready."""
        heard = self.observed.progress
        current = heard if heard is not None and heard.attempt == self.status.attempt else None
        return Signs(
            patience=patience(self.job.spec.failure_policy.node_not_ready_seconds, current),
            step_at=self.step_at(),
            heard=self.observed.heard,
            unasked=self.observed.unasked,
            watched_since=self.observed.synced_at,
        )

    def step_at(self) -> datetime | None:
        """When the newest step of the current attempt was made; never in the future."""
        heard, written = self.observed.progress, self.status.progress
        # Status is written more seldom than workers are heard.
        step_at = (
            moment(heard.step_at) if heard is not None and heard.attempt == self.status.attempt else None
        )
        if step_at is not None:
            # The clock of a node may be wrong: what counts is when this operator saw the step move.
            step_at = self.observed.step_moved_at or step_at
        elif written.attempt == self.status.attempt:
            step_at = written.last_step_time
        if step_at is not None and step_at > self.now:
            # At the latest before this operator began to look; else each pass would see a step of just now.
            return self.observed.synced_at
        return step_at

    def plan(self) -> Plan:
        return Plan(
            status=self.status if self._is_worth_a_write() else None,
            events=tuple(self.events),
            actions=tuple(self.actions),
            wake_at=min(self.wakes, default=None),
        )

    def _is_worth_a_write(self) -> bool:
        before, after = self.job.status, self.status
        if not self.progress_is_news:
            after = after.model_copy(update={"progress": before.progress})
        return after != before


def stored(text: str, limit: int = MAX_TEXT) -> str:
    """A text as status and events hold it: on one line, and its middle left out where it is too long."""
    return one_line(text, limit)


def worker_selector(job_name: str, job_uid: str) -> str:
    """Label selector of the job's pods, for `status.selector` and for people."""
    labels: Mapping[str, str] = {LABEL_JOB: job_name, LABEL_JOB_UID: job_uid}
    return ",".join(f"{key}={value}" for key, value in labels.items())
