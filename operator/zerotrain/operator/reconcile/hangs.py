"""Hang detection for attempts whose step no longer advances: suspicion, confirmation, stacks, another
attempt.

A hang is accepted only after a recent inspection of all workers of this attempt, in which every rank that
answers has exceeded the limit of its phase. The hang is first written to status. Then the stacks of all ranks
are collected. Only after that, and only if a later inspection confirms it, does the attempt end. A step that
advances in between ends the alarm and has no other effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from zerotrain.contract.progress import Phase, Progress
from zerotrain.operator.api import HangAction, HangStatus
from zerotrain.operator.constants import Reason
from zerotrain.operator.failure_policy import HUNG
from zerotrain.operator.reconcile.attempts import NO_WORKER, AttemptView, Failure, Worker
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.inspection import Inspection, RankPace, pace_of
from zerotrain.operator.reconcile.observe import StacksView
from zerotrain.operator.reconcile.plan import CollectStacks, StackSource
from zerotrain.operator.reconcile.pods import PodView

FRESH = timedelta(seconds=30)
"""Maximum age of an inspection; an older one says nothing about the present."""

STACKS_WAIT = timedelta(seconds=60)
"""Time from the detection after which stacks are no longer waited for.

Another replica takes over from a dead one within 17 s and then has to read everything; it still has time to
request the stacks.
"""

STACKS_RETRY = timedelta(seconds=1)
SECOND_LOOK = timedelta(seconds=2)
"""Time from the detection to the inspection that may end the attempt."""

MAX_STACKS_WORKERS = 32
"""Maximum number of workers that are asked for stacks; the blamed worker and worker 0 are always among
them."""

DEFAULT_FACTOR = 10
DEFAULT_MIN_S = 300
DEFAULT_STARTUP_S = 1800
DEFAULT_CHECKPOINT_S = 1800
LONGEST_FACTOR = 2.0
"""Multiple of the longest step that is no hang: steps have outliers that a percentile leaves out."""

MEETING_S = 60.0
"""Idle seconds of rank 0 after which all ranks are inspected while they have not met.

The rendezvous times out after 300 s by default, and then only an earlier inspection can tell which rank was
missing.
"""

MAX_LIMIT_S = 30 * 86_400.0
MAX_DOUBLINGS = 2
"""Maximum number of doublings. Each recent hang doubles the limits, so that a limit that is too short does
not end every attempt."""

REMEMBERED_LIMITS = 10.0
"""Number of limits for which a hang counts as recent, at least.

