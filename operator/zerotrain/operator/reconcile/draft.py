"""State of one pass over one job: the job as stored, parsed once per change, and the draft of its plan: the
status under construction, the events and the actions.

Nothing here calls the cluster. The finished draft becomes a `Plan`, which contains a status only if it
changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from zerotrain.contract.progress import Progress
from zerotrain.contract.text import one_line
from zerotrain.operator.api import Phase, ZeroTrainingJobSpec, ZeroTrainingJobStatus
from zerotrain.operator.api.lenient import read_but_for_unfit
from zerotrain.operator.api.planning import Planner, plan_job
from zerotrain.operator.constants import ANNOTATION_IGNORE_MEMORY_PLAN, LABEL_JOB, LABEL_JOB_UID, QUEUE_LABEL
from zerotrain.operator.reconcile.attempts import AttemptView, view_attempt
from zerotrain.operator.reconcile.nodes import Loss, NodeSigns, losses, patience
from zerotrain.operator.reconcile.observe import Observed
from zerotrain.operator.reconcile.plan import Action, Event, EventType, Plan

ACTIVE = frozenset({Phase.PENDING, Phase.STARTING, Phase.RUNNING})
"""Phases of an attempt, and of a job before its first one."""

STOPPING = frozenset({Phase.SUSPENDING, Phase.YIELDING})
"""Phases in which the ranks were asked to write a checkpoint and stop."""

BETWEEN_ATTEMPTS = frozenset({Phase.RESTARTING, Phase.QUEUED, Phase.SUSPENDED, Phase.STALLED})
"""Phases in which the pods of the last attempt are deleted, and the next attempt waits for something."""

FINISHED = frozenset({Phase.COMPLETED, Phase.FAILED})

MAX_TEXT = 1000
"""Maximum length of a text in a status field or an event; an event's note may hold 1,024 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobIdentity:
    """Identity of the job object, and what its metadata says."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    ignores_memory_plan: bool = False
    """Whether the user's annotation says to start the job whatever the memory planner says."""
    queue_label: str = ""
    """Name of the queue in Kueue's label; empty without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """One job as stored: identity, typed spec and typed status."""

    identity: JobIdentity
    spec: ZeroTrainingJobSpec
    status: ZeroTrainingJobStatus


INDISPENSABLE = frozenset({"phase", "attempt", "shape", "podsCreated"})
"""Fields of a status without which an attempt could begin beside the pods of another one. What another
version of the operator wrote elsewhere may be left out: it is decided anew, or forgotten."""


@dataclass(slots=True)
class Known:
    """The parsed models of a job's last pass; parsing them again is most of the cost of a pass without
    changes.

    A spec is unchanged while its generation is, a status while the resource version is. The cache may be
    dropped at any time.
    """

    generation: int | None = None
    spec: ZeroTrainingJobSpec | None = None
    version: str | None = None
    status: ZeroTrainingJobStatus | None = None
    unfit: tuple[str, ...] = ()
    """Parts of the stored status that do not fit its model, and count as absent: each with the reason."""

    def has_read(self, job: Mapping[str, Any]) -> bool:
        """Return whether the spec is cached."""
        return self.spec is not None and self.generation == job["metadata"].get("generation")

    def read_spec(self, job: Mapping[str, Any]) -> ZeroTrainingJobSpec:
        """Return the spec, from the cache if possible. Raises pydantic.ValidationError."""
        generation = job["metadata"].get("generation")
        if self.spec is None or generation is None or generation != self.generation:
            self.spec, self.generation = ZeroTrainingJobSpec.model_validate(job.get("spec", {})), generation
        return self.spec

    def read_status(self, job: Mapping[str, Any]) -> ZeroTrainingJobStatus:
        """Return the status, from the cache if possible. Raises pydantic.ValidationError."""
        status, version = self.status, job["metadata"].get("resourceVersion")
        if status is None or version is None or version != self.version:
            stored_status = job.get("status", {})
            status, unfit = read_but_for_unfit(ZeroTrainingJobStatus, stored_status, needed=INDISPENSABLE)
            self.keep_status(job, status)
            self.unfit = unfit
        return status

    def keep_status(self, job: Mapping[str, Any], status: ZeroTrainingJobStatus) -> None:
        """Cache the status; `job` is the API server's response to the write of `status`."""
        self.status, self.version = status, job["metadata"].get("resourceVersion")
        self.unfit = ()


def identity_of(job: Mapping[str, Any]) -> JobIdentity:
    meta = job["metadata"]
    return JobIdentity(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=int(meta.get("generation", 0)),
        deleting=meta.get("deletionTimestamp") is not None,
        queue_label=str((meta.get("labels") or {}).get(QUEUE_LABEL) or ""),
        ignores_memory_plan=meta.get("annotations", {}).get(ANNOTATION_IGNORE_MEMORY_PLAN) == "true",
    )


