"""The number of workers of the next attempt: every decision on it is made here.

`spec.workers` is the requested size. `status.elastic` records another size that the operator decided on, and
the reason, until the request changes (`requested_workers`). A requested size that is impossible is rejected,
and the job keeps another size in its place. That remains until the request changes, even while the job is
smaller still, for lack of capacity or because of a rule of failurePolicy. `resizing` says when a running
attempt stops for another size.
"""

from __future__ import annotations

from typing import Any

from zerotrain.contract.planner import Fit
from zerotrain.operator.api import Phase, ZeroTrainingJobSpec
from zerotrain.operator.api.configuration import largest_size, refusal_of_size
from zerotrain.operator.api.elastic import Elastic, ElasticStatus, RefusedSize, SizeReason
from zerotrain.operator.constants import ANNOTATION_IGNORE_MEMORY_PLAN, Reason
from zerotrain.operator.reconcile.draft import Draft, stored
from zerotrain.operator.reconcile.queueing import in_queue

CHOSEN = frozenset({SizeReason.CAPACITY, SizeReason.FAILURE})
"""Reasons of sizes that the operator chose, not the user."""


def prepare(draft: Draft) -> None:
    """Update the size before the checks of the next attempt, as the request may have changed."""
    take(draft)
    state = draft.status.elastic
    if state is not None and draft.status.phase is Phase.SUSPENDED and state.reason in CHOSEN:
        # The capacity was read long ago, and the cause of a failure may have been fixed.
        forget_choice(draft)


def admissible(draft: Draft) -> ZeroTrainingJobSpec:
    """Return the spec to be checked: for an elastic job, with the size that its batch is kept for."""
    spec, state = draft.job.spec, draft.status.elastic
    if spec.elastic is None or state is None or state.base_workers == spec.workers:
        return spec
    return spec.model_copy(update={"workers": state.base_workers})


def take(draft: Draft, *, runs: bool = False) -> None:
    """Bring `status.elastic` up to date with the present `spec.workers`.

    `runs` says that an attempt has the size: a size outside new bounds is then kept until there is capacity
    for one within them, or a queue is asked for it.
    """
    spec, state = draft.job.spec, draft.status.elastic
    if spec.elastic is None:
        if state is not None:
            draft.set(elastic=None)
        return
    if state is None or (draft.status.attempt == 0 and state.requested_workers != spec.workers):
        # Before the first attempt, spec.workers is the size that the global batch is meant for.
        state = ElasticStatus(base_workers=draft.workers, requested_workers=draft.workers)
        draft.set(elastic=state)
    workers = state.workers if state.reason is not SizeReason.REFUSED else None
    outside = workers is not None and _outside(spec.elastic, workers)
    if runs and workers == draft.workers < spec.elastic.min_workers and not in_queue(draft):
        outside = False
    if state.requested_workers != spec.workers or _is_acceptable_now(draft, state):
        _begin_anew(draft, state)
        return
    if state.refusal is not None and _outside(spec.elastic, state.refusal.workers):
        _keep_another(draft, state, state.refusal)
    if outside:
        forget_choice(draft)


def next_workers(draft: Draft) -> int:
    """Return the number of workers of an attempt that would start now."""
    spec, state = draft.job.spec, draft.status.elastic
    if spec.elastic is None or state is None or state.workers is None:
        return spec.workers
    return state.workers


def accepted_workers(draft: Draft) -> int:
    """Return the number of workers that the job has if nothing limits it: the requested number, or the one
    kept in its place."""
    state = draft.status.elastic
    refusal = state.refusal if state is not None else None
    return refusal.workers if refusal is not None else draft.job.spec.workers


