"""The memory plan of a job, checked before an attempt: a job that cannot fit must not get pods.

The plan is made for the size of the attempt that is about to start. It is stored in `status.memoryPlan`, next
to the peaks that rank 0 reports.
"""

from __future__ import annotations

from zerotrain.contract.planner import Fit
from zerotrain.contract.progress import Progress
from zerotrain.operator.api.memory_plan import MemoryPeaks, MemoryPlan
from zerotrain.operator.api.planning import JobPlan
from zerotrain.operator.constants import ANNOTATION_IGNORE_MEMORY_PLAN, Reason
from zerotrain.operator.reconcile import sizing
from zerotrain.operator.reconcile.draft import Draft, stored

NEWS_PART = 0.02
"""Growth of a peak, as a fraction, from which it is written: allocators creep, and every status write costs
all watchers."""


def does_not_fit(draft: Draft) -> tuple[str, str] | None:
    """Return reason and message if no worker could hold its ranks; None if they fit or the planner cannot
    tell."""
    found = _plan(draft)
    refused = found.verdict is Fit.DOES_NOT_FIT
    overridden = refused and draft.job.identity.ignores_memory_plan
    is_new = _write(draft, found, overridden=overridden)
    if refused and not overridden:
        advice = f'To start it anyway, set annotation {ANNOTATION_IGNORE_MEMORY_PLAN}: "true".'
        return str(Reason.DOES_NOT_FIT), " ".join((found.message, *_how(draft, found), advice))
    if is_new and overridden:
        draft.emit(Reason.MEMORY_PLAN_IGNORED, found.message, warning=True)
    elif is_new and found.verdict is Fit.TIGHT:
        draft.emit(Reason.MEMORY_TIGHT, found.message, warning=True)
    return None


def _how(draft: Draft, found: JobPlan) -> tuple[str, ...]:
    """Return how to make the proposed changes: the API server rejects some of them for a job that exists."""
    if found.proposal is None:
        return ()
    changes, is_elastic = " and ".join(found.proposal.changes), draft.job.spec.elastic is not None
    if "spec.nvme" in changes or ("spec.workers" in changes and not is_elastic):
        return ("Delete the job and apply it again with these changes: they are not possible in place.",)
    if any("spec.workers" not in change for change in found.proposal.changes):
        return ("spec.config can be changed while spec.suspend is true.",)
    return ()


def observe_peaks(draft: Draft) -> None:
    """Store the highest peaks that rank 0 of this attempt reported, next to the plan."""
    plan, progress = draft.status.memory_plan, draft.observed.progress
    if plan is None or progress is None or progress.attempt != draft.status.attempt:
        return
    if progress.memory_peak_bytes <= 0:
        return
    old = plan.observed
    if old is None or old.attempt != progress.attempt:
        old = MemoryPeaks(attempt=progress.attempt)
    new = MemoryPeaks(
        attempt=progress.attempt,
        gpu_bytes=_larger(old.gpu_bytes, progress.memory_peak_bytes if draft.job.spec.num_gpus else 0),
        host_bytes=_larger(old.host_bytes, _host_peak(draft, progress)),
        nvme_bytes=_larger(old.nvme_bytes, progress.spill_peak_bytes),
    )
    if new != plan.observed:
        draft.set(memory_plan=plan.model_copy(update={"observed": new}))


def _host_peak(draft: Draft, progress: Progress) -> int:
    return progress.host_peak_bytes if draft.job.spec.num_gpus else progress.memory_peak_bytes


def _larger(old: int | None, new: int) -> int | None:
    if new <= 0:
        return old
    return new if old is None or new > old * (1 + NEWS_PART) else old


def _plan(draft: Draft) -> JobPlan:
    spec, elastic = draft.job.spec, draft.status.elastic
    if spec.elastic is None:
        return draft.plan_job(spec)
    base_workers = elastic.base_workers if elastic is not None else spec.workers
    return draft.plan_job(spec, workers=sizing.next_shape(draft).workers, base_workers=base_workers)


def _write(draft: Draft, found: JobPlan, *, overridden: bool) -> bool:
    """Store the plan, and return whether it differs from the previous one."""
    old: MemoryPlan | None = draft.status.memory_plan
    bare = found.as_status()
    changes = {"message": stored(bare.message), "overridden": True if overridden else None}
    plan = bare.model_copy(update=changes)
    if old is not None and old.model_copy(update={"observed": None}) == plan:
        return False
    draft.set(memory_plan=plan)
    return True
