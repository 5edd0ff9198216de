"""The request to healthy ranks to write a checkpoint and stop: the reasons for it, and its record in status.

The request is in status before any rank is asked; `yielding` carries it out.
"""

from __future__ import annotations

from zerotrain.operator.api import Phase, YieldReason, YieldRequest, ZeroTrainingJobSpec
from zerotrain.operator.api.spec import spec_hash
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import avoided_nodes, queueing, resizing
from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.pods import WorkerState
from zerotrain.operator.resources.container import DEFAULT_GRACE_S

FROZEN = {
    "image",
    "command",
    "finetune",
    "args",
    "config",
    "config_from",
    "data",
    "steps",
    "log_every_steps",
    "checkpoint",
    "scheduling",
    "pod_template",
}
"""Fields of the spec that change only while the job is suspended, except for the parts in `THAWED`."""

THAWED = {
    "checkpoint": {"volume", "verify", "verify_timeout_seconds"},
    "scheduling": {"priority_class_name"},
}

_PHASE = {
    YieldReason.SUSPEND: Phase.SUSPENDING,
    YieldReason.QUEUE_EVICTION: Phase.SUSPENDING,
    YieldReason.DRAIN: Phase.YIELDING,
    YieldReason.RESIZE: Phase.YIELDING,
}

_EVENT = {
    YieldReason.SUSPEND: Reason.CHECKPOINT_REQUESTED,
    YieldReason.QUEUE_EVICTION: Reason.QUEUE_EVICTED,
    YieldReason.DRAIN: Reason.DRAINING,
    YieldReason.RESIZE: Reason.RESIZING,
}


def wanted(draft: Draft, view: AttemptView) -> tuple[YieldReason, str] | None:
    """Return why healthy ranks should stop, as reason and message; None if they continue."""
    if _is_outdated(draft):
        # The suspension in between, which no pass saw, would have had the same effect.
        return YieldReason.SUSPEND, "the spec was changed while the job was briefly suspended"
    if (why := queueing.evicted(draft)) is not None:
        return YieldReason.QUEUE_EVICTION, why
    if (why := avoided_nodes.move_wanted(draft, view)) is not None:
        return YieldReason.DRAIN, why
    if (why := resizing.resize_wanted(draft, view)) is not None:
        return YieldReason.RESIZE, why
    return None


def ask(draft: Draft, reason: YieldReason, why: str) -> None:
    """Write the request to status; a request under way keeps its time and may only become a suspension."""
    under_way = _under_way(draft)
    if under_way is not None and under_way.reason is reason:
        return
    asked = under_way.requested_at if under_way is not None else draft.stamp
    checkpoint = draft.status.checkpoint.model_copy(update={"requested_at": asked})
    joined = under_way.joined if under_way is not None else _joined(draft)
    request = YieldRequest(reason=reason, requested_at=asked, message=why, joined=joined)
    draft.set(phase=_PHASE[reason], checkpoint=checkpoint, yield_request=request)
    attempt = draft.status.attempt
    suspends = reason is YieldReason.SUSPEND and draft.job.spec.suspend
    message = f"suspending attempt {attempt}" if suspends else f"attempt {attempt}: {why}"
    draft.emit(_EVENT[reason], message)


def _under_way(draft: Draft) -> YieldRequest | None:
    """Return the request under way; None without one.

    A status from before there were several reasons contains only the time.
    """
    request, asked = draft.status.yield_request, draft.status.checkpoint.requested_at
    if request is None and asked is not None and draft.status.phase is Phase.SUSPENDING:
        return YieldRequest(reason=YieldReason.SUSPEND, requested_at=asked)
    return request


def _joined(draft: Draft) -> bool:
    """Return whether the ranks have met, also if no pass saw it because no operator ran."""
    view = draft.view()
    met = (
        any(pod.ready or pod.ended for pod in view.present)
        or view.count(WorkerState.YIELDED, WorkerState.STOPPED, WorkerState.TERMINATING) > 0
    )
    return draft.status.phase is Phase.RUNNING or met


def basis(draft: Draft) -> dict[str, object]:
    """Return the parts of the spec that an attempt which begins now keeps, as fields of its shape."""
    return {
        "grace_period_seconds": grace_s(draft.job.spec),
        "generation": draft.job.identity.generation,
        "frozen_hash": frozen_hash(draft.job.spec),
    }


def grace_s(spec: ZeroTrainingJobSpec) -> int:
    return spec.checkpoint.grace_period_seconds if spec.checkpoint is not None else DEFAULT_GRACE_S


def frozen_hash(spec: ZeroTrainingJobSpec) -> str:
    """Return a hash of the fields that change only while the job is suspended."""
    return spec_hash(spec, parts=FROZEN, but=THAWED)


def _is_outdated(draft: Draft) -> bool:
    """Return whether the attempt's pods were made from another spec than the present one."""
    shape = draft.status.shape
    if shape is None or not shape.frozen_hash or shape.generation == draft.job.identity.generation:
        return False
    return shape.frozen_hash != frozen_hash(draft.job.spec)
