"""The thread that writes to one tracker, and its bounded queue: a tracker that hangs or fails costs points,
never steps."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from zerotrain.runtime.trackers.sinks import Sink, Values

logger = logging.getLogger("zerotrain")

MAX_WAITING = 1000
"""Points that wait for a tracker; beyond it new ones are dropped."""

FLUSH_AFTER_S = 1.0
"""Time without a new point after which written ones are made visible."""

Point = tuple[int, Values]


class TrackerWriter:
    """Writer of one tracker. `put` returns at once, `close` after at most the time that it is given."""

    def __init__(
        self, name: str, open_sink: Callable[[int], Sink], *, max_waiting: int = MAX_WAITING
    ) -> None:
        """`open_sink` gets the step of the first point; the thread calls it, again after a failure."""
        self.dropped = 0
        """Points that the tracker did not take."""
        self._name = name
        self._open_sink = open_sink
        self._sink: Sink | None = None
        self._waiting: queue.Queue[Point | None] = queue.Queue(max_waiting)
        self._has_noted = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"zerotrain-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Values) -> None:
        """Queue the numbers of a step, or drop them where too many wait."""
        try:
            self._waiting.put_nowait((step, values))
        except queue.Full:
            self._drop(f"it has not taken the last {self._waiting.maxsize} points")

    def close(self, timeout_s: float) -> None:
        """Write what waits and end the run, unless the tracker takes too long."""
        self._closing.set()
        with suppress(queue.Full):  # else the thread sees the event after what waits
            self._waiting.put_nowait(None)
        self._thread.join(max(timeout_s, 0.0))

    def _drop(self, reason: str) -> None:
        with self._lock:
            self.dropped += 1
            is_first, self._has_noted = not self._has_noted, True
        if is_first:
            logger.warning(
                "tracker %s: a point is left out, and others may be: %s. Training goes on; "
                "zerotrain_tracker_dropped_points_total counts them",
                self._name,
                reason,
            )

    def _run(self) -> None:
        is_dirty = False
        while True:
            try:
                point = self._waiting.get(timeout=FLUSH_AFTER_S)
            except queue.Empty:
                if is_dirty:
                    self._try("flush")
                    is_dirty = False
                if self._closing.is_set():
                    break
                continue
            if point is None:
                break
            is_dirty = True
            self._write(*point)
        self._try("close")

    def _write(self, step: int, values: Values) -> None:
        # A library may raise anything; SystemExit of one must not end this thread silently, either.
        try:
            if self._sink is None:
                self._sink = self._open_sink(step)
            self._sink.write(step, values)
        except (Exception, SystemExit) as error:
            self._drop(f"{type(error).__name__}: {error}")

    def _try(self, method: str) -> None:
        if self._sink is None:
            return
        try:
            getattr(self._sink, method)()
        except (Exception, SystemExit) as error:
            logger.warning("tracker %s: %s failed: %s: %s", self._name, method, type(error).__name__, error)