def check(draft: Draft) -> tuple[str, str] | None:
    """Check the next attempt's size against the configuration, which may have changed since the size was
    decided.

    A size that does not work is replaced by the largest smaller one that does. Returns reason and message if
    there is none, and None otherwise. Call it when the configuration is right for the base size.
    """
    spec, state = draft.job.spec, draft.status.elastic
    if spec.elastic is None or state is None:
        return None
    workers, elastic = next_workers(draft), spec.elastic
    why = refusal_of_size(spec, state.base_workers, workers) if workers != state.base_workers else None
    if why is None and state.reason is SizeReason.REFUSED and _outside(elastic, workers):
        why = f"{state.message} The {workers} workers that were kept in their place are outside spec.elastic."
    if why is None:
        return None
    if state.reason in CHOSEN:
        forget_choice(draft)
        return check(draft)
    if (refusal := _refusal(draft, state)) is None:  # only the kept size is out of bounds
        _set_anew(draft, state, state.requested_workers)
        return None
    if (kept := largest_workers(draft, workers)) is not None:
        _refuse(draft, refusal, kept=kept)
        return None
    most = min(max(workers, elastic.min_workers), elastic.max_workers)
    bounds = f"from elastic.minWorkers {elastic.min_workers} to {most}"
    message = f"spec.workers: {why} No number of workers {bounds} keeps the global batch and fits the memory."
    advice = "Choose another spec.workers, or change spec.config while spec.suspend is true"
    return str(Reason.INVALID_SPEC), f"{message} {advice}"


def give_up_choice(draft: Draft) -> bool:
    """Return to the accepted number of workers if the operator chose the rejected size; return whether it
    did."""
    state = draft.status.elastic
    if state is None or state.reason not in CHOSEN:
        return False
    forget_choice(draft)
    return True


def shrink(draft: Draft, why: str) -> str | None:
    """Give the next attempt fewer workers, for the failure policy. Returns why this is not possible, or
    None."""
    if draft.job.spec.elastic is None:
        return "spec.elastic is not given"
    take(draft)
    fewer = largest_workers(draft, draft.workers - 1)
    if fewer is None:
        least = draft.job.spec.elastic.min_workers
        bounds = f"from elastic.minWorkers {least} to {draft.workers - 1}"
        return f"no number of workers {bounds} keeps the global batch and fits the memory"
    decide(draft, fewer, SizeReason.FAILURE, why)
    state = draft.status.elastic
    if state is not None:
        # After a failure, a job grows back later each time, as one does whose capacity comes and goes.
        update(draft, losses=state.losses + 1)
    return None


def largest_workers(draft: Draft, at_most: int) -> int | None:
    """Return the largest workable size up to `at_most` and the accepted number; None if there is none."""
    return _workable(draft, min(at_most, accepted_workers(draft)))


def _workable(draft: Draft, at_most: int) -> int | None:
    """Return the largest size up to `at_most` within the bounds that keeps the global batch and fits the
    memory."""
    spec, state = draft.job.spec, draft.status.elastic
    base_workers = state.base_workers if state is not None else draft.workers

    def fits(workers: int) -> bool:
        # With fewer ranks each holds a larger part of the model.
        found = draft.plan_job(spec, workers=workers, base_workers=base_workers).verdict
        return found is not Fit.DOES_NOT_FIT or draft.job.identity.ignores_memory_plan

    return largest_size(spec, base_workers, at_most=at_most, fits=fits)


def decide(draft: Draft, workers: int, reason: SizeReason, message: str) -> None:
    """Give the next attempt this number of workers, fewer than the accepted number."""
    state = draft.status.elastic
    if state is None:
        return
    decided = {"workers": workers, "reason": reason, "message": message, "since": draft.stamp}
    failed_at = draft.stamp if reason is SizeReason.FAILURE else state.rule_at
    update(draft, **decided, refused=state.refusal, failed_at=failed_at)


def forget_choice(draft: Draft) -> None:
    """Give the next attempt the accepted number of workers."""
    state = draft.status.elastic
    if state is None:
        return
    decided: dict[str, Any] = {"workers": None, "reason": None, "message": ""}
    if (refusal := state.refusal) is not None:
        decided = {**refusal.model_dump(), "reason": SizeReason.REFUSED}
    cleared = {"refused": None, "failed_at": None}
    update(draft, **decided, **cleared, since=draft.stamp)


