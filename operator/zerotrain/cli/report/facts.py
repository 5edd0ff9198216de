"""What a report is made of, wherever it comes from, and what follows from several attempts together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from zerotrain.contract.history import AttemptHistory, Point


class Tone(StrEnum):
    """How a thing looks; the text always says the same in words."""

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
    """A moment on the time line."""

    time: float
    kind: str
    """checkpoint or failure."""
    attempt: int
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow:
    """One checkpoint; empty texts are not known."""

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
    """One tier of one rank."""

    name: str
    planned: int | None
    measured: int | None
    planned_by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRow:
    """Why an attempt ended."""

    attempt: int
    time: float | None
    reason: str
    where: str
    message: str
    way_out: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything on the page."""

    name: str
    source: str
    """Where it was read: a namespace and cluster, or a folder."""
    state: str
    tone: Tone
    summary: str
    """One or two sentences: how it stands."""
    facts: tuple[tuple[str, str], ...]
    attempts: tuple[AttemptHistory, ...] = ()
    spans: tuple[Span, ...] = ()
    marks: tuple[Mark, ...] = ()
    checkpoints: tuple[CheckpointRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    failures: tuple[FailureRow, ...] = ()
    conditions: tuple[tuple[str, str, str, str], ...] = ()
    """Type, status, reason, message."""
    notes: tuple[str, ...] = field(default=())
    """What is missing on the page, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The points of one attempt, cut where a later attempt began again."""

    attempt: int
    kept: tuple[Point, ...]
    """They lead to the state that the job has now."""
    lost: tuple[Point, ...]
    """Done again by a later attempt."""


def curves(attempts: Sequence[AttemptHistory]) -> list[Curve]:
    """Every attempt, oldest first; of each, what later attempts built on."""
    found = []
    for at, item in enumerate(attempts):
        restarts = [later.record.resumed_from or 0 for later in attempts[at + 1 :] if later.points]
        end = min(restarts, default=None)
        kept = tuple(point for point in item.points if end is None or point.step <= end)
        found.append(Curve(attempt=item.record.attempt, kept=kept, lost=item.points[len(kept) :]))
    return found


def kept_points(attempts: Sequence[AttemptHistory]) -> list[Point]:
    """The one line of steps that leads to the newest state."""
    return [point for curve in curves(attempts) for point in curve.kept]


def spans_of(attempts: Sequence[AttemptHistory]) -> list[Span]:
    """Attempts on the time line, as their own files tell."""
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
    """Checkpoints on the time line."""
    return [
        Mark(time=event.time, kind="checkpoint", attempt=item.record.attempt, text=f"step {event.step}")
        for item in attempts
        for event in item.events
        if event.event == "checkpoint"
    ]


def memory_of(attempts: Sequence[AttemptHistory]) -> list[MemoryRow]:
    """Of the newest attempt that took a step: the engine's formulas against its own count."""
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
    """Seconds in steps that count, and in steps that were done again."""
    found = curves(attempts)
    return _seconds(found_kept(found)), _seconds(point for curve in found for point in curve.lost)


def found_kept(found: Iterable[Curve]) -> list[Point]:
    """The kept points of all curves."""
    return [point for curve in found for point in curve.kept]


def _seconds(points: Iterable[Point]) -> float:
    return sum(point.seconds for point in points)


def _peaks(points: Iterable[Point]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for point in points:
        for tier, size in point.memory.items():
            peaks[tier] = max(peaks.get(tier, 0), size)
    return peaks
