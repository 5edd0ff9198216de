"""Attempts whose step stopped moving: from suspicion over certainty and stacks to another attempt.

A hang is believed only on a fresh look at all workers of this very attempt, in which every rank that answers
has exceeded the limit of the phase it is in. It then stands in status before anything else happens; the
stacks of all ranks are collected; only after that, and only if a later look says the same, does the attempt
end. A step that moves in between ends the alarm and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from zerotrain.contract.progress import Phase, Progress
from zerotrain.operator.api import HangAction, HangStatus
from zerotrain.operator.constants import Reason
from zerotrain.operator.failure_policy import HUNG
from zerotrain.operator.reconcile.attempts import NOBODY, AttemptView, Failure, Worker
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.inspection import Inspection, Pace, pace_of
from zerotrain.operator.reconcile.observe import PodView, StacksView
from zerotrain.operator.reconcile.plan import CollectStacks, StackSource

FRESH = timedelta(seconds=30)
"""An older look says nothing about now."""

STACKS_WAIT = timedelta(seconds=60)
"""From the detection; stacks that are not there by then are not waited for. Another replica, which follows a
dead one within 17 s and then has all to read, still comes in time to ask for them."""

STACKS_RETRY = timedelta(seconds=1)
SECOND_LOOK = timedelta(seconds=2)
"""From the detection to the look that may end the attempt."""

MAX_STACKS_WORKERS = 32
"""The accused worker and worker 0 are always among them."""

DEFAULT_FACTOR = 10
DEFAULT_MIN_S = 300
DEFAULT_STARTUP_S = 1800
DEFAULT_CHECKPOINT_S = 1800
LONGEST_FACTOR = 2.0
"""Steps have outliers that a percentile leaves out: so many times the longest one is no hang."""

MEETING_S = 60.0
"""Rank 0 has come to no step for so long: all ranks are asked where they are. The rendezvous is given up
after 300 s by default, and then only an earlier look can tell who had not come."""

MAX_LIMIT_S = 30 * 86_400.0
MAX_DOUBLINGS = 2
"""Each recent hang doubles the limits, so that too short a limit does not end every attempt."""

REMEMBERED_LIMITS = 10.0
"""A hang is recent for so many limits at least: doubled twice, two hangs are found within eight of them, and
would be forgotten before the third where the failure policy's window is shorter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangLimits:
    """`spec.hangPolicy` with its defaults, in seconds."""

    factor: float = DEFAULT_FACTOR
    min_s: float = DEFAULT_MIN_S
    startup_s: float = DEFAULT_STARTUP_S
    first_step_s: float = DEFAULT_STARTUP_S
    checkpoint_s: float = DEFAULT_CHECKPOINT_S
    scale: float = 1.0

    @classmethod
    def read(cls, policy: Mapping[str, object] | None) -> HangLimits:
        """From the policy as stored."""
        given = {key: float(value) for key, value in (policy or {}).items() if isinstance(value, int | float)}
        startup_s = given.get("startupTimeoutSeconds", DEFAULT_STARTUP_S)
        return cls(
            factor=given.get("stepTimeoutFactor", DEFAULT_FACTOR),
            min_s=given.get("minTimeoutSeconds", DEFAULT_MIN_S),
            startup_s=startup_s,
            first_step_s=given.get("firstStepTimeoutSeconds", startup_s),
            checkpoint_s=given.get("checkpointTimeoutSeconds", DEFAULT_CHECKPOINT_S),
        )

    def after(self, hangs: int) -> HangLimits:
        """The limits of a job that had so many hangs of late."""
        return replace(self, scale=2.0 ** min(hangs, MAX_DOUBLINGS))

    def of(self, phase: Phase, pace: Pace) -> float:
        """Seconds that ranks of this pace may stand still in this phase."""
        learned = max(self.factor * (pace.usual_s or 0.0), LONGEST_FACTOR * (pace.longest_s or 0.0))
        match phase:
            case Phase.INIT | Phase.RENDEZVOUS:
                limit = self.startup_s
            case Phase.FIRST_STEP:
                limit = self.first_step_s
            case Phase.CHECKPOINT:
                limit = max(self.checkpoint_s, learned)
            case Phase.STEP if pace.warms_up:
                limit = max(self.min_s, learned, self._warm_up_s(pace.first_s))
            case _:
                limit = max(self.min_s, learned)
        return min(limit * self.scale, MAX_LIMIT_S)

    def _warm_up_s(self, first_s: float | None) -> float:
        """For the steps after the first one: what it took speaks for them, as long as no others do. Where it
        was not told apart, they may take what it might have."""
        if first_s is None:
            return self.first_step_s
        # The factor is for usual steps. Of a long compilation it would make hours in which no hang is found.
        return max(LONGEST_FACTOR * first_s, min(self.factor * first_s, self.first_step_s))


