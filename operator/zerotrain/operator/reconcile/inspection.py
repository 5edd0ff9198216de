"""Inspection of all workers of an attempt whose step no longer advances: which ranks move, and which one does
not.

The poller in `cluster` asks the workers and passes their answers to `inspect`; `hangs` decides on the result.
In synchronous training a rank that stops blocks all others, so the step alone blames no rank. The signs that
identify it, surest first: its pod does not answer, its process is silent, it still runs when those of others
have ended, its step is behind, it is in another phase, or it is the only one that does not wait in a
collective. A rank that has ended no longer hangs: it is not blamed, and does not affect how long the others
may stand still.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from zerotrain.contract.progress import Motion, Phase, Progress
from zerotrain.contract.worker_http import WorkerReport

SILENT_S = 20.0
"""Seconds after which a process is silent; a running process repeats its record every 5 s."""

WAITING_S = 5.0
"""Seconds in a collective after which a rank is held up by another one."""

WARM_UP_STEPS = 10
"""Number of steps after the first one of an attempt before the usual step time is known.

Fewer steps say too little: caches fill, shapes are compiled late, buffers grow.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRank:
    """The rank that blocks the others, or the first of those that may."""

    rank: int
    worker: int
    step: int
    phase: str
    why: str
    """Description of the sign, without numbers that change between inspections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPace:
    """The pace of the ranks that are in one phase."""

    idle_s: float
    """Idle seconds of the rank that moved last."""
    usual_s: float | None = None
    """99th percentile of the step time, or the longest checkpoint, of the slowest rank."""
    longest_s: float | None = None
    """Longest step or checkpoint of the attempt."""
    warms_up: bool = False
    """Whether one of the ranks has made fewer than WARM_UP_STEPS steps after the attempt's first one."""
    first_s: float | None = None
    """Duration of the attempt's first step with compilation; None if the program does not report it
    separately."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """The answers of all workers at about one moment."""

    attempt: int
    at: datetime
    """Time by this operator's clock."""
    step: int = 0
    """Step of the rank that is furthest."""
    paces: Mapping[Phase, RankPace] = field(default_factory=dict)
    """Pace of the ranks by phase; empty if no rank that reports answered, so that nothing can be
    concluded."""
    slow_rank: SlowRank | None = None


def inspect(answers: Mapping[int, WorkerReport | None], *, attempt: int, at: datetime) -> Inspection:
    """Evaluate the workers' answers, by worker; None stands for a worker that was asked and did not
    answer."""
    ranks = {
        rank.rank: (worker, rank)
        for worker, report in answers.items()
        if report is not None
        for rank in report.ranks
        if rank.attempt == attempt and rank.motion is not None and _is_of(rank.rank, worker, report)
    }
    records = [record for _, record in ranks.values()]
    return Inspection(
        attempt=attempt,
        at=at,
        step=max((record.step for record in records), default=0),
        paces=_paces([record for record in records if not _has_ended(record)] or records),
        slow_rank=_slow_rank(answers, ranks) if ranks else None,
    )


def _is_of(rank: int, worker: int, report: WorkerReport) -> bool:
    """Return whether the rank belongs to the worker: a wrong worker must not blame another node."""
    return rank // len(report.ranks) == worker


def _paces(records: Sequence[Progress]) -> dict[Phase, RankPace]:
    paces = {}
    for phase in {record.phase for record in records}:
        motions = [record.motion for record in records if record.phase is phase and record.motion]
        paces[phase] = pace_of(phase, motions)
    return paces


def pace_of(phase: Phase, motions: Sequence[Motion]) -> RankPace:
    """Return the pace of one or more ranks that are in this phase."""
    if phase is Phase.CHECKPOINT:
        longest = _largest(motion.longest_checkpoint_seconds for motion in motions)
        usual = longest
    else:
        longest = _largest(motion.longest_step_seconds for motion in motions)
        usual = _largest(motion.step_p99_seconds for motion in motions)
    return RankPace(
        # An invalid number is no proof of standing still.
        idle_s=min(_sane(motion.idle_seconds) or 0.0 for motion in motions),
        usual_s=usual,
        longest_s=longest,
        warms_up=any(motion.steps_seen < WARM_UP_STEPS for motion in motions),
        first_s=_largest(motion.first_step_seconds for motion in motions),
    )


