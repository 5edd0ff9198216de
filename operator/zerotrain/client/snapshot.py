"""Snapshot of a job and all its ranks: what `zerotrain top` shows, as records without any terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING

from zerotrain.client.errors import ClientError, JobNotFoundError
from zerotrain.client.job import Job
from zerotrain.client.observed import JobProgress
from zerotrain.client.plan_text import used_tiers
from zerotrain.contract.progress import Progress
from zerotrain.contract.text import printable
from zerotrain.operator.api.hangs import HangStatus
from zerotrain.operator.api.memory_plan import MemoryPeaks

if TYPE_CHECKING:
    from zerotrain.client.reading import JobReader

ASK_AGAIN_S = 30.0

KEPT = "the workers did not answer: these are the values in the job's status"

STILL_S = 30.0
"""Seconds without a change of its record after which a rank is shown as standing still."""


class Mark(StrEnum):
    """Finding about a rank."""

    FINE = ""
    SLOW = "straggler"
    STILL = "no progress"
    SILENT = "silent"
    ACCUSED = "holds all up"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """One rank at this moment."""

    rank: int
    pod: str
    node: str
    phase: str
    step: int
    step_seconds: float | None
    waits_s: float | None
    """Seconds spent in a collective, waiting for the other ranks."""
    idle_s: float | None
    """Seconds since its step or phase last changed."""
    gpu_bytes: int
    host_bytes: int
    spill_bytes: int
    mark: Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class TierRow:
    """One tier of a rank's memory: the largest use by any rank, against the plan."""

    tier: str
    planned: int | None
    taken: int

    @property
    def share(self) -> float | None:
        return self.taken / self.planned if self.planned else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A job, and its ranks as far as they could be read."""

    time: datetime
    job: Job
    rows: tuple[RankRow, ...] = ()
    problem: str = ""
    """Reason why there are no ranks, or not all."""
    is_kept: bool = False
    """Whether the rows are what the operator keeps in the job's status, because no worker could be called."""

    @property
    def tiers(self) -> tuple[TierRow, ...]:
        """Return the tiers that the plan or a rank reports."""
        plan = self.job.memory_plan
        planned = {name: amount for name, amount, _ in used_tiers(plan)} if plan is not None else {}
        taken = {
            "gpu": max((row.gpu_bytes for row in self.rows), default=0),
            "host": max((row.host_bytes for row in self.rows), default=0),
            "nvme": max((row.spill_bytes for row in self.rows), default=0),
        }
        # On CPUs, a rank reports its resident size as its device memory.
        if "gpu" not in planned and taken["gpu"] == taken["host"]:
            taken["gpu"] = 0
        return tuple(
            TierRow(tier=tier, planned=planned.get(tier), taken=amount)
            for tier, amount in taken.items()
            if amount or planned.get(tier)
        )

    @property
    def slowest(self) -> RankRow | None:
        """Return the rank to look at: marked, or else behind, or else with the longest steps."""
        return max(
            self.rows,
            key=lambda row: (row.mark is not Mark.FINE, -row.step, row.step_seconds or 0.0),
            default=None,
        )


class SnapshotPoller:
    """Sequence of snapshots of one job. Unreachable workers are called again after a while only: each of
    those calls may last until the API server's timeout."""

    def __init__(self, reader: JobReader, name: str) -> None:
        self._reader, self._name = reader, name
        self._last: Snapshot | None = None
        self._again_at = 0.0

    def take(self) -> Snapshot:
        """Take a snapshot as the function `take` does."""
        last = self._last
        if last is not None and last.is_kept and time.monotonic() < self._again_at:
            job, now = self._reader.get(self._name), datetime.now(UTC)
            if job.attempt == last.job.attempt and (rows := tuple(kept_rows(job, now))):
                return replace(last, time=now, job=job, rows=rows)
        self._last = take(self._reader, self._name)
        self._again_at = time.monotonic() + ASK_AGAIN_S
        return self._last


