"""Handles of collectives in flight, and their durations: wall clock on the CPU, events on CUDA, read late so
that nothing synchronises."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveSample:
    """One finished collective."""

    op: str
    """`all_gather`, `reduce_scatter` or `broadcast`."""
    label: str
    """Purpose of the collective, usually the unit's name."""
    num_bytes: int
    """Bytes that this rank sent."""
    seconds: float
    """Seconds from its start until its result was needed or ready, whichever came later."""
    exposed_seconds: float
    """Seconds of it during which the caller was blocked: its thread on the CPU, its stream on CUDA, where the
    host goes on."""


class Pending:
    """A collective in flight. `wait()` makes its result usable; a second call does nothing."""

    __slots__ = ("_wait",)

    def __init__(self, wait: Callable[[], None] | None) -> None:
        self._wait = wait

    @classmethod
    def done(cls) -> Pending:
        """Return a collective that needs no waiting."""
        return cls(None)

    def wait(self) -> None:
        """Block (CPU) or make the current stream wait (CUDA) until the result is available."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


class Exchange:
    """Handle of an all-to-all: call `wait`, read `parts`, call `finish`, in this order and once each."""

    def __init__(
        self,
        pending: Pending,
        *,
        parts: Callable[[], Sequence[torch.Tensor]],
        finish: Callable[[], None],
        extra_bytes: int,
    ) -> None:
        self.wait = pending.wait
        """Block (CPU) or make the current stream wait (CUDA) until the parts are available."""
        self.parts = parts
        """Return what every rank sent to this one, in rank order. Read only; one of the parts may alias the
        buffer that was sent."""
        self.finish = finish
        """Declare that the parts have been read and are not needed any more."""
        self.extra_bytes = extra_bytes
        """Bytes that the received parts take until `finish`; 0 if they are read in place on the other
        ranks."""


class Measurement:
    """Times of one collective: call `ask` when its result is needed, and `end` when it is there."""

    __slots__ = ("_asked", "_begin", "_label", "_num_bytes", "_op", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, op: str, label: str, num_bytes: int) -> None:
        self._stopwatch, self._op, self._label, self._num_bytes = stopwatch, op, label, num_bytes
        self._begin = self._asked = stopwatch.now()

    def ask(self) -> None:
        self._asked = self._stopwatch.now()

    def end(self) -> None:
        """Report the sample, on CUDA as soon as the device is so far."""
        end, stopwatch = self._stopwatch.now(), self._stopwatch
        if stopwatch.on_cuda:
            stopwatch.ended.append((self, end))
        else:
            stopwatch.finished(self.sample(end - self._begin, end - self._asked))

    def sample_of_events(self, end: Any) -> CollectiveSample:
        return self.sample(self._begin.elapsed_time(end) / 1e3, self._asked.elapsed_time(end) / 1e3)

    def sample(self, seconds: float, exposed: float) -> CollectiveSample:
        return CollectiveSample(
            op=self._op,
            label=self._label,
            num_bytes=self._num_bytes,
            seconds=seconds,
            exposed_seconds=exposed,
        )


class Stopwatch:
    """Measures collectives, and gives their samples to `finished`."""

    def __init__(self, device: torch.device, finished: Callable[[CollectiveSample], None]) -> None:
        self.on_cuda = device.type == "cuda"
        self.finished = finished
        self.ended: deque[tuple[Measurement, Any]] = deque()
        """Measurements on CUDA with their last events, oldest first."""

    def start(self, op: str, label: str, num_bytes: int) -> Measurement:
        """Begin to measure a collective that was just issued."""
        return Measurement(self, op, label, num_bytes)

    def now(self) -> Any:
        """Return the seconds of the host's clock, or on CUDA an event at this place of the stream."""
        if not self.on_cuda:
            return perf_counter()
        event = _event()
        event.record()
        return event

    def poll(self) -> None:
        """Report the collectives whose events have completed, oldest first."""
        while self.ended and self.ended[0][1].query():
            measurement, end = self.ended.popleft()
            self.finished(measurement.sample_of_events(end))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
