"""The history of a job: what every step came to, kept beside its checkpoints for `zerotrain report`.

One file of JSON lines per attempt in the folder HISTORY_DIR of the job's checkpoint folder: first the
attempt itself, then points (a step, or several that were merged) and events. A file is written by rank 0 of
its attempt alone, so a fenced attempt cannot disturb its successor's. Numbers only, no text of the training
data. The writer is `runtime.train.history`; the launcher serves the same lines; readers take what they
understand and count what they do not, as the file may be torn and its author is the tenant's program.
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
"""Of one attempt; a file that reaches them merges neighbours to half as many."""
MIN_POINTS = 16
"""An attempt keeps so many in a text that must get shorter."""
MAX_EVENTS = 512
MAX_FILES = 64
"""Attempts that are kept; the oldest go first."""
MAX_FILE_BYTES = 4 << 20
MAX_LINE_CHARS = 8192
MAX_TEXT_CHARS = 300
MAX_NUMBER = 1e30
"""Larger ones read as this: no axis can be drawn for them."""
MAX_NAMES = 16
"""Entries of one mapping (phases, tiers)."""
MAX_ANSWER_BYTES = 4 << 20
"""Of a launcher's GET /history."""

_FILE_NAME = re.compile(r"attempt-(\d{6,9})-[0-9A-Za-z]{1,8}\.jsonl")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One step, or several neighbours merged. Seconds and tokens are sums, peaks are the largest, the rest is
    the mean of the merged steps unless said."""

    step: int
    """Last of the steps."""
    steps: int = 1
    time: float = 0.0
    """Unix seconds at the end of the last one."""
    loss: float | None = None
    """Of the finite ones; None where none was."""
    loss_low: float | None = None
    loss_high: float | None = None
    grad_norm: float | None = None
    grad_norm_high: float | None = None
    nonfinite: int = 0
    """Steps whose loss or gradient norm was NaN or infinite."""
    skipped: int = 0
    learning_rate: float | None = None
    """Of the last step."""
    loss_scale: float | None = None
    """Of the last step."""
    seconds: float = 0.0
    tokens: int = 0
    """Of all ranks."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, of rank 0."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Peak bytes by tier, of rank 0."""

    def merged(self, later: Point) -> Point:
        """Both as one."""
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
            phases=_added(self.phases, later.phases),
            memory=_largest(self.memory, later.memory),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened between steps."""

    event: str
    """resumed, checkpoint, checkpoint_failed, rejected, ended."""
    step: int
    time: float
    seconds: float | None = None
    num_bytes: int | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """First line of a file: what is fixed for the attempt."""

    attempt: int
    job: str
    job_uid: str = ""
    time: float = 0.0
    """When the engine was ready."""
    world_size: int = 1
    total_steps: int = 0
    resumed_from: int | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    """ZeRO stage, precision, device and so on, for people."""
    planned: Mapping[str, int] = field(default_factory=dict)
    """Bytes per rank by the engine's formulas, by tier: engine, host, spill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptHistory:
    """One file."""

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
    """Lines that were passed over."""


_KINDS: dict[str, type[AttemptRecord | Point | Event]] = {
    "attempt": AttemptRecord,
    "point": Point,
    "event": Event,
}
_DEFAULTS = {kind: [(part.name, part.default) for part in fields(kind)] for kind in _KINDS.values()}


def file_name(attempt: int, job_uid: str) -> str:
    """Of an attempt. The UID tells jobs apart that had the same name and folder one after the other."""
    plain = re.sub(r"[^0-9A-Za-z]", "", job_uid)[:8] or "none"
    return f"attempt-{attempt:06d}-{plain}.jsonl"


def to_line(item: AttemptRecord | Point | Event) -> str:
    """One JSON object without what is at its default; ends with a newline."""
    kind = {AttemptRecord: "attempt", Point: "point", Event: "event"}[type(item)]
    kept = {}
    for name, default in _DEFAULTS[type(item)]:
        value = _plain(getattr(item, name))
        if value != {} and value != default:
            kept[name] = value
    version = {"version": VERSION} if kind == "attempt" else {}
    return json.dumps({"kind": kind, **version, **kept}, separators=(",", ":"), allow_nan=False) + "\n"


def read_lines(lines: Iterable[str]) -> History:
    """Files one after the other, each beginning with its attempt. Raises nothing: what is no record is
    counted."""
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
    """What a job's HISTORY_DIR holds, of one job unless `job_uid` is None; empty without one. Raises nothing:
    a file that cannot be read counts as one unreadable line."""
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
    """History files, oldest attempt first."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if _FILE_NAME.fullmatch(name)]


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """Neighbours merged until at most `limit` are left."""
    kept = list(points)
    while len(kept) > max(1, limit):
        kept = halved(kept)
    return kept


def halved(points: Sequence[Point]) -> list[Point]:
    """Pairs as one; an odd last one stays."""
    pairs = [points[at].merged(points[at + 1]) for at in range(0, len(points) - 1, 2)]
    return [*pairs, *points[len(pairs) * 2 :]]


def history_lines(history: History, *, max_bytes: int = MAX_ANSWER_BYTES) -> list[str]:
    """The same as text, of at most so many bytes: points lose resolution first, then old attempts go."""
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
    """Raises ValueError or TypeError for what does not fit; unknown keys are for later versions."""
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
    """JSON has no form for NaN and infinity, and no use for the seventeenth digit."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) and abs(value) < 1e9 else _large(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value[:MAX_TEXT_CHARS] if isinstance(value, str) else value


def _large(value: float) -> float | None:
    """Unix times keep their milliseconds."""
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