def take(reader: JobReader, name: str) -> Snapshot:
    """Request the job and the reports of its workers; if no worker answers, show what the job's status keeps.
    Raises ClientError if the job itself cannot be read."""
    job, now = reader.get(name), datetime.now(UTC)
    if job.is_finished or job.phase in ("Suspended", "Queued", "Stalled"):
        return Snapshot(time=now, job=job, problem=f"no ranks run: the job is {job.phase}")
    try:
        progress = reader.progress(name)
        nodes = {pod.name: pod.node for pod in reader.pods(name)}
    except JobNotFoundError:
        raise
    except ClientError as error:
        reason = "; ".join(part for part in (KEPT, str(error), error.next_step) if part)
        rows = tuple(kept_rows(job, now))
        reason = reason if rows else reason.removeprefix(f"{KEPT}; ")
        problem = printable(" ".join(reason.split()))
        return Snapshot(time=now, job=job, rows=rows, problem=problem, is_kept=bool(rows))
    silent = [f"{pod} does not answer: {why}" for pod, why in list(progress.silent.items())[:1]]
    return Snapshot(
        time=now, job=job, rows=tuple(_rows(job, progress, nodes)), problem=printable("; ".join(silent))
    )


def kept_rows(job: Job, now: datetime) -> Iterator[RankRow]:
    """Iterate over rank 0 as last reported to the operator, and the ranks that the operator names. This is
    incomplete, but needs no connection to the workers."""
    if not job.ranks.ready or job.status.progress.attempt != job.attempt:
        return
    named = {
        item.rank: (mark, item)
        for mark, item in ((Mark.SLOW, job.straggler), (Mark.ACCUSED, job.hang))
        if item is not None and item.rank is not None and item.attempt == job.attempt
    }
    observed = (job.memory_plan.observed if job.memory_plan else None) or MemoryPeaks()
    for rank in sorted({0, *named}):
        mark, culprit = named.get(rank, (Mark.FINE, None))
        is_first = rank == 0
        hang = culprit if isinstance(culprit, HangStatus) else None
        pod = f"{job.name}-{job.attempt}-{rank // job.ranks_per_worker}"
        yield RankRow(
            rank=rank,
            pod=culprit.pod or pod if culprit else pod,
            node=culprit.node if culprit else "",
            phase=job.activity if is_first else (hang.phase if hang else "") or "-",
            step=job.step if is_first or hang is None else hang.step or job.step,
            step_seconds=job.step_seconds if is_first else None,
            waits_s=None,
            idle_s=(now - job.last_step_time).total_seconds() if is_first and job.last_step_time else None,
            gpu_bytes=observed.gpu_bytes or 0 if is_first else 0,
            host_bytes=observed.host_bytes or 0 if is_first else 0,
            spill_bytes=observed.nvme_bytes or 0 if is_first else 0,
            mark=mark,
        )


def _rows(job: Job, progress: JobProgress, nodes: dict[str, str]) -> Iterator[RankRow]:
    pod_of = {rank.rank: pod for pod, report in progress.reports.items() for rank in report.ranks}
    slow = next((rank.straggler.rank for rank in progress.ranks if rank.straggler is not None), None)
    for record in progress.ranks:
        pod = pod_of[record.rank]
        motion = record.motion
        yield RankRow(
            rank=record.rank,
            pod=pod,
            node=nodes.get(pod, ""),
            phase=str(record.phase),
            step=record.step,
            step_seconds=record.step_seconds,
            waits_s=record.collective_wait_seconds,
            idle_s=motion.idle_seconds if motion is not None else None,
            gpu_bytes=record.memory_peak_bytes,
            host_bytes=record.host_peak_bytes,
            spill_bytes=record.spill_peak_bytes,
            mark=_mark(job, record, slow),
        )


def _mark(job: Job, record: Progress, slow: int | None) -> Mark:
    hang, straggler, motion = job.hang, job.straggler, record.motion
    if hang is not None and hang.attempt == job.attempt and hang.rank == record.rank:
        return Mark.ACCUSED
    if motion is not None and motion.silent_seconds > STILL_S:
        return Mark.SILENT
    if motion is not None and motion.idle_seconds > STILL_S and record.collective_wait_seconds == 0:
        return Mark.STILL
    named = straggler is not None and straggler.attempt == job.attempt and straggler.rank == record.rank
    if named or (straggler is None and slow == record.rank):
        return Mark.SLOW
    return Mark.FINE
