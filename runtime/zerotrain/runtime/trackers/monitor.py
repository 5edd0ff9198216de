"""`engine.monitor`: the numbers of every step, and those of a script, go to the trackers of the
configuration.

Rank 0 alone writes. Where a launcher started the process, the rank's reporter gives the numbers, which are
then those of metrics and history; elsewhere the engine's own passes do.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.runtime.facade.memory import peak_memory_bytes
from zerotrain.runtime.late_numbers import StepLoss
from zerotrain.runtime.trackers.run import Run, run_of_process
from zerotrain.runtime.trackers.sinks import Settings, open_sink
from zerotrain.runtime.trackers.writer import TrackerWriter

if TYPE_CHECKING:
    from zerotrain.runtime.step import StepResult

CLOSE_TIMEOUT_S = 5.0
"""Time that the end of an engine waits for all trackers together."""


class Monitor:
    """Trackers of one engine; without any, every call does nothing."""

    def __init__(self) -> None:
        self.enabled = False
        """Whether the configuration has a tracker, on every rank."""
        self.is_fed = False
        """Whether a reporter calls `put` with every step."""
        self._writers: list[TrackerWriter] = []
        self._run: Run | None = None
        self._loss = StepLoss()
        self._since: float | None = None

    def open(self, trackers: Mapping[str, Settings], *, samples_per_step: int, writes: bool) -> None:
        """Start the threads that write, if this rank `writes`."""
        self.enabled = bool(trackers)
        if not writes or not trackers:
            return
        self._run = run = run_of_process(samples_per_step=samples_per_step)
        for name, settings in trackers.items():
            opening = partial(_open, name, settings, run)
            self._writers.append(TrackerWriter(name, opening))
        atexit.register(self.close)  # for a script that does not close its engine

    @property
    def dropped(self) -> int:
        """Points that trackers did not take."""
        return sum(writer.dropped for writer in self._writers)

    def put(self, step: int, values: Mapping[str, float | None]) -> None:
        """Queue the numbers of a step for every tracker; None = not known."""
        known = {name: float(value) for name, value in values.items() if value is not None}
        for writer in self._writers:
            writer.put(step, known)

    def write_events(self, event_list: Sequence[tuple[str, Any, int]]) -> None:
        """Write a script's own numbers, as (name, value, step)."""
        for name, value, step in event_list:
            self.put(int(step), {name: float(value)})

    def loss(self, loss: torch.Tensor, *, weight: float) -> None:
        """Add a part of the step's loss, without waiting for the device."""
        if self._writers and not self.is_fed:
            self._loss.add(loss, weight=weight)

    def stepped(self, result: StepResult, *, samples: int) -> None:
        """Put the numbers of a step, unless a reporter does; `samples` are those of all ranks."""
        if not self._writers or self.is_fed:
            return
        now, before = perf_counter(), self._since
        seconds = None if before is None else now - before
        self._since = now
        self.put(
            result.step,
            {
                **step_values(result),
                "train/loss": self._loss.take(),
                "train/step_seconds": seconds,
                "train/samples_per_second": samples / seconds if seconds else None,
                "train/memory_peak_bytes": peak_memory_bytes(),
                "train/restarts": 0 if self._run is None else self._run.attempt - 1,
            },
        )

    def close(self) -> None:
        """Write what waits, for a bounded time. Idempotent."""
        writers, self._writers = self._writers, []
        atexit.unregister(self.close)
        until = monotonic() + CLOSE_TIMEOUT_S
        for writer in writers:
            writer.close(until - monotonic())


def step_values(result: StepResult) -> dict[str, float | None]:
    """Return the numbers of a step that are equal on all ranks."""
    return {
        "train/lr": result.lr,
        "train/grad_norm": result.grad_norm,
        "train/loss_scale": result.loss_scale if result.loss_scale != 1.0 else None,
    }


def _open(name: str, settings: Settings, run: Run, step: int) -> Any:
    return open_sink(name, settings, run, step=step)
