"""Progress in status, taken from the workers' records: this attempt's progress, the newest durable
checkpoint, and the peaks of memory next to the memory plan.

Records of another attempt never count: a late answer of a dying pod must not move the job's step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime, timedelta

from zerotrain.contract.progress import (
    MAX_PATH_CHARS,
    MAX_REJECTED,
    CheckpointProgress,
    Progress,
    Termination,
)
from zerotrain.contract.progress import Phase as RankPhase
from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.api.memory_plan import MemoryPeaks
from zerotrain.operator.api.status import CheckpointRecord, ProgressStatus
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile.draft import Draft, moment, stored

STEP_WRITE_S = 10
"""Minimum seconds between two writes that only advance the step: every status write costs all watchers.

A write for another reason includes the step.
"""

HEARTBEAT_WRITE_S = 30
"""Minimum seconds between two writes that only update the heartbeat."""

PEAK_NEWS_PART = 0.02
"""Growth of a peak, as a fraction, from which it is written: allocators creep, and every status write costs
all watchers."""

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")


def merge_progress(draft: Draft) -> None:
    """Store rank 0's record, and what the ended pods reported about their last checkpoint."""
    progress = draft.progress
    if progress is not None:
        _take_progress(draft, progress)
        # Each event is a request to the API server.
        for damaged in progress.rejected_checkpoints[:MAX_REJECTED]:
            draft.emit(
                Reason.CHECKPOINT_REJECTED,
                f"checkpoint {damaged.path} is damaged and was skipped: {damaged.reason}",
                warning=True,
            )
    last_words = _last_words(draft)
    reports: list[Progress | Termination] = [progress] if progress is not None else []
    reports += last_words
    _take_checkpoint(draft, [item.checkpoint for item in reports if item.checkpoint is not None])
    _take_origin(draft, reports)
    _take_last_step(draft, max((words.step for words in last_words), default=0))


def newest_step(status: ZeroTrainingJobStatus) -> int:
    """Return the furthest known step of the job, to decide whether an attempt gained one."""
    durable = status.checkpoint.last.step if status.checkpoint.last is not None else 0
    return max(status.progress.step, durable)


def unsaved_steps(status: ZeroTrainingJobStatus) -> int:
    """Return the number of steps of the current attempt beyond the newest durable checkpoint.

    Clocks of nodes are not used here.
    """
    if status.progress.attempt != status.attempt:
        return 0
    durable = status.checkpoint.last.step if status.checkpoint.last is not None else 0
    return max(0, status.progress.step - durable)


def what_is_kept(draft: Draft) -> str:
    """Return what a job that stops can continue from, as a text."""
    last = draft.status.checkpoint.last
    if last is None:
        return "there is no checkpoint"
    message = f"the newest checkpoint is step {last.step}"
    if unsaved_steps(draft.status):
        message += f", the job was at step {draft.status.progress.step}"
    return message


def _take_progress(draft: Draft, progress: Progress) -> None:
    old, step_at = draft.status.progress, draft.step_at()
    # Until it has loaded its checkpoint a rank knows no step; the old step is shown meanwhile.
    starting = progress.phase in (RankPhase.INIT, RankPhase.RENDEZVOUS) and progress.step == 0
    new = ProgressStatus(
        attempt=progress.attempt,
        step=old.step if starting else _possible(draft, progress.step),
        total_steps=progress.total_steps or old.total_steps,
        loss=_finite(progress.loss, digits=5),
        tokens_per_second=_finite(progress.tokens_per_second, digits=1),
        step_seconds=_finite(progress.step_seconds, digits=4),
        step_flops=_finite(progress.step_flops, digits=0),
        mfu=_finite(progress.mfu, digits=4),
        phase=str(progress.phase),
        last_heartbeat=_moment(progress.heartbeat_at),
        last_step_time=step_at.replace(microsecond=0) if step_at is not None else None,
    )
    draft.set(progress=new)
    draft.progress_is_news = _is_news(old, new)


def _take_origin(draft: Draft, reports: Sequence[Progress | Termination]) -> None:
    """Store where the attempt began, from any of its ranks that reports it: a worker may end before it was
    asked.

    An event is emitted if the checkpoint belongs to another job, e.g. an earlier one of the same name.
    """
    found = next((item for item in reports if item.resumed_from is not None), None)
    if found is None or found.resumed_from is None:
        return
    step, checkpoint = _possible(draft, found.resumed_from), draft.status.checkpoint
    origin = {"resumed_from_step": step, "resumed_from_job": _other_job(draft, found.resumed_job)}
    if (checkpoint.resumed_from_step, checkpoint.resumed_from_job) == tuple(origin.values()):
        return
    draft.set(checkpoint=checkpoint.model_copy(update=origin))
    if origin["resumed_from_job"] is not None:
        draft.emit(
            Reason.CHECKPOINT_OF_ANOTHER_JOB,
            f"attempt {draft.status.attempt} began at step {step}: {origin_of(draft.status)}",
        )


