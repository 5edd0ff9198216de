"""Durations of collectives: wall clock on the CPU, events on CUDA, read late so that nothing synchronises."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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


class Stopwatch:
    """Turns started collectives into `Pending`s whose end is reported to `finished`."""

    def __init__(self, device: torch.device, finished: Callable[[CollectiveSample], None]) -> None:
        self._on_cuda = device.type == "cuda"
        self._finished = finished
        self._events: deque[tuple[str, str, int, Any, Any, Any]] = deque()
        """Operation, label and bytes, then the events at the start and where the stream began and ceased to
        wait."""

    def start(self, op: str, label: str, num_bytes: int, work: Any) -> Pending:
        """Wrap the handle of a collective that was just issued."""
        return (
            self._on_stream(op, label, num_bytes, work)
            if self._on_cuda
            else self._on_host(op, label, num_bytes, work)
        )

    def poll(self) -> None:
        """Report the collectives whose events have completed, oldest first."""
        while self._events and self._events[0][-1].query():
            op, label, num_bytes, begin, asked, end = self._events.popleft()
            seconds, exposed = begin.elapsed_time(end) / 1e3, asked.elapsed_time(end) / 1e3
            self._report(op, label, num_bytes, seconds, exposed)

    def _on_host(self, op: str, label: str, num_bytes: int, work: Any) -> Pending:
        begin = perf_counter()

        def wait() -> None:
            asked = perf_counter()
            work.wait()
            end = perf_counter()
            self._report(op, label, num_bytes, end - begin, end - asked)

        return Pending(wait)

    def _on_stream(self, op: str, label: str, num_bytes: int, work: Any) -> Pending:
        begin = _event()
        begin.record()

        def wait() -> None:
            asked, end = _event(), _event()
            asked.record()
            work.wait()
            end.record()
            self._events.append((op, label, num_bytes, begin, asked, end))

        return Pending(wait)

    def _report(self, op: str, label: str, num_bytes: int, seconds: float, exposed: float) -> None:
        self._finished(
            CollectiveSample(
                op=op, label=label, num_bytes=num_bytes, seconds=seconds, exposed_seconds=exposed
            )
        )


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
