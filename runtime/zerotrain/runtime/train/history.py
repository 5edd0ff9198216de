"""Writer of an attempt's history (`contract.history`) on rank 0, beside the checkpoints.

The file may be on a volume that is slow, full or gone. Therefore a dedicated thread writes; only the end of
the process waits for it, for a bounded time. A failure to write is logged once, and the rest of the history
is left out; training goes on. Lines are appended whole, so a kill leaves at most one torn line, which readers
skip.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zerotrain.contract.history import (
    HISTORY_DIR,
    MAX_EVENTS,
    MAX_FILES,
    MAX_POINTS,
    AttemptRecord,
    Event,
    Point,
    file_name,
    files_of,
    halved,
    to_line,
)
from zerotrain.contract.progress import Progress
from zerotrain.contract.worker_environment import LaunchSpec
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.step import StepResult

WRITE_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 2.0
MAX_WAITING = 20_000
"""Largest number of records that wait for an unresponsive volume; the oldest are dropped beyond it."""


class HistoryWriter:
    """History of this attempt. All methods return at once (`close` after at most its timeout), and do nothing
    after `close`."""

    def __init__(self, folder: Path, record: AttemptRecord, *, say: Callable[[str], None]) -> None:
        """`say` gets one line if the history cannot be written."""
        self._file = HistoryFile(folder, record)
        self._say = say
        self._waiting: deque[Point | Event] = deque(maxlen=MAX_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerotrain-history", daemon=True)
        self._thread.start()

    def add(self, item: Point | Event) -> None:
        """Queue a step or an event for the file."""
        self._waiting.append(item)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the queued records, unless the volume takes too long."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._file.start()
            while not self._closing.wait(WRITE_INTERVAL_S):
                self._file.extend(self._taken())
            self._file.extend(self._taken())
            self._file.finish()
        except OSError as error:
            self._say(f"the history of this attempt is not kept from here on: {error}")

    def _taken(self) -> list[Point | Event]:
        return [self._waiting.popleft() for _ in range(len(self._waiting))]


class HistoryFile:
    """The history file, kept bounded by merging neighbouring points when it is full. Methods raise
    OSError."""

    def __init__(self, folder: Path, record: AttemptRecord, *, max_points: int = MAX_POINTS) -> None:
        self._folder = folder
        self._path = folder / file_name(record.attempt, record.job_uid)
        self._record = record
        self._max_points = max_points
        self._points: list[Point] = []
        self._events: list[Event] = []
        self._stride = 1
        """Steps of one point."""
        self._open_point: Point | None = None
        """Point that has fewer steps than `_stride` so far."""

    def start(self) -> None:
        """Remove the oldest files beyond the limit and write the first line."""
        self._folder.mkdir(parents=True, exist_ok=True)
        by_age = sorted(files_of(self._folder), key=lambda path: path.stat().st_mtime)
        for old in by_age[: -(MAX_FILES - 1)]:
            old.unlink(missing_ok=True)
        self._rewrite()

    def extend(self, items: Sequence[Point | Event]) -> None:
        """Append complete records; a point with too few steps is kept back."""
        lines = [to_line(item) for given in items for item in self._taken_in(given)]
        if len(self._points) >= self._max_points or len(self._events) > MAX_EVENTS:
            self._merge()
            self._rewrite()
        elif lines:
            self._append(lines)

    def finish(self) -> None:
        """Append the last point, complete or not."""
        if self._open_point is not None:
            point, self._open_point = self._open_point, None
            self._append([to_line(point)])

    def _taken_in(self, item: Point | Event) -> list[Point | Event]:
        if isinstance(item, Event):
            self._events.append(item)
            return [item]
        joined = item if self._open_point is None else self._open_point.merged(item)
        if joined.steps < self._stride:
            self._open_point = joined
            return []
        self._open_point = None
        self._points.append(joined)
        return [joined]

    def _merge(self) -> None:
        while len(self._points) >= self._max_points:
            self._points = halved(self._points)
            self._stride *= 2
        del self._events[:-MAX_EVENTS]

    def _rewrite(self) -> None:
        """Replace the file atomically: a reader sees the old file or the new one."""
        lines = [to_line(self._record), *map(to_line, self._points), *map(to_line, self._events)]
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        with partial.open("w") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)

    def _append(self, lines: Sequence[str]) -> None:
        # One write: lines of two writers, or of one that was killed, are never mixed within a line.
        with self._path.open("ab", buffering=0) as file:
            file.write("".join(lines).encode())


def open_history(
    launch: LaunchSpec,
    engine: Engine,
    *,
    total_steps: int,
    resumed_from: int | None,
    batch: str,
    say: Callable[[str], None],
) -> HistoryWriter | None:
    """Return the writer for this attempt on rank 0; None on every other rank. Call it after the resume, so
    that the record contains it. `batch`: the samples of a step, for people."""
    place = launch.checkpoint_dir or launch.run_dir
    # Without a launcher the scratch folder does not exist, and this function must not make it.
    if engine.rank != 0 or (launch.checkpoint_dir is None and not place.is_dir()):
        return None
    status = engine.memory_status()
    record = AttemptRecord(
        attempt=launch.attempt,
        job=launch.job,
        job_uid=launch.job_uid,
        time=time.time(),
        world_size=launch.world_size,
        total_steps=total_steps,
        resumed_from=resumed_from,
        facts={
            "ZeRO stage": str(engine.config.zero.stage),
            "precision": engine.config.precision.compute_dtype,
            "device": engine.device.type,
            "collectives": engine.comm.transport,
            "batch": batch,
        },
        planned={
            "engine": status.planned_peak_bytes + status.planned_host_bytes,
            "spill": status.planned_disk_bytes,
        },
    )
    return HistoryWriter(place / HISTORY_DIR, record, say=say)


def event(
    name: str, *, step: int, seconds: float | None = None, num_bytes: int | None = None, text: str = ""
) -> Event:
    """Return an event with the present time."""
    return Event(event=name, step=step, time=time.time(), seconds=seconds, num_bytes=num_bytes, text=text)


def step_point(
    result: StepResult,
    *,
    mean_loss: float,
    seconds: float,
    tokens: int,
    phases: Mapping[str, float],
    engine: Engine,
    progress: Progress,
) -> Point:
    """Return the point of one step; values that are not finite are counted instead of kept. `progress`: after
    the step."""
    loss = mean_loss if math.isfinite(mean_loss) else None
    norm = result.grad_norm if math.isfinite(result.grad_norm) else None
    memory = {
        "gpu": progress.memory_peak_bytes if engine.device.type != "cpu" else 0,
        "process": progress.host_peak_bytes,
        "engine": engine.memory.peak_bytes(),
        "spill": progress.spill_peak_bytes,
    }
    return Point(
        step=result.step,
        time=time.time(),
        loss=loss,
        loss_low=loss,
        loss_high=loss,
        grad_norm=norm,
        grad_norm_high=norm,
        nonfinite=int(loss is None or norm is None),
        skipped=int(result.skipped),
        learning_rate=result.lr,
        loss_scale=result.loss_scale,
        seconds=seconds,
        tokens=tokens,
        phases=phases,
        memory={tier: size for tier, size in memory.items() if size},
    )
