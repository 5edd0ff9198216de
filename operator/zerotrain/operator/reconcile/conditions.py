"""All conditions of a job, computed from its phase and its workers, in a fixed order.

They are computed anew in every pass; `lastTransitionTime` changes only when a status does. `Ready`,
`Reconciling` and `Stalled` follow kstatus: a tool that waits for the object sees a running job as ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from zerotrain.contract.worker_environment import WORKER_HTTP_PORT
from zerotrain.operator.api import Condition, Phase, ZeroTrainingJobStatus
from zerotrain.operator.api.lifecycle import VerificationState
from zerotrain.operator.api.status import ConditionStatus
from zerotrain.operator.constants import ConditionType, Reason
from zerotrain.operator.reconcile import (
    attempt_checks,
    hangs,
    schedulers,
    start_up,
    teardown,
    tracker_advice,
)
from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.draft import (
    ACTIVE,
    BETWEEN_ATTEMPTS,
    FINISHED,
    MAX_TEXT,
    STOPPING,
    Draft,
    stored,
)
from zerotrain.operator.reconcile.pods import PodView, WorkerState
from zerotrain.operator.reconcile.progress import origin_of, trained_nothing, unsaved_steps

_ENDING = STOPPING | BETWEEN_ATTEMPTS
"""Phases in which pods are being deleted, and the next phase waits for the last of them."""

_STANDING = frozenset({Phase.QUEUED, Phase.PENDING, Phase.RESTARTING})
"""Phases in which an attempt may wait until the pods of other jobs exist."""

IN_START_QUEUE = (
    "waits until other jobs have their pods: few jobs of one namespace start at once, "
    "large ones one at a time"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition without generation and transition time."""

    status: bool | None
    reason: str
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The input of the functions that compute conditions."""

    draft: Draft
    view: AttemptView
    phase: Phase
    started: bool
    """Whether an attempt is active, so that its pods are wanted."""

    @property
    def status(self) -> ZeroTrainingJobStatus:
        return self.draft.status


def update_conditions(draft: Draft, view: AttemptView) -> None:
    """Set all conditions and the observed generation in the draft's status."""
    started = draft.phase in ACTIVE and draft.status.attempt > 0
    facts = Facts(draft=draft, view=view, phase=draft.phase, started=started)
    found = {kind: find(facts) for kind, find in _FINDERS.items()}
    generation = draft.job.identity.generation
    draft.set(
        observed_generation=generation,
        conditions=_merged(draft.status.conditions, found, now=draft.stamp, generation=generation),
    )


def _merged(
    old: Sequence[Condition], found: dict[ConditionType, Finding], *, now: datetime, generation: int
) -> tuple[Condition, ...]:
    before = {item.type: item for item in old}
    merged = []
    for kind, finding in found.items():
        last, status = before.get(str(kind)), _word(finding.status)
        if finding.status is False and kind in _ONCE_TRUE and last is None:
            continue
        merged.append(
            Condition(
                type=str(kind),
                status=status,
                reason=str(finding.reason),
                message=stored(finding.message),
                last_transition_time=last.last_transition_time if last and last.status is status else now,
                observed_generation=generation,
            )
        )
    # Conditions of a newer operator stay: this version does not know what they mean.
    foreign = [item for item in old if item.type not in {str(kind) for kind in found}]
    return (*merged, *foreign)


_ONCE_TRUE = frozenset(
    {ConditionType.HUNG, ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED}
)
"""Conditions that are absent until they are true for the first time.

Absent means false. The API server checks and copies every condition at every write, also one that says
nothing.
"""


def _word(status: bool | None) -> ConditionStatus:
    if status is None:
        return ConditionStatus.UNKNOWN
    return ConditionStatus.TRUE if status else ConditionStatus.FALSE


def _ready(facts: Facts) -> Finding:
    if facts.phase is Phase.COMPLETED:
        return Finding(True, Reason.COMPLETED)
    if facts.phase is Phase.RUNNING:
        return Finding(True, Reason.ALL_RANKS_JOINED, f"attempt {facts.status.attempt} is training")
    if facts.draft.stalled is not None:
        return Finding(False, *facts.draft.stalled)
    return replace(_activity(facts), status=False)


