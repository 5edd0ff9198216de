"""Checkpoint and yield: one protocol for every reason to stop ranks that are well.

The request stands in status before anybody is asked; a worker is asked through the channel, and SIGTERM to
all pods is the second way. The pods go only when every rank stopped, or when the grace is over; their last
checkpoint is in status by then. Ranks that never met have nothing to save and are ended at once.
"""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from typing import Any

from zerotrain.operator.api import Phase, YieldReason, YieldRequest, ZeroTrainingJobSpec
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import drains, endings, queueing, sizing
from zerotrain.operator.reconcile.attempts import (
    OVER,
    AttemptView,
    Failure,
    Fate,
    cause_order,
    failures_of,
    first_failure,
)
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.plan import DeleteWorkers, RequestYield
from zerotrain.operator.resources.container import DEFAULT_GRACE_S

FALLBACK = timedelta(seconds=10)
"""Without an answer of worker 0 the pods get SIGTERM, which asks for the same checkpoint."""

SLACK = timedelta(seconds=5)
"""Added to the grace for the way there and back."""

FROZEN = {
    "image",
    "command",
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
"""Fields of the spec that change only while suspended, but for parts of them."""

THAWED: dict[str, Any] = {
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
    """Why ranks that are well should stop, and what led to it; None when they go on."""
    if _is_outdated(draft):
        # As the suspension in between, which no pass saw, would have had it.
        return YieldReason.SUSPEND, "the spec was changed while the job was suspended for a moment"
    if (why := queueing.evicted(draft, view)) is not None:
        return YieldReason.QUEUE_EVICTION, why
    if (why := drains.move_wanted(draft, view)) is not None:
        return YieldReason.DRAIN, why
    if (why := sizing.resize_wanted(draft, view)) is not None:
        return YieldReason.RESIZE, why
    return None


def ask(draft: Draft, reason: YieldReason, why: str) -> None:
    """Put the request into status; one under way keeps its clock and may only become a suspend."""
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
    said = f"suspending attempt {attempt}" if suspends else f"attempt {attempt}: {why}"
    draft.emit(_EVENT[reason], said)


def failed(draft: Draft, view: AttemptView) -> Failure | None:
    """A failure of the ranks' own; None for what was done to their pods, by this request or a drain."""
    request = draft.status.yield_request
    if request is not None and not request.joined:
        return None
    return min((item for item in failures_of(view) if _is_own(item, view)), key=cause_order, default=None)


def _is_own(failure: Failure, view: AttemptView) -> bool:
    pod = failure.worker.pod
    if pod is None or pod.deletion_at is not None or pod.disruption:
        return False
    # Of a pod that is merely gone nobody knows who took it away.
    return pod.ended or any(pod is item for item in view.present)


def is_move(draft: Draft) -> bool:
    """Whether another attempt follows at once, so that a failure counts as it does while training."""
    request = draft.status.yield_request
    return request is not None and request.reason in (YieldReason.DRAIN, YieldReason.RESIZE)


def over(draft: Draft, view: AttemptView) -> bool:
    """Whether the ranks stopped, cannot stop any more, or had their time; asks them otherwise."""
    if view.all_in(OVER | {Fate.ABSENT, Fate.PENDING}) or first_failure(view) is not None:
        return True
    request = draft.status.yield_request
    if request is not None and not request.joined:
        return True
    asked = draft.status.checkpoint.requested_at or draft.now
    limit = asked + FALLBACK + grace(draft) + SLACK
    if draft.now >= limit:
        draft.emit(
            Reason.YIELD_TIMEOUT,
            f"no checkpoint within {grace(draft).seconds} s: the pods are ended; raise "
            "checkpoint.gracePeriodSeconds above one step plus one checkpoint",
            warning=True,
        )
        return True
    draft.wake(limit)
    state = draft.observed.yielding
    if state is not None and state.attempt == view.number and state.acked_at is not None:
        return False
    refused = state is not None and state.attempt == view.number and state.refused
    pods = [worker.pod for worker in view.workers if worker.fate is Fate.RUNNING and worker.pod is not None]
    if pods and not refused and draft.now < asked + FALLBACK:
        # The engine's ranks tell each other; of a program of the user's own nobody knows.
        others = tuple((pod.name, pod.pod_ip) for pod in pods[1:]) if draft.job.spec.command else ()
        draft.act(RequestYield(attempt=view.number, pod=pods[0].name, pod_ip=pods[0].pod_ip, others=others))
        draft.wake(min(draft.now + timedelta(seconds=2), asked + FALLBACK))
    elif view.count(Fate.RUNNING, Fate.PENDING):
        draft.act(DeleteWorkers(attempt=view.number, grace_s=None))
    return False


def conclude(draft: Draft) -> None:
    """All pods are gone: suspended, back into the queue, or on to the next attempt."""
    request = draft.status.yield_request
    reason = request.reason if request is not None else YieldReason.SUSPEND
    last = draft.status.checkpoint.last
    drop(draft)
    if request is not None and reason in (YieldReason.DRAIN, YieldReason.RESIZE):
        endings.after_move(draft, request)
        return
    kept = f"the newest checkpoint is step {last.step}" if last is not None else "there is no checkpoint"
    phase = Phase.SUSPENDED if reason is YieldReason.SUSPEND else Phase.QUEUED
    draft.set(phase=phase, start_time=None)
    draft.emit(Reason.SUSPENDED, f"attempt {draft.status.attempt} ended; {kept}", warning=last is None)


def drop(draft: Draft) -> None:
    """The request is answered, or the attempt ended in another way."""
    checkpoint = draft.status.checkpoint.model_copy(update={"requested_at": None})
    draft.set(checkpoint=checkpoint, yield_request=None)


def _under_way(draft: Draft) -> YieldRequest | None:
    """A status of before there were several reasons has the time alone."""
    request, asked = draft.status.yield_request, draft.status.checkpoint.requested_at
    if request is None and asked is not None and draft.status.phase is Phase.SUSPENDING:
        return YieldRequest(reason=YieldReason.SUSPEND, requested_at=asked)
    return request


def _joined(draft: Draft) -> bool:
    """Also where no pass saw the ranks meet, because no operator ran then."""
    view = draft.view()
    met = any(pod.ready or pod.ended for pod in view.present) or view.count(Fate.YIELDED, Fate.GOING) > 0
    return draft.status.phase is Phase.RUNNING or met


def grace(draft: Draft) -> timedelta:
    """From the request to SIGKILL, as the pods have it, whatever the spec says by now."""
    shape = draft.status.shape
    kept = shape.grace_period_seconds if shape is not None else None
    return timedelta(seconds=kept if kept is not None else _grace_s(draft.job.spec))


def _grace_s(spec: ZeroTrainingJobSpec) -> int:
    return spec.checkpoint.grace_period_seconds if spec.checkpoint is not None else DEFAULT_GRACE_S


def basis(draft: Draft) -> dict[str, object]:
    """What an attempt that begins now keeps of the spec, as fields of its shape."""
    return {
        "grace_period_seconds": _grace_s(draft.job.spec),
        "generation": draft.job.identity.generation,
        "frozen_hash": frozen_hash(draft.job.spec),
    }


def frozen_hash(spec: ZeroTrainingJobSpec) -> str:
    """Of what changes only while suspended. Without defaults: another version of the operator, with fields
    that this one does not know, must come to the same."""
    kept = spec.model_dump(mode="json", include=FROZEN, exclude=THAWED, exclude_defaults=True)
    # A part of which nothing is frozen is the same as none.
    kept = {name: value for name, value in kept.items() if value not in ({}, None)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _is_outdated(draft: Draft) -> bool:
    """Whether the attempt's pods were made from another spec, of which nobody told them."""
    shape = draft.status.shape
    if shape is None or not shape.frozen_hash or shape.generation == draft.job.identity.generation:
        return False
    return shape.frozen_hash != frozen_hash(draft.job.spec)