def suspect_after_s(limits: HangLimits, record: Progress) -> float:
    """Idle time of rank 0 from which all ranks are asked: half of what it may stand still, and less before
    the ranks have met."""
    motion = record.motion
    if motion is None:
        return MAX_LIMIT_S
    half = limits.of(record.phase, pace_of(record.phase, [motion])) / 2
    return min(half, MEETING_S) if record.phase in (Phase.INIT, Phase.RENDEZVOUS) else half


def is_met(look: Inspection) -> bool:
    """Whether no rank waits in the rendezvous. Those that do give up long before any limit of ours, and then
    somebody asks whom they waited for."""
    return Phase.RENDEZVOUS not in look.paces


def stands_still(limits: HangLimits, look: Inspection) -> bool:
    """Whether every rank has stood still for half of what it may; a look that shows less is no news."""
    return all(pace.idle_s >= limits.of(phase, pace) / 2 for phase, pace in look.paces.items())


def recent_hangs(draft: Draft, look: Inspection, limit_s: float) -> int:
    """Restarts after hangs in the failure policy's window, or within a multiple of the limit, or however long
    ago while the job has not got beyond their step: it may always stand still there."""
    window_s = draft.job.spec.failure_policy.window_seconds
    since = draft.now - timedelta(seconds=max(window_s, REMEMBERED_LIMITS * limit_s))
    reached = max(draft.status.progress.step, look.step)
    return sum(
        1
        for item in draft.status.restarts.recent
        if item.reason == Reason.HANG and (item.time > since or item.step >= reached)
    )


def hang_of(draft: Draft, view: AttemptView) -> Failure | None:
    """The hang, as the failure of the rank that holds up the others; None while all is well or stacks are
    awaited."""
    _forget_what_is_over(draft, view)
    found = _verdict(draft, view)
    if found is None:
        return None
    inspection, limit_s = found
    hang = draft.status.hang
    if limit_s is None:
        if hang is not None:
            _end_alarm(draft, hang, "every limit holds again")
        return None
    if hang is None:
        hang = _detected(draft, view, inspection, limit_s)
        draft.set(hang=hang)
        draft.emit(Reason.HANG, f"{told(hang)}; collecting the stacks of the ranks", warning=True)
    hang = _with_stacks(draft, view, hang)
    is_sure = inspection.at >= hang.detected_at + SECOND_LOOK
    if not (is_sure and _has_stacks(draft, hang)) or _action(draft) is HangAction.REPORT:
        return None
    worker = _accused(view, hang)
    return Failure(
        worker=worker or NOBODY,
        judgement=HUNG,
        rank=hang.rank,
        told=_what(hang),
        stacks=hang.stacks,
        accuses=worker is not None,
    )


def _accused(view: AttemptView, hang: HangStatus) -> Worker | None:
    """The worker to blame. Where no rank stands out there is none, and its node must not pay for it."""
    if hang.rank is None or hang.worker is None or not hang.worker < len(view.workers):
        return None
    return _present(view, view.workers[hang.worker])


def _verdict(draft: Draft, view: AttemptView) -> tuple[Inspection, int | None] | None:
    """A fresh look at the attempt and the limit that it shows to be exceeded; None when there is no look."""
    inspection, started = draft.observed.inspection, draft.status.attempt_start_time
    if inspection is None or inspection.attempt != view.number or not inspection.paces:
        return None
    if draft.now - inspection.at > FRESH or _moved_since(draft, inspection):
        return None
    policy = draft.job.spec.hang_policy
    given = policy.model_dump(by_alias=True, exclude_none=True) if policy is not None else None
    limits = HangLimits.read(given)
    base_s = max(_allowed(limits, inspection).values())
    allowed = _allowed(limits.after(recent_hangs(draft, inspection, base_s)), inspection)
    if any(pace.idle_s < allowed[phase] for phase, pace in inspection.paces.items()):
        return inspection, None
    limit_s = max(allowed.values())
    # An attempt cannot have stood still for longer than it exists, whatever its records say.
    if started is None or draft.now - started < timedelta(seconds=limit_s):
        return inspection, None
    return inspection, int(limit_s)


def _allowed(limits: HangLimits, look: Inspection) -> dict[Phase, float]:
    return {phase: limits.of(phase, pace) for phase, pace in look.paces.items()}


