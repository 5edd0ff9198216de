"""From the workers' own records into status: progress of this attempt, the newest durable checkpoint.

Records of another attempt never count: a late answer of a dying pod must not move the job's step.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from zerotrain.contract.progress import CheckpointProgress, Progress
from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.api.status import CheckpointRecord, ProgressStatus
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile.clock import from_unix
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.observe import PodView

HEARTBEAT_WRITE_S = 30
"""A heartbeat alone is written no oftener than this: every status write costs all watchers."""


def merge_progress(draft: Draft) -> None:
    """Take over rank 0's record, and what the ended pods said about their last checkpoint."""
    progress = draft.observed.progress
    current = progress is not None and progress.attempt == draft.status.attempt
    if progress is not None and current:
        _take_progress(draft, progress)
        for damaged in progress.rejected_checkpoints:
            draft.emit(
                Reason.CHECKPOINT_REJECTED,
                f"checkpoint {damaged.path} is damaged and was passed over: {damaged.reason}",
                warning=True,
            )
    candidates = [progress.checkpoint] if progress is not None and current else []
    pods = (*draft.observed.pods, *draft.observed.gone)
    candidates += [_checkpoint_of(pod, draft.status.attempt) for pod in pods]
    _take_checkpoint(draft, [item for item in candidates if item is not None])


def newest_step(status: ZeroTrainingJobStatus) -> int:
    """The furthest step known of the job, for deciding whether an attempt gained anything."""
    durable = status.checkpoint.last.step if status.checkpoint.last is not None else 0
    return max(status.progress.step, durable)


def _take_progress(draft: Draft, progress: Progress) -> None:
    old = draft.status.progress
    new = ProgressStatus(
        attempt=progress.attempt,
        step=progress.step,
        total_steps=progress.total_steps,
        loss=_finite(progress.loss),
        tokens_per_second=_finite(progress.tokens_per_second),
        step_seconds=_finite(progress.step_seconds),
        phase=str(progress.phase),
        last_heartbeat=_moment(progress.heartbeat_at),
        last_step_time=_moment(progress.step_at),
    )
    moved = (new.attempt, new.step, new.phase) != (old.attempt, old.step, old.phase)
    if moved or _elapsed(old.last_heartbeat, new.last_heartbeat) >= timedelta(seconds=HEARTBEAT_WRITE_S):
        draft.set(progress=new)
    if progress.resumed_from != draft.status.checkpoint.resumed_from_step:
        resumed = {"resumed_from_step": progress.resumed_from}
        draft.set(checkpoint=draft.status.checkpoint.model_copy(update=resumed))


def _take_checkpoint(draft: Draft, candidates: list[CheckpointProgress]) -> None:
    if not candidates:
        return
    best = max(candidates, key=lambda item: (item.time, item.step))
    record = CheckpointRecord(step=best.step, path=best.path, time=_moment(best.time), durable=True)
    last = draft.status.checkpoint.last
    # By time, not by step: after a damaged checkpoint the job goes on from an earlier step.
    if last is None or last.time is None or (record.time is not None and record.time > last.time):
        draft.set(checkpoint=draft.status.checkpoint.model_copy(update={"last": record}))


def _checkpoint_of(pod: PodView, attempt: int) -> CheckpointProgress | None:
    if pod.attempt != attempt or pod.termination is None:
        return None
    return pod.termination.checkpoint


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: a diverging loss must not make the whole status unwritable."""
    return value if value is not None and math.isfinite(value) else None


def _moment(unix_s: float) -> datetime | None:
    return from_unix(unix_s).replace(microsecond=0) if unix_s > 0 else None


def _elapsed(earlier: datetime | None, later: datetime | None) -> timedelta:
    if later is None:
        return timedelta(0)
    return later - earlier if earlier is not None else timedelta.max