def _other_job(draft: Draft, uid: str | None) -> str | None:
    """Return the value of `resumedFromJob`. The tenant's program reports it; a text that is no UID is not
    passed on."""
    if uid is None or uid == draft.job.identity.uid:
        return None
    return uid if _UID.fullmatch(uid) else ""


def origin_of(status: ZeroTrainingJobStatus) -> str:
    """Return the origin of the checkpoint that the current attempt began with; empty if it was the job's own,
    or none."""
    uid = status.checkpoint.resumed_from_job
    if uid is None:
        return ""
    return (
        f"that checkpoint was written by another job (uid {uid})" if uid else "no job wrote that checkpoint"
    )


def trained_nothing(status: ZeroTrainingJobStatus) -> str:
    """Return why the last attempt of a completed job trained no step; empty if it trained."""
    began = status.checkpoint.resumed_from_step
    if began is None or status.progress.step > began:
        return ""
    origin = origin_of(status)
    return f"it began at step {began}, where no step was left" + (f"; {origin}" if origin else "")


def _is_news(old: ProgressStatus, new: ProgressStatus) -> bool:
    """Return whether the record is worth a status write of its own."""
    if (new.attempt, new.phase, new.total_steps) != (old.attempt, old.phase, old.total_steps):
        return True
    if old.last_step_time is None and new.last_step_time is not None:
        return True
    interval_s = STEP_WRITE_S if new.step != old.step else HEARTBEAT_WRITE_S
    # A node's clock that is set back by hours must not stop the writes for as long.
    return abs(_elapsed(old.last_heartbeat, new.last_heartbeat)) >= timedelta(seconds=interval_s)


def _take_checkpoint(draft: Draft, candidates: list[CheckpointProgress]) -> None:
    if not candidates:
        return
    best = max(candidates, key=lambda item: (item.step, item.time))
    written_at = _moment(best.time)
    record = CheckpointRecord(
        step=_possible(draft, best.step),
        path=stored(best.path, MAX_PATH_CHARS),
        time=min(written_at, draft.stamp) if written_at is not None else None,
        attempt=draft.status.attempt,
        durable=True,
    )
    last = draft.status.checkpoint.last
    # Within an attempt steps only grow. Between attempts neither steps nor times decide: after a damaged
    # checkpoint a job continues from an earlier step, and on a node whose clock is behind.
    if last is None or last.attempt != record.attempt or record.step > last.step:
        draft.set(checkpoint=draft.status.checkpoint.model_copy(update={"last": record}))


def _possible(draft: Draft, step: int) -> int:
    """Return the step, limited to the steps of the job: a wrong number must not outlast its attempt."""
    return max(0, min(step, draft.job.spec.steps or step))


def _take_last_step(draft: Draft, step: int) -> None:
    """Store the last step that ended ranks reported, which may be after the last answer to a poll."""
    step = _possible(draft, step)
    if step > draft.status.progress.step:
        update = {"step": step, "attempt": draft.status.attempt}
        draft.set(progress=draft.status.progress.model_copy(update=update))


def _last_words(draft: Draft) -> list[Termination]:
    """Return the termination messages of the ended workers of this attempt."""
    pods = (*draft.observed.pods, *draft.observed.gone)
    words = [pod.termination for pod in pods if pod.attempt == draft.status.attempt]
    return [item for item in words if item is not None]


def _finite(value: float | None, *, digits: int) -> float | None:
    """Return the value rounded; None if it is not finite.

    JSON has no NaN: a diverging loss must not make the whole status unwritable.
    """
    return round(value, digits) if value is not None and math.isfinite(value) else None


def _moment(unix_s: float) -> datetime | None:
    found = moment(unix_s)
    return found.replace(microsecond=0) if found is not None else None


def _elapsed(earlier: datetime | None, later: datetime | None) -> timedelta:
    if later is None:
        return timedelta(0)
    return later - earlier if earlier is not None else timedelta.max


def observe_peaks(draft: Draft) -> None:
    """Store the highest peaks that rank 0 of this attempt reported, next to the plan."""
    plan, progress = draft.status.memory_plan, draft.progress
    if plan is None or progress is None or progress.memory_peak_bytes <= 0:
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
    return new if old is None or new > old * (1 + PEAK_NEWS_PART) else old
