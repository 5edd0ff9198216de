"""One look at all workers of an attempt whose step went stale: does any rank move, and which one does not?

The puller in `cluster` asks the workers and hands their answers to `inspect`; `hangs` decides on the outcome.
In synchronous training a rank that stops holds up all others, so the step alone accuses nobody. What tells it
from its victims, surest first: its pod does not answer, its process is silent, it runs on when others' have
ended, its step is behind, it is in another phase, or it is the one that does not wait in a collective. A rank
that has ended hangs no more: it is not accused, and says nothing of how long the others may stand still.
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
"""A process that runs repeats its record every 5 s."""

WAITING_S = 5.0
"""A rank that waits in a collective for so long is held up by another one."""

WARM_UP_STEPS = 10
"""After the first one of an attempt. Fewer tell too little of what a step may take: caches fill, shapes are
compiled late, buffers grow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Laggard:
    """The rank that holds up the others, or the first of those that might."""

    rank: int
    worker: int
    step: int
    phase: str
    why: str
    """Without numbers that change from look to look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The ranks that are in one phase."""

    idle_s: float
    """Of the one that moved last."""
    usual_s: float | None = None
    """99th percentile of a step, or the longest checkpoint: the slowest rank's."""
    longest_s: float | None = None
    """Longest step or checkpoint of the attempt."""
    warms_up: bool = False
    """One of them has not yet been seen to do WARM_UP_STEPS steps after the attempt's first."""
    first_s: float | None = None
    """First step of the attempt, compilation included; None where the program does not tell it apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What all workers said at about one moment."""

    attempt: int
    at: datetime
    """Of this operator's clock."""
    step: int = 0
    """Of the rank that is furthest."""
    paces: Mapping[Phase, Pace] = field(default_factory=dict)
    """Empty when no rank that reports answered: then nothing can be said."""
    laggard: Laggard | None = None


def inspect(answers: Mapping[int, WorkerReport | None], *, attempt: int, at: datetime) -> Inspection:
    """Judge the workers' answers by worker; None is a worker that was asked and did not answer."""
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
        laggard=_laggard(answers, ranks) if ranks else None,
    )


def _is_of(rank: int, worker: int, report: WorkerReport) -> bool:
    """A worker speaks for its own ranks: one that is wrong must not accuse another node."""
    return rank // len(report.ranks) == worker


def _paces(records: Sequence[Progress]) -> dict[Phase, Pace]:
    paces = {}
    for phase in {record.phase for record in records}:
        motions = [record.motion for record in records if record.phase is phase and record.motion]
        paces[phase] = pace_of(phase, motions)
    return paces


def pace_of(phase: Phase, motions: Sequence[Motion]) -> Pace:
    """What one or more ranks that are in this phase say of how they move."""
    if phase is Phase.CHECKPOINT:
        longest = _largest(motion.longest_checkpoint_seconds for motion in motions)
        usual = longest
    else:
        longest = _largest(motion.longest_step_seconds for motion in motions)
        usual = _largest(motion.step_p99_seconds for motion in motions)
    return Pace(
        # What is no number is no proof of standing still.
        idle_s=min(_sane(motion.idle_seconds) or 0.0 for motion in motions),
        usual_s=usual,
        longest_s=longest,
        warms_up=any(motion.steps_seen < WARM_UP_STEPS for motion in motions),
        first_s=_largest(motion.first_step_seconds for motion in motions),
    )


def _laggard(
    answers: Mapping[int, WorkerReport | None], ranks: Mapping[int, tuple[int, Progress]]
) -> Laggard | None:
    mute = sorted(worker for worker, report in answers.items() if report is None)
    if mute:
        per_worker = max(len(report.ranks) for report in answers.values() if report is not None)
        step = min(record.step for _, record in ranks.values())
        why = f"its pod does not answer{_more(len(mute) - 1, 'pods')}"
        return Laggard(rank=mute[0] * per_worker, worker=mute[0], step=step, phase="", why=why)
    records = {rank: record for rank, (_, record) in sorted(ranks.items())}
    found, why = _odd_ones(records)
    if not found:
        return None
    record = records[found[0]]
    return Laggard(
        rank=record.rank,
        worker=ranks[record.rank][0],
        step=record.step,
        phase=str(record.phase),
        why=why + _more(len(found) - 1, "ranks"),
    )


def _odd_ones(records: Mapping[int, Progress]) -> tuple[list[int], str]:
    """The ranks that differ from the others in the surest respect, and in which."""
    running = {rank: record for rank, record in records.items() if not _has_ended(record)}
    silent = [rank for rank, record in running.items() if _silent_s(record) >= SILENT_S]
    if silent:
        return silent, "its process says nothing, although its launcher answers: it is stopped or blocked"
    # Who waits in a collective may wait for one that ended too early; so may many for a few.
    left = [rank for rank, record in running.items() if not _waits(record)]
    if left and len(left) <= len(records) - len(running):
        return left, "its process runs on, while those of others have ended"
    return _odd_in_their_work(running) if running else ([], "")


def _odd_in_their_work(records: Mapping[int, Progress]) -> tuple[list[int], str]:
    """The same of ranks whose processes run and answer."""
    furthest = max(record.step for record in records.values())
    behind = [rank for rank, record in records.items() if record.step < furthest]
    if behind:
        slowest = min(records[rank].step for rank in behind)
        return [rank for rank in behind if records[rank].step == slowest], (
            f"it is at step {slowest} while others are at step {furthest}"
        )
    late = [rank for rank, record in records.items() if _has_not_met(record)]
    if late and any(record.phase is Phase.RENDEZVOUS for record in records.values()):
        return late, "it has not come to the rendezvous in which others wait"
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
    """The phase comes twice, before the rendezvous and after it, when the engine knows how long it waits."""
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
    """The numbers are the tenant's program's word."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)