def _moved_since(draft: Draft, inspection: Inspection) -> bool:
    progress = draft.observed.progress
    return progress is not None and progress.attempt == inspection.attempt and progress.step > inspection.step


def _forget_what_is_over(draft: Draft, view: AttemptView) -> None:
    hang, progress = draft.status.hang, draft.observed.progress
    if hang is None:
        return
    if hang.attempt != view.number:
        draft.set(hang=None)
    elif progress is not None and progress.attempt == hang.attempt and progress.step > hang.step:
        _end_alarm(draft, hang, "the step moves again")


def _end_alarm(draft: Draft, hang: HangStatus, why: str) -> None:
    draft.set(hang=None)
    draft.emit(Reason.HANG_OVER, f"attempt {hang.attempt}, hung at step {hang.step}: {why}")


def _detected(draft: Draft, view: AttemptView, inspection: Inspection, limit_s: int) -> HangStatus:
    found = HangStatus(
        attempt=view.number, detected_at=draft.stamp, step=inspection.step, limit_seconds=limit_s
    )
    laggard = inspection.laggard
    if laggard is None:
        phases = ", ".join(sorted(inspection.paces))
        return found.model_copy(update={"phase": phases, "message": "no rank stands out; see the stacks"})
    pod = _pod(view, laggard.worker)
    accused = {
        "phase": laggard.phase,
        "rank": laggard.rank,
        "worker": laggard.worker,
        "pod": pod.name if pod is not None else "",
        "node": (pod.node or "") if pod is not None else "",
        "message": laggard.why,
    }
    return found.model_copy(update=accused)


def _with_stacks(draft: Draft, view: AttemptView, hang: HangStatus) -> HangStatus:
    """Take over where the stacks are; asks for them until they are there or were waited for."""
    known = _stacks_of(draft, hang)
    if known is not None and known.config_map != hang.stacks:
        hang = hang.model_copy(update={"stacks": known.config_map})
        draft.set(hang=hang)
    if not _has_stacks(draft, hang):
        draft.act(CollectStacks(attempt=hang.attempt, sources=stack_sources(view, first=hang.worker or 0)))
        draft.wake(min(draft.now + STACKS_RETRY, hang.detected_at + STACKS_WAIT))
    return hang


def _has_stacks(draft: Draft, hang: HangStatus) -> bool:
    """Whether nothing more will come."""
    tried = _stacks_of(draft, hang) is not None
    return tried or bool(hang.stacks) or draft.now >= hang.detected_at + STACKS_WAIT


def _stacks_of(draft: Draft, hang: HangStatus) -> StacksView | None:
    """What was collected for this alarm."""
    known = draft.observed.stacks
    ours = known is not None and known.attempt == hang.attempt and known.at >= hang.detected_at
    return known if ours else None


def stack_sources(view: AttemptView, *, first: int) -> tuple[StackSource, ...]:
    """Whom to ask for stacks: the workers whose program runs, one of them before all others."""
    pods = {pod.index: pod for pod in view.present if pod.started and not pod.ended}
    order = sorted(pods, key=lambda index: (index != first, index))
    return tuple(
        StackSource(worker=index, pod=pods[index].name, pod_ip=pods[index].pod_ip)
        for index in order[:MAX_STACKS_WORKERS]
    )


def _action(draft: Draft) -> HangAction:
    policy = draft.job.spec.hang_policy
    return (policy.action if policy is not None else None) or HangAction.RESTART


def told(hang: HangStatus) -> str:
    """The hang in one sentence, for events and the condition."""
    place = f" (pod {hang.pod}, node {hang.node or 'unknown'})" if hang.pod and hang.rank is not None else ""
    return f"attempt {hang.attempt}: {_what(hang)}{place}"


def _what(hang: HangStatus) -> str:
    accused = (
        f"rank {hang.rank} holds up the others: {hang.message}" if hang.rank is not None else hang.message
    )
    phase = f" in phase {hang.phase}" if hang.phase else ""
    return f"hung at step {hang.step}: nothing moved for {hang.limit_seconds} s{phase}; {accused}"


def _pod(view: AttemptView, index: int) -> PodView | None:
    return next((pod for pod in view.present if pod.index == index), None)


def _present(view: AttemptView, worker: Worker) -> Worker:
    """The accused worker, or one that is there: a pod that went meanwhile must not hide the hang."""
    if worker.pod is not None:
        return worker
    return next((item for item in view.workers if item.pod is not None), worker)