With the limit doubled twice, two hangs are found within eight limits. They would be forgotten before the
third if the window of the failure policy is shorter.
"""


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
        """Return the limits of the policy as stored."""
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
        """Return the limits of a job with this number of recent hangs."""
        return replace(self, scale=2.0 ** min(hangs, MAX_DOUBLINGS))

    def of(self, phase: Phase, pace: RankPace) -> float:
        """Return the seconds that ranks with this pace may stand still in this phase."""
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
        """Return the limit in seconds for the steps after the first one.

        The duration of the first step is the estimate until other steps are known. If it was not measured
        separately, the limit of the first step applies.
        """
        if first_s is None:
            return self.first_step_s
        # The factor is meant for usual steps. Applied to a long compilation, it would allow hours without
        # hang detection.
        return max(LONGEST_FACTOR * first_s, min(self.factor * first_s, self.first_step_s))


def suspect_after_s(limits: HangLimits, record: Progress) -> float:
    """Return the idle seconds of rank 0 after which all ranks are inspected.

    It is half of the limit, and less before the ranks have met.
    """
    motion = record.motion
    if motion is None:
        return MAX_LIMIT_S
    half = limits.of(record.phase, pace_of(record.phase, [motion])) / 2
    return min(half, MEETING_S) if record.phase in (Phase.INIT, Phase.RENDEZVOUS) else half


def is_met(look: Inspection) -> bool:
    """Return whether no rank waits in the rendezvous.

    Ranks that wait there time out long before any hang limit, and then the missing ranks must be known.
    """
    return Phase.RENDEZVOUS not in look.paces


def stands_still(limits: HangLimits, look: Inspection) -> bool:
    """Return whether every rank has stood still for half of its limit; an inspection that shows less is no
    news."""
    return all(pace.idle_s >= limits.of(phase, pace) / 2 for phase, pace in look.paces.items())


def recent_hangs(draft: Draft, look: Inspection, limit_s: float) -> int:
    """Return the number of recent restarts after hangs.

    A hang is recent within the window of the failure policy, or within a multiple of the limit. It also
    counts, however old, while the job has not passed the step of the hang: it may hang there every time.
    """
    window_s = draft.job.spec.failure_policy.window_seconds
    since = draft.now - timedelta(seconds=max(window_s, REMEMBERED_LIMITS * limit_s))
    reached = max(draft.status.progress.step, look.step)
    return sum(
        1
        for item in draft.status.restarts.recent
        if item.reason == Reason.HANG and (item.time > since or item.step >= reached)
    )


def hang_of(draft: Draft, view: AttemptView) -> Failure | None:
    """Return the hang as a failure of the rank that blocks the others; None without a hang or while stacks
    are awaited."""
    _forget_what_is_over(draft, view)
    found = _exceeded_limit(draft, view)
    if found is None:
        return None
    inspection, limit_s = found
    hang = draft.status.hang
    if limit_s is None:
        if hang is not None:
            _end_alarm(draft, hang, "all ranks are within their limits again")
        return None
    if hang is None:
        hang = _detected(draft, view, inspection, limit_s)
        draft.set(hang=hang)
        draft.emit(Reason.HANG, f"{hang_message(hang)}; collecting the stacks of the ranks", warning=True)
    hang = _with_stacks(draft, view, hang)
    is_sure = inspection.at >= hang.detected_at + SECOND_LOOK
    if not (is_sure and _has_stacks(draft, hang)) or _action(draft) is HangAction.REPORT:
        return None
    worker = _blamed_worker(view, hang)
    return Failure(
        worker=worker or NO_WORKER,
        failure_class=HUNG,
        rank=hang.rank,
        message=_what(hang),
        stacks=hang.stacks,
        blames_worker=worker is not None,
    )


def _blamed_worker(view: AttemptView, hang: HangStatus) -> Worker | None:
    """Return the worker to blame. If no rank stands out there is none, and no node must be excluded for
    it."""
    if hang.rank is None or hang.worker is None or not hang.worker < len(view.workers):
        return None
    return _present(view, view.workers[hang.worker])


def _exceeded_limit(draft: Draft, view: AttemptView) -> tuple[Inspection, int | None] | None:
    """Return a recent inspection of the attempt and the limit that was exceeded, if any; None without an
    inspection."""
    inspection, started = draft.observed.inspection, draft.status.attempt_start_time
    if inspection is None or inspection.attempt != view.number or not inspection.paces:
        return None
    progress = draft.progress
    moved = progress is not None and progress.step > inspection.step
    if draft.now - inspection.at > FRESH or moved:
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


def _forget_what_is_over(draft: Draft, view: AttemptView) -> None:
    hang, progress = draft.status.hang, draft.progress
    if hang is None:
        return
    if hang.attempt != view.number:
        draft.set(hang=None)
    elif progress is not None and progress.step > hang.step:
        _end_alarm(draft, hang, "the step advances again")


def _end_alarm(draft: Draft, hang: HangStatus, why: str) -> None:
    draft.set(hang=None)
    draft.emit(Reason.HANG_OVER, f"attempt {hang.attempt}, hung at step {hang.step}: {why}")


def _detected(draft: Draft, view: AttemptView, inspection: Inspection, limit_s: int) -> HangStatus:
    found = HangStatus(
        attempt=view.number, detected_at=draft.stamp, step=inspection.step, limit_seconds=limit_s
    )
    slow_rank = inspection.slow_rank
    if slow_rank is None:
        phases = ", ".join(sorted(inspection.paces))
        return found.model_copy(update={"phase": phases, "message": "no rank stands out; see the stacks"})
    pod = _pod(view, slow_rank.worker)
    accused = {
        "phase": slow_rank.phase,
        "rank": slow_rank.rank,
        "worker": slow_rank.worker,
        "pod": pod.name if pod is not None else "",
        "node": (pod.node or "") if pod is not None else "",
        "message": slow_rank.why,
    }
    return found.model_copy(update=accused)


def _with_stacks(draft: Draft, view: AttemptView, hang: HangStatus) -> HangStatus:
    """Store the name of the ConfigMap with the stacks; request them until they exist or the wait is over."""
    known = _stacks_of(draft, hang)
    if known is not None and known.config_map != hang.stacks:
        hang = hang.model_copy(update={"stacks": known.config_map})
        draft.set(hang=hang)
    if not _has_stacks(draft, hang):
        draft.act(CollectStacks(attempt=hang.attempt, sources=stack_sources(view, first=hang.worker or 0)))
        draft.wake(min(draft.now + STACKS_RETRY, hang.detected_at + STACKS_WAIT))
    return hang


def _has_stacks(draft: Draft, hang: HangStatus) -> bool:
    """Return whether no more stacks will arrive."""
    tried = _stacks_of(draft, hang) is not None
    return tried or bool(hang.stacks) or draft.now >= hang.detected_at + STACKS_WAIT


def _stacks_of(draft: Draft, hang: HangStatus) -> StacksView | None:
    """Return the stacks that were collected for this alarm."""
    known = draft.observed.stacks
    ours = known is not None and known.attempt == hang.attempt and known.at >= hang.detected_at
    return known if ours else None


def stack_sources(view: AttemptView, *, first: int) -> tuple[StackSource, ...]:
    """Return the workers to ask for stacks: those whose program runs, worker `first` before all others."""
    pods = {pod.index: pod for pod in view.present if pod.started and not pod.ended}
    order = sorted(pods, key=lambda index: (index != first, index))
    return tuple(
        StackSource(worker=index, pod=pods[index].name, pod_ip=pods[index].pod_ip)
        for index in order[:MAX_STACKS_WORKERS]
    )


def _action(draft: Draft) -> HangAction:
    policy = draft.job.spec.hang_policy
    return (policy.action if policy is not None else None) or HangAction.RESTART


def hang_message(hang: HangStatus) -> str:
    """Return the hang in one sentence, for events and the condition."""
    place = f" (pod {hang.pod}, node {hang.node or 'unknown'})" if hang.pod and hang.rank is not None else ""
    return f"attempt {hang.attempt}: {_what(hang)}{place}"


def _what(hang: HangStatus) -> str:
    accused = f"rank {hang.rank} blocks the others: {hang.message}" if hang.rank is not None else hang.message
    phase = f" in phase {hang.phase}" if hang.phase else ""
    return f"hung at step {hang.step}: no progress for {hang.limit_seconds} s{phase}; {accused}"


def _pod(view: AttemptView, index: int) -> PodView | None:
    return next((pod for pod in view.present if pod.index == index), None)


def _present(view: AttemptView, worker: Worker) -> Worker:
    """Return the blamed worker, or one whose pod exists: a pod that was deleted meanwhile must not hide the
    hang."""
    if worker.pod is not None:
        return worker
    return next((item for item in view.workers if item.pod is not None), worker)
