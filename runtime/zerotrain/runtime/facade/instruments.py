"""`engine.timers` and `engine.tput_timer`: DeepSpeed's stop watches."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch

from zerotrain.runtime.script_log import script_logger

logger = script_logger()


class Timer:
    """One named stop watch; on a GPU it waits for the device at both ends."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._began = 0.0
        self._laps: list[float] = []

    def start(self) -> None:
        """Begin a lap. Raises RuntimeError when one is running."""
        if self.started_:
            raise RuntimeError(f"timer {self.name_!r} runs already; call stop() first")
        self.started_, self._began = True, _now()

    def stop(self, reset: bool = False, record: bool = True) -> None:
        """End the lap; `reset` drops earlier laps, and `record=False` drops this one. Raises RuntimeError
        when none is running."""
        if not self.started_:
            raise RuntimeError(f"timer {self.name_!r} does not run; call start() first")
        lap = _now() - self._began
        self.started_ = False
        if reset:
            self._laps.clear()
        if record:
            self._laps.append(lap)

    def reset(self) -> None:
        """Drop all laps, and the running one."""
        self.started_ = False
        self._laps.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds of all laps; a running timer goes on with a new lap."""
        runs = self.started_
        if runs:
            self.stop()
        total = 1000.0 * sum(self._laps)
        if reset:
            self.reset()
        if runs:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean milliseconds of a lap; 0.0 without one."""
        return 1000.0 * sum(self._laps) / len(self._laps) if self._laps else 0.0


class Timers:
    """Stop watches by name: `engine.timers("data").start()`."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self._timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        """Return all stop watches by name."""
        return self._timers

    def has_timer(self, name: str) -> bool:
        """Return whether the stop watch exists."""
        return name in self._timers

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, **_: Any) -> None:
        """Log the milliseconds of the stop watches that exist, divided by `normalizer`."""
        known = [name for name in names if name in self._timers]
        times = ", ".join(
            f"{name}: {self._timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known
        )
        logger.info("time (ms) | %s", times)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean milliseconds of a lap by name, divided by `normalizer`."""
        means = {name: self._timers[name].mean() / normalizer for name in names if name in self._timers}
        if reset:
            for name in means:
                self._timers[name].reset()
        return means


class Throughput:
    """Count of epochs, for scripts that end an epoch with it. The engine times its steps by itself
    (`last_step.seconds`), so starting and stopping changes nothing."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1

    def start(self) -> None:
        """Do nothing."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Do nothing."""


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()
