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
from zerotrain.operator.api.lifecycle import CleanPodPolicy
from zerotrain.operator.api.planning import Planner, plan_job
from zerotrain.operator.api.status import Count
from zerotrain.operator.constants import MANAGER
from zerotrain.operator.reconcile import (
    attempt_objects,
    giving_back,
    progress,
    queueing,
    start_up,
    verification,
)
from zerotrain.operator.reconcile.admission import too_large, unreadable
from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.conditions import update_conditions
from zerotrain.operator.reconcile.draft import ACTIVE, FINISHED, Draft, worker_selector
from zerotrain.operator.reconcile.job import JobView, Known, identity_of
from zerotrain.operator.reconcile.observe import Observed
from zerotrain.operator.reconcile.phases import advance
from zerotrain.operator.reconcile.plan import NOTHING, Plan
from zerotrain.operator.reconcile.progress import merge_progress
from zerotrain.operator.reconcile.queueing import take_label
from zerotrain.operator.reconcile.teardown import end_strays


def reconcile(
    job: Mapping[str, Any],
    observed: Observed,
    now: datetime,
    known: Known | None = None,
    planner: Planner = plan_job,
) -> Plan:
    """Decide one pass over `job` (the API server's JSON).

    `now` must be timezone-aware. `known` caches what has not changed since the last pass over the same job
    UID. An exception of `planner` is passed on: nothing was decided then, and the same call may be repeated.

    A job that is being deleted is left to garbage collection by ownerReferences, a job of another manager to
    that manager.
    """
    identity = identity_of(job)
    stored = job.get("spec", {})
    if identity.deleting or stored.get("managedBy", MANAGER) != MANAGER:
        return NOTHING
    known = known or Known()
    status = known.read_status(job)
    blank = JobView(identity=identity, spec=_EMPTY, status=status)
    if UNREAD in job:
        return _unreadable(blank, observed, now, too_large(job[UNREAD]))
    try:
        spec = known.read_spec(job)
    except ValidationError as error:
        return _unreadable(blank, observed, now, unreadable(error))
    draft = Draft(
        job=JobView(identity=identity, spec=spec, status=status),
        observed=observed,
        now=now,
        status=status,
        plan_job=planner,
    )
    take_label(draft)
    merge_progress(draft)
    progress.observe_peaks(draft)
    all_go = spec.run_policy.clean_pod_policy is CleanPodPolicy.ALL
    if status.phase in ACTIVE or (status.phase in FINISHED and not all_go):
        # A pod whose creation request got no response may appear even after the job's end.
        end_strays(draft)
    advance(draft)
    giving_back.settle(draft)
    start_up.report_rejection(draft)
    queueing.settle(draft)
    view = draft.view()
    attempt_objects.keep_shared(draft, view)
    attempt_objects.settle_protection(
        draft
    )  # after the NetworkPolicy: a rejected disruption budget ends the pass
    verification.advance(draft)  # last: a rejected pod ends the pass, and quota must be released before
    draft.set(
        selector=worker_selector(identity.name, identity.uid),
        zero_stage=_zero_stage(spec),
        workers=_count(view, draft.workers, 1),
        ranks=_count(view, draft.workers, spec.num_ranks_per_worker),
    )
    update_conditions(draft, view)
    return draft.plan()


_EMPTY = ZeroTrainingJobSpec.model_construct(image="unreadable")
"""Placeholder for a spec that cannot be read. It is not validated, since it is no valid job."""

_BETWEEN_ATTEMPTS = frozenset({Phase.QUEUED, Phase.RESTARTING, Phase.STALLED})
"""Phases in which no rank runs. Time spent waiting for a user in them does not count as active time."""


def _unreadable(job: JobView, observed: Observed, now: datetime, why: tuple[str, str]) -> Plan:
    """Report the problem and leave the pods alone: running pods were started from a spec that was
    readable."""
    draft = Draft(job=job, observed=observed, now=now, status=job.status, stalled=why)
    if job.status.attempt == 0:
        draft.set(phase=Phase.STALLED)
    if draft.status.phase in _BETWEEN_ATTEMPTS:
        draft.set(start_time=None)
    update_conditions(draft, draft.view())
    return draft.plan()


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
