"""The data of a report, independent of its source, and what follows from several attempts together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from zerotrain.contract.history import AttemptHistory, Point


class Tone(StrEnum):
    """Colour of an element. The text always says the same in words."""

    GOOD = "good"
    WAIT = "wait"
    BAD = "bad"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One attempt on the time line, in Unix seconds."""

    attempt: int
    start: float
    end: float
    tone: Tone
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """An event on the time line."""

    time: float
    kind: str
    """Either checkpoint or failure."""
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow:
    """One checkpoint. Empty texts stand for unknown values."""

    step: int
    attempt: str
    time: float | None
    num_bytes: int | None
    seconds: float | None
    state: str
    tone: Tone
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """Memory of one tier of one rank."""

    name: str
    planned: int | None
    measured: int | None
    planned_by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRow:
    """The reason why an attempt ended."""

    attempt: int
    time: float | None
    reason: str
    where: str
    message: str
    way_out: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All data of the page."""

    name: str
    source: str
    """Source of the data: a namespace and cluster, or a folder."""
    state: str
    tone: Tone
    summary: str
    """One or two sentences about the state of the run."""
    facts: tuple[tuple[str, str], ...]
    attempts: tuple[AttemptHistory, ...] = ()
    spans: tuple[Span, ...] = ()
    marks: tuple[Mark, ...] = ()
    checkpoints: tuple[CheckpointRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    failures: tuple[FailureRow, ...] = ()
    conditions: tuple[tuple[str, str, str, str], ...] = ()
    """Type, status, reason and message of each condition."""
    notes: tuple[str, ...] = ()
    """Parts that are missing on the page, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The points of one attempt, cut where a later attempt resumed from."""

    kept: tuple[Point, ...]
    """Points that lead to the job's present state."""
    lost: tuple[Point, ...]
    """Points that a later attempt computed again."""


def curves(attempts: Sequence[AttemptHistory]) -> list[Curve]:
    """Return a curve for every attempt, oldest first, cut at the step that later attempts built on."""
    found = []
    for at, item in enumerate(attempts):
        restarts = [later.record.resumed_from or 0 for later in attempts[at + 1 :] if later.points]
        end = min(restarts, default=None)
        kept = tuple(point for point in item.points if end is None or point.step <= end)
        found.append(Curve(kept=kept, lost=item.points[len(kept) :]))
    return found


def kept_points(attempts: Sequence[AttemptHistory]) -> list[Point]:
    """Return the single sequence of steps that leads to the newest state."""
    return [point for curve in curves(attempts) for point in curve.kept]


def spans_of(attempts: Sequence[AttemptHistory]) -> list[Span]:
    """Return the attempts on the time line, from their own files."""
    spans = []
    for item in attempts:
        times = [item.record.time, *(point.time for point in item.points), *(e.time for e in item.events)]
        ended = next((event.text for event in reversed(item.events) if event.event == "ended"), None)
        good = ended == "stopped in order"
        spans.append(
            Span(
                attempt=item.record.attempt,
                start=item.record.time,
                end=max(times),
                tone=Tone.GOOD if good else Tone.WAIT if ended is None else Tone.BAD,
                text=ended or "no end was written: it still runs, or was killed",
            )
        )
    return spans


def marks_of(attempts: Sequence[AttemptHistory]) -> list[Mark]:
    """Return the checkpoints on the time line."""
    return [
        Mark(time=event.time, kind="checkpoint", attempt=item.record.attempt)
        for item in attempts
        for event in item.events
        if event.event == "checkpoint"
    ]


def memory_of(attempts: Sequence[AttemptHistory]) -> list[MemoryRow]:
    """Return the engine's planned and counted memory, of the newest attempt that took a step."""
    item = next((item for item in reversed(attempts) if item.points), None)
    if item is None:
        return []
    peaks = _peaks(item.points)
    planned = item.record.planned
    names = {
        "engine": ("engine's buffers", "byte formulas"),
        "spill": ("spill file", "byte formulas"),
        "gpu": ("GPU allocator", ""),
        "process": ("process, resident", ""),
    }
    return [
        MemoryRow(
            name=name,
            planned=planned.get(tier) or None,
            measured=peaks.get(tier) or None,
            planned_by=source if planned.get(tier) else "",
        )
        for tier, (name, source) in names.items()
        if planned.get(tier) or peaks.get(tier)
    ]


def totals(attempts: Sequence[AttemptHistory]) -> tuple[float, float]:
    """Return the seconds in steps that count, and in steps that were computed again."""
    lost = (point for curve in curves(attempts) for point in curve.lost)
    return _seconds(kept_points(attempts)), _seconds(lost)


def _seconds(points: Iterable[Point]) -> float:
    return sum(point.seconds for point in points)


def _peaks(points: Iterable[Point]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for point in points:
        for tier, size in point.memory.items():
            peaks[tier] = max(peaks.get(tier, 0), size)
    return peaks
