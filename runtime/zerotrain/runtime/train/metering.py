"""What lies between two reports of a program of one's own: losses, tokens, time. Makes it a StepReport."""

from __future__ import annotations

from time import perf_counter

import torch

from zerotrain.runtime.engine import Engine
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.train import measuring
from zerotrain.runtime.train.report import StepReport
from zerotrain.runtime.train.telling import Telling


class StepMeter:
    """Of one engine; `count` is its step hook."""

    def __init__(self, telling: Telling) -> None:
        """`telling` knows which time was no step's."""
        self._telling = telling
        self._since = self._paused_before = 0.0
        self._clear()

    def _clear(self) -> None:
        self.boundaries = 0
        """Steps since the last report."""
        self._losses: list[torch.Tensor | float] = []
        self._tokens = 0
        self._data_seconds: float | None = None

    def count(self, result: StepResult) -> None:
        """A step is done, reported or not."""
        self.boundaries += 1

    def add(self, loss: torch.Tensor | float, *, tokens: int, data_seconds: float | None) -> None:
        """One micro-batch, without a wait for the device."""
        self._losses.append(loss.double() if isinstance(loss, torch.Tensor) else loss)
        self._tokens += tokens
        if data_seconds is not None:
            self._data_seconds = (self._data_seconds or 0.0) + data_seconds

    def report(self, engine: Engine, result: StepResult) -> StepReport:
        """Everything since the last report; as in the trainer, it waits for the device once."""
        batch = engine.config.batch
        report = StepReport(
            result=result,
            loss=float(sum(self._losses) / len(self._losses)),
            seconds=self._seconds_of(result),
            data_seconds=self._data_seconds,
            tokens=self._tokens,
            samples=self.boundaries * batch.micro_batch_size * batch.gradient_accumulation_steps,
        )
        self._clear()
        return report

    def _seconds_of(self, result: StepResult) -> float:
        """Mean of the steps since the last report."""
        now, paused = perf_counter(), self._telling.paused_seconds
        if self._since:
            seconds = (now - self._since - (paused - self._paused_before)) / self.boundaries
        else:
            # What came before is the start, of which nobody knows where it ended.
            seconds = sum(result.seconds.get(name, 0.0) for name in measuring.ENGINE_PHASES)
        self._since, self._paused_before = now, paused
        return seconds
