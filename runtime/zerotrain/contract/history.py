"""The history of a job: the results of every step, kept beside its checkpoints for `zerotrain report`.

There is one file of JSON lines per attempt in the folder HISTORY_DIR of the job's checkpoint folder: first
the attempt itself, then points (a step, or several that were merged) and events. Only rank 0 of an attempt
writes its file, so a fenced attempt cannot disturb its successor's. A file holds only numbers, no text of the
training data. The writer is `runtime.train.history`; the launcher serves the same lines. Readers use the
lines that they understand and count the others, as the file may be torn and its author is the tenant's
program.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from zerotrain.contract.regular_file import open_regular
from zerotrain.contract.strict_json import strict_json

HISTORY_DIR = "history"
VERSION = 1

MAX_POINTS = 2048
"""Points of one attempt.

A file that reaches the limit merges neighbours to half as many.
"""
MIN_POINTS = 16
"""Points that an attempt keeps in a text that must get shorter."""
MAX_EVENTS = 512
MAX_FILES = 64
"""Attempts that are kept; the oldest are deleted first."""
MAX_FILE_BYTES = 4 << 20
MAX_LINE_CHARS = 8192
MAX_TEXT_CHARS = 300
MAX_NUMBER = 1e30
"""Value that replaces larger numbers, because no axis can be drawn for them."""
MAX_NAMES = 16
"""Entries of one mapping (phases, tiers)."""
MAX_ANSWER_BYTES = 4 << 20
"""Largest answer of a launcher's GET /history."""