def _reconciling(facts: Facts) -> Finding:
    if (refused := start_up.refused_cleanup(facts.draft)) is not None:
        return Finding(False, refused.reason, refused.message)
    at_rest = {*FINISHED, Phase.SUSPENDED, Phase.STALLED, Phase.RUNNING}
    rejected = start_up.lasting_rejection(facts.draft) is not None
    return replace(_activity(facts), status=facts.phase not in at_rest and not rejected)


def _activity(facts: Facts) -> Finding:
    """Return what the operator is doing in the present phase."""
    status, problem = facts.status, facts.draft.observed.problem
    if problem is not None and facts.phase not in FINISHED:
        return Finding(None, problem.reason, problem.message)
    if facts.draft.observed.in_start_queue and facts.phase in _STANDING and status.given_back is None:
        return Finding(None, Reason.CREATING_PODS, IN_START_QUEUE)
    if facts.phase in _ENDING and (held := teardown.first_held(facts.draft)) is not None:
        return Finding(None, Reason.POD_HELD, held)
    match facts.phase:
        case Phase.PENDING | Phase.STARTING:
            return _start_up(facts)
        case Phase.RESTARTING if facts.view.present:
            return Finding(None, Reason.TERMINATING_PODS, f"ending the pods of attempt {status.attempt}")
        case Phase.RESTARTING:
            return _hold_off(facts)
        case Phase.QUEUED:
            return Finding(None, *(facts.draft.held or (Reason.QUEUED, "")))
        case Phase.SUSPENDING | Phase.YIELDING:
            return Finding(None, Reason.CHECKPOINT_REQUESTED, "waiting for the checkpoint, then for the pods")
        case Phase.STALLED:
            return Finding(None, *(facts.draft.stalled or (Reason.INVALID_SPEC, "")))
        case Phase.RUNNING:
            return Finding(None, Reason.ALL_RANKS_JOINED)
        case Phase.FAILED:
            return Finding(None, str(Phase.FAILED), _failed(facts).message)
        case phase:
            return Finding(None, str(phase))


def _hold_off(facts: Facts) -> Finding:
    """Return what the next attempt waits for."""
    status, older = facts.status, facts.draft.observed.older_in_shortage
    if status.given_back is None:
        return Finding(None, Reason.BACK_OFF, f"attempt {status.attempt + 1} starts after the hold-off")
    when = "the hold-off" if older is None else f"job {older}, which is older and lacks resources as well"
    message = f"attempt {status.attempt} released its resources: {status.given_back.message}"
    return Finding(None, Reason.GAVE_BACK, f"{message}; attempt {status.attempt + 1} starts after {when}")


def _start_up(facts: Facts) -> Finding:
    view = facts.view
    if not facts.started:
        return Finding(None, Reason.CREATED)
    if view.count(WorkerState.ABSENT):
        return Finding(None, Reason.CREATING_PODS, f"creating {view.count(WorkerState.ABSENT)} pods")
    waiting = _first(view, lambda pod: pod.waiting)
    if waiting is not None:
        return Finding(None, Reason.CONTAINER_WAITING, waiting)
    late = _first(view, lambda pod: start_up.starts_late(facts.draft, pod))
    if late is not None:
        return Finding(None, Reason.POD_NOT_STARTING, late)
    long = _first(view, lambda pod: start_up.runs_long(facts.draft, pod))
    if long is not None:
        return Finding(None, Reason.INIT_CONTAINER_RUNS, long)
    ignored = _first(view, schedulers.ignored(facts.draft, view))
    if ignored is not None:
        return Finding(None, Reason.SCHEDULER_MISSING, ignored)
    if view.count(WorkerState.PENDING):
        before = _first(view, start_up.runs_before)
        message = f"{view.count(WorkerState.PENDING)} pods have not started{f'; {before}' if before else ''}"
        return Finding(None, Reason.WAITING_FOR_PODS, message)
    return Finding(None, Reason.WAITING_FOR_RANKS, "all pods run; not all ranks have joined yet")


def _stalled(facts: Facts) -> Finding:
    if facts.draft.stalled is not None:
        return Finding(True, *facts.draft.stalled)
    if facts.phase is Phase.FAILED:
        return _failed(facts)
    if (refused := start_up.lasting_rejection(facts.draft)) is not None:
        return Finding(True, refused.reason, refused.message)
    return Finding(False, Reason.SPEC_ACCEPTED)


