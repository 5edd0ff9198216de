"""Losses, tokens and time between two reports of a user's own program: check them, and make a StepReport of
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from numbers import Integral, Real
from time import perf_counter

import torch

from zerotrain.runtime.engine import Engine
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.train import measuring
from zerotrain.runtime.train.engine_events import EngineEvents
from zerotrain.runtime.train.report import StepReport


class StepMeter:
    """Meter of one engine; `count` is its step hook."""

    def __init__(self, events: EngineEvents) -> None:
        """`events` knows which time belongs to no step."""
        self._events = events
        self._since = self._paused_before = 0.0
        self._clear()

    def _clear(self) -> None:
        self.boundaries = 0
        """Steps since the last report."""
        self._losses: list[torch.Tensor | float] = []
        self._tokens = 0
        self._data_seconds: float | None = None
        self._seconds: dict[str, float] = {}
        """Sums of the steps' `StepResult.seconds`."""
        self._skipped = 0

    def count(self, result: StepResult) -> None:
        """Count a finished step, reported or not."""
        self.boundaries += 1
        self._skipped += result.skipped
        for name, seconds in result.seconds.items():
            if isfinite(seconds):
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def add(self, loss: torch.Tensor | float, *, tokens: int, data_seconds: float | None) -> None:
        """Add one micro-batch, without waiting for the device."""
        if isinstance(loss, torch.Tensor):
            # A copy: the program may write the next loss into the same tensor.
            loss = loss.to(torch.float64, copy=True)
        self._losses.append(loss)
        self._tokens += tokens
        if data_seconds is not None:
            self._data_seconds = (self._data_seconds or 0.0) + data_seconds

    def report(self, engine: Engine, result: StepResult) -> StepReport:
        """Return the report of everything since the last report; as in the trainer, it waits for the device
        once."""
        batch, steps, data_seconds = engine.config.batch, self.boundaries, self._data_seconds
        means = {name: seconds / steps for name, seconds in self._seconds.items()}
        report = StepReport(
            result=replace(result, seconds=means),
            loss=float(sum(self._losses) / len(self._losses)),
            seconds=self._step_seconds(means),
            data_seconds=None if data_seconds is None else data_seconds / steps,
            tokens=self._tokens,
            samples=steps * batch.micro_batch_size * batch.gradient_accumulation_steps,
            skipped=self._skipped,
            steps=steps,
        )
        self._clear()
        return report

    def _step_seconds(self, means: Mapping[str, float]) -> float:
        """Return the mean time of the steps since the last report; `means` are those of the engine's
        phases."""
        now, paused = perf_counter(), self._events.paused_seconds
        if self._since:
            seconds = max(now - self._since - (paused - self._paused_before), 0.0) / self.boundaries
        else:
            # Before the first report came the start, whose end is not known.
            seconds = sum(means.get(name, 0.0) for name in measuring.ENGINE_PHASES)
        self._since, self._paused_before = now, paused
        return seconds


def count(tokens: object) -> int:
    """Return the number of tokens. Raises TypeError for a tensor: the launcher's record and the counters need
    plain numbers."""
    if isinstance(tokens, bool) or not isinstance(tokens, Integral):
        out = ": pass int(...) of it, e.g. int(mask.sum())" if isinstance(tokens, torch.Tensor) else ""
        raise TypeError(f"tokens must be a whole number of at least 0; got {type(tokens).__name__}{out}")
    if tokens < 0:
        raise ValueError(f"tokens must be a whole number of at least 0; got {tokens}")
    return int(tokens)


def duration(seconds: object) -> float | None:
    """Return the seconds; None where they were not measured."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(
            f"data_seconds must be a number of seconds, or None where nobody measured; got "
            f"{type(seconds).__name__}"
        )
    value = _float("data_seconds", seconds)
    if not (isfinite(value) and value >= 0.0):
        raise ValueError(f"data_seconds must be finite and at least 0; got {value}")
    return value


def _float(name: str, number: Real) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ValueError(
            f"{name} must be a number that a float can hold; got one that is too large"
        ) from None


def scalar(loss: object) -> torch.Tensor | float:
    """Return the loss without its graph and without waiting for the device."""
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1:
            raise ValueError(
                f"loss must hold one element; got shape {tuple(loss.shape)}: reduce it, e.g. loss.mean()"
            )
        if loss.is_complex():
            raise TypeError(f"loss must be a real number; got {loss.dtype}")
        return loss.detach().reshape(())
    if isinstance(loss, bool) or not isinstance(loss, Real):
        raise TypeError(f"loss must be a number or a tensor of one element; got {type(loss).__name__}")
    return _float("loss", loss)