_FILE_NAME = re.compile(r"attempt-(\d{6,9})-[0-9A-Za-z]{1,8}\.jsonl")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One step, or several neighbours merged.

    Seconds and tokens are sums, peaks are maxima, and unless stated otherwise the rest is the mean of the
    merged steps.
    """

    step: int
    """Last of the steps."""
    steps: int = 1
    time: float = 0.0
    """Unix seconds at the end of the last one."""
    loss: float | None = None
    """Mean of the finite losses; None if there was none."""
    loss_low: float | None = None
    loss_high: float | None = None
    grad_norm: float | None = None
    grad_norm_high: float | None = None
    nonfinite: int = 0
    """Number of steps whose loss or gradient norm was NaN or infinite."""
    skipped: int = 0
    learning_rate: float | None = None
    """Learning rate of the last step."""
    loss_scale: float | None = None
    """Loss scale of the last step."""
    seconds: float = 0.0
    tokens: int = 0
    """Tokens of all ranks."""
    flops: float = 0.0
    """Floating-point operations of the model on all ranks, by formula; 0 = not known."""
    peak_flops: float = 0.0
    """Operations that the devices could do in these seconds at their peak; 0 = not known."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, of rank 0."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Peak bytes by tier, of rank 0."""

    def merged(self, later: Point) -> Point:
        """Return one point for this and a later point."""
        first, second = self.steps, later.steps
        return Point(
            step=later.step,
            steps=first + second,
            time=later.time,
            loss=_mean(self.loss, first, later.loss, second),
            loss_low=_least(self.loss_low, later.loss_low),
            loss_high=_most(self.loss_high, later.loss_high),
            grad_norm=_mean(self.grad_norm, first, later.grad_norm, second),
            grad_norm_high=_most(self.grad_norm_high, later.grad_norm_high),
            nonfinite=self.nonfinite + later.nonfinite,
            skipped=self.skipped + later.skipped,
            learning_rate=later.learning_rate,
            loss_scale=later.loss_scale,
            seconds=self.seconds + later.seconds,
            tokens=self.tokens + later.tokens,
            flops=self.flops + later.flops,
            peak_flops=self.peak_flops + later.peak_flops,
            phases=_added(self.phases, later.phases),
            memory=_largest(self.memory, later.memory),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An event between steps."""

    event: str
    """One of resumed, checkpoint, checkpoint_failed, rejected, ended."""
    step: int
    time: float
    seconds: float | None = None
    num_bytes: int | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """The first line of a file, with the values that are fixed for the attempt."""

    attempt: int
    job: str
    job_uid: str = ""
    time: float = 0.0
    """Time at which the engine was ready."""
    world_size: int = 1
    total_steps: int = 0
    resumed_from: int | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts for the user, such as ZeRO stage, precision and device."""
    planned: Mapping[str, int] = field(default_factory=dict)
    """Planned bytes per rank by the engine's formulas, by tier: engine, host, spill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptHistory:
    """Content of one file."""

    record: AttemptRecord
    points: tuple[Point, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def last_step(self) -> int:
        return self.points[-1].step if self.points else self.record.resumed_from or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All attempts, oldest first."""

    attempts: tuple[AttemptHistory, ...] = ()
    unreadable: int = 0
    """Number of lines that were skipped."""


_KINDS: dict[str, type[AttemptRecord | Point | Event]] = {
    "attempt": AttemptRecord,
    "point": Point,
    "event": Event,
}
_DEFAULTS = {kind: [(part.name, part.default) for part in fields(kind)] for kind in _KINDS.values()}


def file_name(attempt: int, job_uid: str) -> str:
    """Return the name of an attempt's file.

    The UID distinguishes jobs that used the same name and folder one after the other.
    """
    plain = re.sub(r"[^0-9A-Za-z]", "", job_uid)[:8] or "none"
    return f"attempt-{attempt:06d}-{plain}.jsonl"


def to_line(item: AttemptRecord | Point | Event) -> str:
    """Return one line with a JSON object that omits values at their default."""
    kind = {AttemptRecord: "attempt", Point: "point", Event: "event"}[type(item)]
    kept = {}
    for name, default in _DEFAULTS[type(item)]:
        value = _plain(getattr(item, name))
        if value != {} and value != default:
            kept[name] = value
    version = {"version": VERSION} if kind == "attempt" else {}
    return json.dumps({"kind": kind, **version, **kept}, separators=(",", ":"), allow_nan=False) + "\n"


def read_lines(lines: Iterable[str]) -> History:
    """Parse the lines of files in sequence, each beginning with its attempt.

    Raises nothing: lines that are no record are counted.
    """
    attempts: list[AttemptHistory] = []
    record: AttemptRecord | None = None
    points: list[Point] = []
    events: list[Event] = []
    unreadable = 0
    for line in lines:
        item = _parsed(line)
        if item is None or (record is None and not isinstance(item, AttemptRecord)):
            unreadable += bool(line.strip())
        elif isinstance(item, AttemptRecord):
            if record is not None:
                attempts.append(_attempt(record, points, events))
            record, points, events = item, [], []
        elif isinstance(item, Point):
            points.append(item)
        else:
            events.append(item)
    if record is not None:
        attempts.append(_attempt(record, points, events))
    ordered = sorted(attempts, key=lambda item: (item.record.time, item.record.attempt))
    return History(attempts=tuple(ordered), unreadable=unreadable)


def read_folder(folder: Path, *, job_uid: str | None = None) -> History:
    """Return the content of a job's HISTORY_DIR; empty if the folder does not exist.

    Only attempts of `job_uid` are kept unless it is None. Raises nothing: a file that cannot be read counts
    as one unreadable line.
    """
    lines, failed = list[str](), 0
    for path in files_of(folder):
        try:
            lines += _text(path).splitlines()
        except OSError:
            failed += 1
    found = read_lines(lines)
    kept = [item for item in found.attempts if job_uid is None or item.record.job_uid == job_uid]
    return History(attempts=tuple(kept), unreadable=found.unreadable + failed)


def files_of(folder: Path) -> list[Path]:
    """Return the history files, oldest attempt first."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if _FILE_NAME.fullmatch(name)]


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """Merge neighbours until at most `limit` points are left."""
    kept = list(points)
    while len(kept) > max(1, limit):
        kept = halved(kept)
    return kept


def halved(points: Sequence[Point]) -> list[Point]:
    """Merge each pair into one point; an odd last point is kept."""
    pairs = [points[at].merged(points[at + 1]) for at in range(0, len(points) - 1, 2)]
    return [*pairs, *points[len(pairs) * 2 :]]


def history_lines(history: History, *, max_bytes: int = MAX_ANSWER_BYTES) -> list[str]:
    """Return the history as lines of at most `max_bytes`.

    Points lose resolution first, then old attempts are removed.
    """
    attempts = [(item, list(item.points)) for item in history.attempts]
    while True:
        lines = [line for item, points in attempts for line in _lines_of(item, points)]
        if sum(map(len, lines)) <= max_bytes or not attempts:
            return lines
        if any(len(points) > MIN_POINTS for _, points in attempts):
            attempts = [
                (item, thinned(points, max(MIN_POINTS, len(points) // 2))) for item, points in attempts
            ]
        else:
            attempts = attempts[len(attempts) // 2 + 1 :]


def _lines_of(item: AttemptHistory, points: Sequence[Point]) -> Iterator[str]:
    yield to_line(item.record)
    yield from map(to_line, points)
    yield from map(to_line, item.events)


def _text(path: Path) -> str:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(MAX_FILE_BYTES).decode("utf-8", errors="replace")


def _attempt(record: AttemptRecord, points: list[Point], events: list[Event]) -> AttemptHistory:
    return AttemptHistory(
        record=record, points=tuple(thinned(points, MAX_POINTS)), events=tuple(events[-MAX_EVENTS:])
    )


def _parsed(line: str) -> AttemptRecord | Point | Event | None:
    if len(line) > MAX_LINE_CHARS:
        return None
    try:
        data = strict_json(line, max_bytes=4 * MAX_LINE_CHARS)
        item = _built(_KINDS[data["kind"]], data)
    except (ValueError, TypeError, KeyError):
        return None
    return None if isinstance(item, Point) and item.steps < 1 else item


def _built(cls: type[T], data: Mapping[str, Any]) -> T:
    """Build a record.

    Raises ValueError or TypeError for wrong values; unknown keys belong to later versions.
    """
    values: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]
        if item.name in data:
            values[item.name] = _checked(str(item.type), data[item.name])
    return cls(**values)


def _checked(kind: str, value: Any) -> Any:
    match kind:
        case "int" | "int | None":
            return _whole(value)
        case "float" | "float | None":
            return _number(value)
        case "Mapping[str, str]":
            return {_short(name): _short(item) for name, item in _entries(value)}
        case "Mapping[str, int]":
            return {_short(name): _whole(item) for name, item in _entries(value)}
        case "Mapping[str, float]":
            return {_short(name): _number(item) for name, item in _entries(value)}
    return _short(value)


def _entries(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict) or len(value) > MAX_NAMES:
        raise ValueError(f"must be an object of at most {MAX_NAMES} entries")
    return list(value.items())


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError("must be a whole number of 0 to 2^63")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("must be a finite number")
    return float(max(-MAX_NUMBER, min(MAX_NUMBER, value)))


def _short(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value[:MAX_TEXT_CHARS]


def _plain(value: Any) -> Any:
    """Convert a value for JSON, which has no NaN and infinity. Seven digits of a number are enough."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) and abs(value) < 1e9 else _large(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value[:MAX_TEXT_CHARS] if isinstance(value, str) else value


def _large(value: float) -> float | None:
    """Round a large number to three decimals, so that Unix times keep their milliseconds."""
    return round(value, 3) if math.isfinite(value) else None


def _mean(first: float | None, weight: int, second: float | None, other: int) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return (first * weight + second * other) / (weight + other)


def _least(first: float | None, second: float | None) -> float | None:
    return min((value for value in (first, second) if value is not None), default=None)


def _most(first: float | None, second: float | None) -> float | None:
    return max((value for value in (first, second) if value is not None), default=None)


def _added(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


def _largest(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: max(first.get(name, 0), second.get(name, 0)) for name in {**first, **second}}