def update(draft: Draft, **changes: Any) -> None:
    """Replace fields of `status.elastic`, if it exists."""
    if draft.status.elastic is not None:
        draft.set(elastic=draft.status.elastic.model_copy(update=changes))


def capacity_message(draft: Draft, workers: int) -> str:
    return f"capacity for {workers} of {accepted_workers(draft)} workers"


def _outside(elastic: Elastic, workers: int) -> bool:
    return not elastic.min_workers <= workers <= elastic.max_workers


def _begin_anew(draft: Draft, state: ElasticStatus) -> None:
    """Reset the state to the present spec.workers, or to the size that the job keeps in its place."""
    _set_anew(draft, state, draft.job.spec.workers)
    if (refusal := _refusal(draft, state)) is not None:
        _refuse(draft, refusal, kept=_within(draft, draft.workers))


def _set_anew(draft: Draft, state: ElasticStatus, requested_workers: int) -> None:
    """Reset the state to the size `requested_workers` without any decision; the size that ran stays known."""
    fresh = ElasticStatus(
        base_workers=state.base_workers, requested_workers=requested_workers, since=draft.stamp, ran=state.ran
    )
    draft.set(elastic=fresh)


def _keep_another(draft: Draft, state: ElasticStatus, refused: RefusedSize) -> None:
    """Choose another size to keep in place of the requested one, if the bounds changed and exclude the kept
    one."""
    kept = _within(draft, refused.workers)
    if kept == refused.workers:
        return
    if (refusal := _refusal(draft, state)) is None:
        _begin_anew(draft, state)
    elif state.reason is SizeReason.REFUSED:
        _refuse(draft, refusal, kept=kept)
    else:
        update(draft, refused=RefusedSize(workers=kept, message=stored(refusal)))
        if state.workers == kept:
            forget_choice(draft)  # nothing else limits what is left


def _within(draft: Draft, workers: int) -> int:
    """Return the size to keep in place of a rejected one within the present bounds.

    If no size within them works, the size stays until the next attempt is checked: the job is not stopped for
    that.
    """
    elastic = draft.job.spec.elastic
    if elastic is None or not _outside(elastic, workers):
        return workers
    # Below the bounds, the requested size is the nearest size that the user asked for.
    return _workable(draft, max(workers, draft.job.spec.workers)) or workers


def _refuse(draft: Draft, refusal: str, *, kept: int) -> None:
    draft.emit(Reason.RESIZE_REFUSED, f"{stored(refusal)} The job keeps {kept} workers.", warning=True)
    decided = {"workers": kept, "reason": SizeReason.REFUSED, "message": stored(refusal)}
    update(draft, **decided, since=draft.stamp)


def _refusal(draft: Draft, state: ElasticStatus) -> str | None:
    """Return why the job cannot run with spec.workers, with the numbers; None if it can.

    The reason is reported before any rank stops, because the next attempt would be rejected.
    """
    spec, base_workers = draft.job.spec, state.base_workers
    if (refusal := refusal_of_size(spec, base_workers, spec.workers)) is not None:
        return refusal
    found = draft.plan_job(spec, workers=spec.workers, base_workers=base_workers)
    if found.verdict is not Fit.DOES_NOT_FIT or draft.job.identity.ignores_memory_plan:
        return None
    advice = f'To resize it anyway, set annotation {ANNOTATION_IGNORE_MEMORY_PLAN}: "true".'
    return f"{spec.workers} workers: {found.message} {advice}"


def _is_acceptable_now(draft: Draft, state: ElasticStatus) -> bool:
    """Return whether the rejected size would be accepted now.

    That may be due to the user's annotation, or to another configuration, which can be set while the job is
    suspended.
    """
    may_differ = draft.job.identity.ignores_memory_plan or draft.status.phase is Phase.SUSPENDED
    return state.refusal is not None and may_differ and _refusal(draft, state) is None