def _admitted(facts: Facts) -> Finding:
    if facts.draft.stalled is not None:
        return Finding(False, *facts.draft.stalled)
    if facts.phase is Phase.QUEUED:
        return Finding(False, *(facts.draft.held or (Reason.QUEUED, "")))
    elastic = facts.status.elastic
    refusal = elastic.refusal if elastic is not None else None
    if refusal is not None and facts.phase not in FINISHED:
        kept = f"The job keeps {refusal.workers} workers."
        message = stored(refusal.message, MAX_TEXT - len(kept) - 1)
        return Finding(True, Reason.RESIZE_REFUSED, f"{message} {kept}")
    texts = (
        attempt_checks.egress_notice(facts.draft),
        attempt_checks.privileges_message(facts.draft),
        tracker_advice.advice(facts.draft.job.spec),
    )
    return Finding(True, Reason.SPEC_ACCEPTED, "; ".join(text for text in texts if text))


def _pods_scheduled(facts: Facts) -> Finding:
    if facts.draft.held is not None:
        return Finding(False, *facts.draft.held)
    if facts.phase is Phase.RESTARTING and facts.status.given_back is not None:
        return Finding(False, Reason.GAVE_BACK, facts.status.given_back.message)
    if not facts.started:
        return Finding(False, str(facts.phase))
    if facts.view.count(WorkerState.ABSENT):
        return Finding(False, Reason.CREATING_PODS)
    refused = _first(facts.view, lambda pod: None if pod.scheduled else pod.unscheduled_reason)
    if refused is not None:
        return Finding(False, Reason.UNSCHEDULABLE, refused)
    ignored = _first(facts.view, schedulers.ignored(facts.draft, facts.view))
    if ignored is not None:
        return Finding(False, Reason.SCHEDULER_MISSING, ignored)
    unplaced = sum(1 for pod in facts.view.present if not pod.scheduled and not pod.ended)
    if unplaced:
        return Finding(False, Reason.WAITING_FOR_PODS, f"{unplaced} pods have no node yet")
    return Finding(True, Reason.ALL_SCHEDULED)


def _rendezvous(facts: Facts) -> Finding:
    if facts.phase is Phase.RUNNING:
        return Finding(True, Reason.ALL_RANKS_JOINED)
    return Finding(False, Reason.WAITING_FOR_RANKS if facts.started else str(facts.phase))


def _progressing(facts: Facts) -> Finding:
    progress = facts.status.progress
    if not facts.started:
        return Finding(False, str(facts.phase))
    if facts.draft.observed.unresponsive:
        way_out = f"open TCP {WORKER_HTTP_PORT} of the job's pods for the operator's"
        message = f"worker 0 does not answer the operator, so a hang would not be detected; {way_out}"
        return Finding(None, Reason.WORKERS_UNREACHABLE, message)
    if progress.attempt != facts.status.attempt or progress.last_step_time is None:
        return Finding(False, Reason.NO_STEP_YET)
    look = facts.draft.observed.inspection
    if look is not None and look.attempt == facts.status.attempt and look.paces:
        accused = look.slow_rank
        who = f"rank {accused.rank}: {accused.why}" if accused is not None else "no rank stands out"
        return Finding(False, Reason.STEP_STALE, f"step {progress.step} does not advance; {who}")
    slow = facts.status.straggler
    if slow is not None:
        place = f"(pod {slow.pod}, node {slow.node})"
        return Finding(True, Reason.STRAGGLER, f"rank {slow.rank} {place} slows down the others")
    return Finding(True, Reason.STEP_ADVANCED)


def _hung(facts: Facts) -> Finding:
    hang = facts.status.hang
    if not facts.started or hang is None or hang.attempt != facts.status.attempt:
        return Finding(False, Reason.NOT_HUNG)
    return Finding(True, Reason.HANG, hangs.hang_message(hang))