def _slow_rank(
    answers: Mapping[int, WorkerReport | None], ranks: Mapping[int, tuple[int, Progress]]
) -> SlowRank | None:
    unresponsive = sorted(worker for worker, report in answers.items() if report is None)
    if unresponsive:
        per_worker = max(len(report.ranks) for report in answers.values() if report is not None)
        step = min(record.step for _, record in ranks.values())
        why = f"its pod does not answer{_more(len(unresponsive) - 1, 'pods')}"
        return SlowRank(
            rank=unresponsive[0] * per_worker, worker=unresponsive[0], step=step, phase="", why=why
        )
    records = {rank: record for rank, (_, record) in sorted(ranks.items())}
    found, why = _outliers(records)
    if not found:
        return None
    record = records[found[0]]
    return SlowRank(
        rank=record.rank,
        worker=ranks[record.rank][0],
        step=record.step,
        phase=str(record.phase),
        why=why + _more(len(found) - 1, "ranks"),
    )


def _outliers(records: Mapping[int, Progress]) -> tuple[list[int], str]:
    """Return the ranks that differ from the others by the surest sign, and a description of the sign."""
    running = {rank: record for rank, record in records.items() if not _has_ended(record)}
    silent = [rank for rank, record in running.items() if _silent_s(record) >= SILENT_S]
    if silent:
        return silent, "its process reports nothing, although its launcher answers: it is stopped or blocked"
    # Ranks that wait in a collective may wait for one that ended too early, and so may the other running
    # ranks if they outnumber those that ended.
    left = [rank for rank, record in running.items() if not _waits(record)]
    if left and len(left) <= len(records) - len(running):
        return left, "its process still runs, while those of others have ended"
    return _outliers_by_progress(running) if running else ([], "")


def _outliers_by_progress(records: Mapping[int, Progress]) -> tuple[list[int], str]:
    """Return the ranks that differ in their work, and the sign; all processes in `records` run and answer."""
    furthest = max(record.step for record in records.values())
    behind = [rank for rank, record in records.items() if record.step < furthest]
    if behind:
        slowest = min(records[rank].step for rank in behind)
        return [rank for rank in behind if records[rank].step == slowest], (
            f"it is at step {slowest} while others are at step {furthest}"
        )
    late = [rank for rank, record in records.items() if _has_not_met(record)]
    if late and any(record.phase is Phase.RENDEZVOUS for record in records.values()):
        return late, "it has not joined the rendezvous in which others wait"
    phases = Counter(record.phase for record in records.values())
    common, count = phases.most_common(1)[0]
    others = [rank for rank, record in records.items() if record.phase is not common]
    if others and len(others) < count:
        phase = records[others[0]].phase
        return [rank for rank in others if records[rank].phase is phase], (
            f"it is in phase {phase} while others are in phase {common}"
        )
    busy = [rank for rank, record in records.items() if _sane(record.collective_wait_seconds) == 0.0]
    if busy and any(_waits(record) for record in records.values()):
        return busy, "it does not wait in a collective while others do"
    return [], ""


def _has_not_met(record: Progress) -> bool:
    """Return whether the rank has not come to the rendezvous.

    The phase INIT occurs before and after the rendezvous; after it, the engine knows how long it waits in a
    collective.
    """
    return record.phase is Phase.INIT and record.collective_wait_seconds is None


def _has_ended(record: Progress) -> bool:
    return record.motion is not None and _sane(record.motion.ended_seconds) is not None


def _waits(record: Progress) -> bool:
    return (_sane(record.collective_wait_seconds) or 0.0) >= WAITING_S


def _silent_s(record: Progress) -> float:
    return (_sane(record.motion.silent_seconds) or 0.0) if record.motion is not None else 0.0


def _more(count: int, what: str) -> str:
    return f" (as {count} other {what})" if count > 0 else ""


def _largest(values: Iterable[float | None]) -> float | None:
    return max((sane for value in values if (sane := _sane(value)) is not None), default=None)


def _sane(value: object) -> float | None:
    """Return the number if it is valid; None otherwise. Numbers of the tenant's program are not trusted."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)
