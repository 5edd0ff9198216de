"""The pure function `reconcile`: it maps everything known about one job to everything to do about it.

It is level-triggered. Each pass compares the whole job with the whole observation and never asks what
changed, so that a lost event, a restart of the operator or an extra pass cannot change the outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from zerotrain.operator.api import Phase, ZeroTrainingJobSpec
from zerotrain.operator.api.job_text import UNREAD
from zerotrain.operator.api.planning import Planner, plan_job
from zerotrain.operator.api.status import Count
from zerotrain.operator.constants import MANAGER
from zerotrain.operator.reconcile import (
    active,
    attempt_checks,
    attempt_objects,
    giving_back,
    job_end,
    next_attempt,
    progress,
    queueing,
    start_up,
    teardown,
    verification,
    yielding,
)
from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.conditions import update_conditions
from zerotrain.operator.reconcile.draft import (
    ACTIVE,
    BETWEEN_ATTEMPTS,
    FINISHED,
    STOPPING,
    Draft,
    worker_selector,
)
from zerotrain.operator.reconcile.job import JobView, Known, identity_of
from zerotrain.operator.reconcile.observe import Observed
from zerotrain.operator.reconcile.plan import NOTHING, Plan


def reconcile(
    job: Mapping[str, Any],
    observed: Observed,
    now: datetime,
    known: Known | None = None,
    planner: Planner = plan_job,
) -> Plan:
    """Decide one pass over `job` (the API server's JSON). The steps and their order are those below.

    `now` must be timezone-aware. `known` caches what has not changed since the last pass over the same job
    UID. An exception of `planner` is passed on: nothing was decided then, and the same call may be repeated.
    """
    draft = _read(job, observed, now, known or Known(), planner)
    if draft is None:
        return NOTHING
    if draft.stalled is not None:
        return _unreadable(draft)

    # What was observed is stored while the attempt is still the one that it was observed of.
    queueing.take_label(draft)  # before the phases: a job that begins now begins in the queue of its label
    progress.merge_progress(draft)  # before an attempt ends: its last step and checkpoint decide what follows
    progress.observe_peaks(draft)  # before an attempt begins: its memory plan replaces the present one
    teardown.end_strays(draft)  # before the phases, which look at the pods of the present attempt alone

    # The phases, each at most once, in the only order in which a pass may go through them. One that ends
    # hands over to a later one, so that a restart costs one status write and not three.
    if draft.phase in ACTIVE and not draft.awaits_first_attempt:
        active.advance(draft)
    if draft.phase in STOPPING:
        yielding.advance(draft)  # after `active`, which may have asked the ranks to stop just now
    if draft.phase in BETWEEN_ATTEMPTS or draft.awaits_first_attempt:
        next_attempt.advance(draft)  # after the end of an attempt; one that starts here is followed later
    if draft.phase in FINISHED:
        job_end.advance(draft)  # last: each of the above may have ended the job

    # What follows from the phase, whichever it is.
    giving_back.settle(draft)  # before the conditions, which show what is left of it
    start_up.report_rejection(draft)  # after the phases: what the last pass was refused matters in some only
    queueing.settle(draft)  # before actions that may be rejected and end the pass: quota must be released
    view = draft.view()
    attempt_objects.keep_shared(draft, view)  # before the next two, so that a NetworkPolicy never waits
    attempt_objects.settle_protection(draft)  # a rejected disruption budget ends the actions of the pass,
    verification.advance(draft)  # and so does a rejected pod
    _count_ranks(draft, view)
    update_conditions(draft, view)  # last: they describe all of the above
    return draft.plan()


def _read(
    job: Mapping[str, Any], observed: Observed, now: datetime, known: Known, planner: Planner
) -> Draft | None:
    """Return the draft of a pass over the job, with `stalled` set if its spec cannot be read.

    None for a job that is being deleted, which is left to garbage collection by ownerReferences, and for a
    job of another manager, which is left to that manager.
    """
    identity, stored = identity_of(job), job.get("spec", {})
    if identity.deleting or stored.get("managedBy", MANAGER) != MANAGER:
        return None
    status, spec, stalled = known.read_status(job), _EMPTY, None
    if UNREAD in job:
        stalled = attempt_checks.too_large(job[UNREAD])
    else:
        try:
            spec = known.read_spec(job)
        except ValidationError as error:
            stalled = attempt_checks.unreadable(error)
    view = JobView(identity=identity, spec=spec, status=status)
    return Draft(job=view, observed=observed, now=now, status=status, plan_job=planner, stalled=stalled)


_EMPTY = ZeroTrainingJobSpec.model_construct(image="unreadable")
"""Placeholder for a spec that cannot be read. It is not validated, since it is no valid job."""


def _unreadable(draft: Draft) -> Plan:
    """Report the problem and leave the pods alone: running pods were started from a spec that was
    readable."""
    if draft.status.attempt == 0:
        draft.set(phase=Phase.STALLED)
    if draft.status.phase in BETWEEN_ATTEMPTS:
        draft.set(start_time=None)  # time spent waiting for a user is not active time
    update_conditions(draft, draft.view())
    return draft.plan()


def _count_ranks(draft: Draft, view: AttemptView) -> None:
    identity, spec = draft.job.identity, draft.job.spec
    draft.set(
        selector=worker_selector(identity.name, identity.uid),
        zero_stage=_zero_stage(spec),
        workers=_count(view, draft.workers, 1),
        ranks=_count(view, draft.workers, spec.num_ranks_per_worker),
    )


def _count(view: AttemptView, workers: int, each: int) -> Count:
    live = [pod for pod in view.present if not pod.ended]
    ready = sum(1 for pod in live if pod.ready)
    return Count(
        desired=workers * each,
        running=sum(1 for pod in live if pod.started) * each,
        ready=ready * each,
        summary=f"{ready * each}/{workers * each}",
    )


def _zero_stage(spec: ZeroTrainingJobSpec) -> int | None:
    """Return the ZeRO stage for the column of `kubectl get`; None if the configuration is given by
    reference."""
    zero = (spec.config or {}).get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return stage if isinstance(stage, int) and not isinstance(stage, bool) else None
