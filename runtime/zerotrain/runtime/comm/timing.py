"""Handles of collectives in flight, and their durations: wall clock on the CPU, events on CUDA, read late so
that nothing synchronises."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

MAX_UNREPORTED = 256
"""Number of measurements on CUDA from which each new one polls the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveSample:
    """One finished collective."""

    op: str
    """`all_gather`, `reduce_scatter` or `broadcast`; empty for a wait of the computation alone."""
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
        finish: Callable[[], None] = lambda: None,
        extra_bytes: int = 0,
        first: Pending | None = None,
    ) -> None:
        """`first` is what `pending` begins with, if it has two hops."""
        self.wait = pending.wait
        """Block (CPU) or make the current stream wait (CUDA) until the parts are available."""
        self.parts = parts
        """Return what every rank sent to this one, in rank order. Read only; one of the parts may alias the
        buffer that was sent."""
        self.finish = finish
        """Declare that the parts have been read and are not needed any more."""
        self.advance = (pending if first is None else first).wait
        """Do what `wait` begins with: wait until what was sent may change, and start the second of two hops.
        For a stream that only reduces; elsewhere `wait` is enough."""
        self.extra_bytes = extra_bytes
        """Bytes that the received parts take until `finish`; 0 if they are read in place on the other
        ranks."""


class Measurement:
    """Times of one collective: call `ask` when its result is needed, and `end` when it is there."""

    __slots__ = (
        "_asked",
        "_begin",
        "_end",
        "_is_aside",
        "_is_over",
        "_label",
        "_num_bytes",
        "_op",
        "_stopwatch",
    )

    def __init__(self, stopwatch: Stopwatch, op: str, label: str, num_bytes: int) -> None:
        self._stopwatch, self._op, self._label, self._num_bytes = stopwatch, op, label, num_bytes
        self._is_aside = False
        self._begin = self._asked = stopwatch.now()
        self._end: Any = None
        self._is_over = False

    def ask(self) -> None:
        self._asked = self._stopwatch.now()
        self._is_aside = self._stopwatch.is_aside

    def end(self) -> None:
        """Report the sample, on CUDA as soon as the device is so far."""
        self._end, stopwatch = self._stopwatch.now(), self._stopwatch
        if stopwatch.on_cuda:
            stopwatch.add(self)
        else:
            stopwatch.finished(self._sample(self._end - self._begin, self._end - self._asked))

    def is_completed(self) -> bool:
        """Return whether the device has passed the wait for the collective; on CUDA, after `end`. Any thread
        may ask."""
        return self._is_over or self._end.query()

    def close(self) -> tuple[CollectiveSample, list[Any]]:
        """Return the sample of a completed collective on CUDA, and the events, which are used no more."""
        sample = self._sample(
            self._begin.elapsed_time(self._end) / 1e3, self._asked.elapsed_time(self._end) / 1e3
        )
        self._is_over = True  # before the events measure another collective
        asked = [] if self._asked is self._begin else [self._asked]
        return sample, [self._begin, *asked, self._end]

    def _sample(self, seconds: float, exposed: float) -> CollectiveSample:
        return CollectiveSample(
            op=self._op,
            label=self._label,
            num_bytes=self._num_bytes,
            seconds=seconds,
            exposed_seconds=0.0 if self._is_aside else exposed,
        )


class Stopwatch:
    """Measures collectives, and gives their samples to `finished`."""

    def __init__(self, device: torch.device, finished: Callable[[CollectiveSample], None]) -> None:
        self._device = device
        self.on_cuda = device.type == "cuda"
        self.finished = finished
        self._ended: deque[Measurement] = deque()
        """Measurements on CUDA that are not reported yet, oldest first."""
        self._events: list[Any] = []
        """Events that measure nothing at present; making one costs more than recording it."""
        self.is_aside = False
        """Whether what waits now is a stream that does not compute, so that the wait costs no time."""

    def start(self, op: str, label: str, num_bytes: int) -> Measurement:
        """Begin to measure a collective that was just issued."""
        return Measurement(self, op, label, num_bytes)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the waits within the block for those of a stream that does not compute."""
        before, self.is_aside = self.is_aside, True
        try:
            yield
        finally:
            self.is_aside = before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure how long the current stream waits for what the block names."""
        measurement = self.start("", "", 0)
        yield
        measurement.end()

    def now(self) -> Any:
        """Return the seconds of the host's clock, or on CUDA an event at this place of the stream."""
        if not self.on_cuda:
            return perf_counter()
        event = self._events.pop() if self._events else _event()
        event.record(torch.cuda.current_stream(self._device))  # the script may compute on another GPU
        return event

    def add(self, measurement: Measurement) -> None:
        """Take a measurement on CUDA whose last event is recorded.

        An evaluation or a generation has no step that would poll, and would keep its events for ever.
        """
        self._ended.append(measurement)
        if len(self._ended) > MAX_UNREPORTED:
            self.poll()

    def poll(self) -> None:
        """Report the collectives whose events have completed, oldest first."""
        while self._ended and self._ended[0].is_completed():
            sample, events = self._ended.popleft().close()
            self._events += events
            self.finished(sample)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