@dataclass(kw_only=True, slots=True)
class Draft:
    """The input of a pass and its decisions so far."""

    job: JobView
    observed: Observed
    now: datetime
    status: ZeroTrainingJobStatus
    plan_job: Planner = plan_job
    """Function that makes memory plans."""
    stalled: tuple[str, str] | None = None
    """Reason and message of a spec that the user must change."""
    held: tuple[str, str] | None = None
    """Reason and message of what the next attempt waits for."""
    failed: tuple[str, str] | None = None
    """Reason and message of the job's failure, in the pass that decides it."""
    rewrites_status: bool = False
    """Whether the status is written even if nothing of it has changed."""
    progress_is_news: bool = True
    """Whether the progress that the ranks reported is worth a status write of its own."""
    events: list[Event] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    wakes: list[datetime] = field(default_factory=list)
    _view: tuple[tuple[int, int, bool], AttemptView] | None = None
    """The cached view, and the values that it was computed from."""

    @property
    def stamp(self) -> datetime:
        """The time of the pass as status stores it: whole seconds, like every metav1.Time."""
        return self.now.replace(microsecond=0)

    @property
    def phase(self) -> Phase:
        """The job's phase; Pending before the first pass."""
        return self.status.phase or Phase.PENDING

    @property
    def awaits_first_attempt(self) -> bool:
        """Whether the job is pending because it has had no attempt."""
        return self.phase is Phase.PENDING and self.status.attempt == 0

    @property
    def workers(self) -> int:
        """Number of workers of the current attempt."""
        shape = self.status.shape
        return shape.workers if shape is not None else self.job.spec.workers

    @property
    def termination_timeout(self) -> timedelta:
        """Time after the grace period of a deletion until a pod counts as stuck."""
        return timedelta(seconds=self.job.spec.run_policy.termination_timeout_seconds)

    @property
    def progress(self) -> Progress | None:
        """Newest record of rank 0 of the current attempt; None without one."""
        reported = self.observed.progress
        return reported if reported is not None and reported.attempt == self.status.attempt else None

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
        # A time in the past would make the queue spin; the next event causes such a pass anyway.
        self.wakes.append(max(at, self.now + timedelta(milliseconds=50)))

    def is_due(self, at: datetime) -> bool:
        """Return whether the time has come; otherwise the next pass comes at that time."""
        if self.now < at:
            self.wake(at)
        return self.now >= at

    def view(self) -> AttemptView:
        """Return the workers of the current attempt."""
        # It is called several times in a pass; computing it once pays off with a thousand workers.
        basis = (self.status.attempt, self.workers, self.status.pods_created)
        if self._view is None or self._view[0] != basis:
            view = view_attempt(
                self.status.attempt,
                self.workers,
                self.observed,
                created=self.status.pods_created,
                stuck_before=self.now - self.termination_timeout,
                losses=self.losses(),
                own_program=bool(self.job.spec.program),
            )
            self._view = (basis, view)
        return self._view[1]

    def losses(self) -> Mapping[str, Loss]:
        """Return the nodes whose workers count as lost, by name."""
        return losses(self.observed.nodes, self.signs(), now=self.now)

    def signs(self) -> NodeSigns:
        """Return the signs of life of the workers on nodes that are not ready."""
        return NodeSigns(
            patience=patience(self.job.spec.failure_policy.node_not_ready_seconds, self.progress),
            step_at=self.step_at(),
            last_responses=self.observed.last_responses,
            unasked=self.observed.unasked,
            watched_since=self.observed.synced_at,
        )

    def step_at(self) -> datetime | None:
        """Return the time of the newest step of the current attempt; never in the future."""
        reported, stored_progress = self.progress, self.status.progress
        # Status is written less often than workers report.
        step_at = moment(reported.step_at) if reported is not None else None
        if step_at is not None:
            # The clock of a node may be wrong; the time at which this operator saw the step change is used
            # instead.
            step_at = self.observed.step_moved_at or step_at
        elif stored_progress.attempt == self.status.attempt:
            step_at = stored_progress.last_step_time
        if step_at is not None and step_at > self.now:
            # The step was made before this operator started to watch at the latest; otherwise each pass would
            # see a new step.
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
        return after != before or self.rewrites_status


def stored(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text as status and events hold it: on one line, with its middle cut out if it is too long."""
    return one_line(text, limit)


def worker_selector(job_name: str, job_uid: str) -> str:
    """Return the label selector of the job's pods, for `status.selector` and for users."""
    return f"{LABEL_JOB}={job_name},{LABEL_JOB_UID}={job_uid}"


def moment(unix_s: float) -> datetime | None:
    """Return the time of a number that a tenant's program reported; None for a number outside the
    calendar."""
    if not 0 < unix_s < math.inf:
        return None
    try:
        return datetime.fromtimestamp(unix_s, UTC)
    except (ValueError, OverflowError, OSError):
        return None