def _checkpoint(facts: Facts) -> Finding:
    checkpoint = facts.status.checkpoint
    # In other phases no answer is awaited, whatever an earlier operator left in status.
    asked = checkpoint.requested_at is not None and facts.phase in STOPPING
    if checkpoint.last is None:
        return Finding(False, Reason.CHECKPOINT_REQUESTED if asked else Reason.NO_CHECKPOINT)
    if asked and not _is_answered(facts):
        return Finding(False, Reason.CHECKPOINT_REQUESTED, f"newest is step {checkpoint.last.step}")
    verified = checkpoint.verification
    if verified is not None and verified.state is VerificationState.DAMAGED:
        return Finding(False, Reason.CHECKPOINT_DAMAGED, f"step {verified.step}: {verified.message}")
    if facts.phase in (Phase.SUSPENDED, Phase.QUEUED) and unsaved_steps(facts.status):
        # A user who waits for this condition before turning off machines must not be told that all is saved.
        message = (
            f"the job was at step {facts.status.progress.step}, the newest is step {checkpoint.last.step}"
        )
        return Finding(False, Reason.CHECKPOINT_OUTDATED, message)
    if verified is not None and verified.state is VerificationState.VERIFIED:
        return Finding(True, Reason.CHECKPOINT_VERIFIED, f"step {verified.step}, every byte was read")
    origin = origin_of(facts.status)
    start = f"; the attempt began at step {checkpoint.resumed_from_step}, {origin}" if origin else ""
    return Finding(True, Reason.CHECKPOINT_DURABLE, f"step {checkpoint.last.step}{start}")


def _is_answered(facts: Facts) -> bool:
    """Return whether the newest checkpoint is the last one of the ranks that were asked to stop.

    A rank that yielded says so, whatever the clocks of the nodes say, unless it stopped without saving. Until
    then the ranks may make steps beyond a checkpoint that was due anyway, and the operator has not learned of
    them yet.
    """
    return facts.view.count(WorkerState.YIELDED) > 0 and not unsaved_steps(facts.status)


def _suspended(facts: Facts) -> Finding:
    if facts.phase is not Phase.SUSPENDED:
        return Finding(False, Reason.NOT_SUSPENDED)
    last = facts.status.checkpoint.last
    kept = f"resumes from step {last.step}" if last is not None else "no checkpoint: resumes from the start"
    return Finding(True, Reason.SUSPENDED, kept)


def _complete(facts: Facts) -> Finding:
    if facts.phase is Phase.COMPLETED:
        idle = trained_nothing(facts.status)
        return Finding(True, Reason.COMPLETED, f"no step was trained: {idle}" if idle else "")
    return Finding(False, Reason.NOT_FINISHED)


def _failed(facts: Facts) -> Finding:
    if facts.phase is not Phase.FAILED:
        return Finding(False, Reason.NOT_FINISHED)
    # The pass that decides the failure provides the message; every later pass keeps the stored one.
    for item in facts.status.conditions:
        if item.type == ConditionType.FAILED and item.status is ConditionStatus.TRUE:
            return Finding(True, item.reason, item.message)
    reason, message = facts.draft.failed or (Reason.PERMANENT_FAILURE, "")
    return Finding(True, reason, message)


_FINDERS: dict[ConditionType, Callable[[Facts], Finding]] = {
    ConditionType.READY: _ready,
    ConditionType.RECONCILING: _reconciling,
    ConditionType.STALLED: _stalled,
    ConditionType.ADMITTED: _admitted,
    ConditionType.PODS_SCHEDULED: _pods_scheduled,
    ConditionType.RENDEZVOUS_COMPLETE: _rendezvous,
    ConditionType.PROGRESSING: _progressing,
    ConditionType.CHECKPOINT_DURABLE: _checkpoint,
    ConditionType.HUNG: _hung,
    ConditionType.SUSPENDED: _suspended,
    ConditionType.COMPLETE: _complete,
    ConditionType.FAILED: _failed,
}


def _first(view: AttemptView, text: Callable[[PodView], str | None]) -> str | None:
    """Return `worker 3 (pod gpt-1-3): ...` for the first pod with a text, and the number of others with
    one."""
    pods = sorted(view.present, key=lambda pod: pod.index)
    found = [(pod, message) for pod in pods if (message := text(pod))]
    if not found:
        return None
    pod, message = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"worker {pod.index} (pod {pod.name}): {message}{more}"
