"""`ProgressReporter`: reports of a user's own program to the launcher, as the built-in trainer makes them.

Opt-in and explicit. A program that makes a reporter promises steps and is judged by them; of a program
without one nothing is reported, and it is not judged (docs/operator/hangs.md).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import ClassVar

import torch
from prometheus_client import CollectorRegistry
from torch.utils.hooks import RemovableHandle

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.progress import Phase
from zerotrain.contract.worker_environment import LaunchSpec, RankEnv
from zerotrain.runtime.channel import RankChannel
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.train import measuring
from zerotrain.runtime.train.engine_events import EngineEvents
from zerotrain.runtime.train.metering import StepMeter, count, duration, scalar
from zerotrain.runtime.train.report import Reporter
from zerotrain.runtime.train.stopping import StopRequest

PROPER_ENDS = (None, 0, int(ExitCode.YIELDED))
"""Codes of `sys.exit` that count as success."""


class ProgressReporter:
    """Steps, phases, checkpoints, stragglers and metrics of a program that trains with the engine.

    Make it first, in the main thread of every rank, and pass it the engine once that exists; one at a time.
    All calls belong to the training thread::

        with zt.ProgressReporter(total_steps=1000) as reporter:
            with reporter.rendezvous():
                engine, *_ = zt.initialize(model=model, config=config)
            reporter.watch(engine)
            engine.load_checkpoint(folder)
            while engine.global_steps < 1000:
                ...
                engine.step()
                reporter.step(loss)
            engine.save_checkpoint(folder)
            engine.close()

    Every rank needs one, and every rank calls `step`: a rank that reports nothing is blamed when the job
    hangs, and its worker does not become ready. No method communicates with other ranks.

    Saves and loads of the watched engine are reported without a further call. Where no launcher started the
    process, nothing is reported, written or measured; wrong use raises an error all the same.
    """

    _open: ClassVar[ProgressReporter | None] = None
    """The open reporter of this process."""
    events_class: ClassVar[type[EngineEvents]] = EngineEvents

    def __init__(self, *, total_steps: int | None = None) -> None:
        """`total_steps` of the whole run, those of earlier attempts included; None = not known.

        Raises ValueError when it is no number of steps, RuntimeError while another reporter of this process
        is open, LaunchError for an environment that cannot be read.
        """
        if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
            raise ValueError(
                f"total_steps must be a whole number of at least 1, or None where it is not known; got "
                f"{total_steps!r}"
            )
        if ProgressReporter._open is not None:
            ProgressReporter._open.withdraw()
        self._reporter = reporter = _started(total_steps)
        self._events = None if reporter is None else self.events_class(reporter)
        self._meter = None if self._events is None else StepMeter(self._events)
        self._registry = CollectorRegistry() if reporter is None else reporter.metrics.registry
        self._stop: StopRequest | None = None
        self._engine: weakref.ref[Engine] | None = None
        """Weak reference, so that a program that closed its engine can free the memory."""
        self._hook: RemovableHandle | None = None
        """Hook that counts the engine's steps."""
        self._is_closed = False
        self._is_paused = False
        self._step_calls = 0
        """The engine's `step_calls` at the last call of `step`."""
        ProgressReporter._open = self

    @property
    def registry(self) -> CollectorRegistry:
        """Registry whose metrics go out with the rank's metrics, with `job_name` and `rank` added."""
        return self._registry

    def rendezvous(self) -> AbstractContextManager[None]:
        """Mark the rendezvous: put it around `initialize` (or `shard`, `init_distributed`). A rank that never
        comes is thereby distinguished from those that wait for it."""
        return nullcontext() if self._events is None else self._events.during(Phase.RENDEZVOUS)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Mark work that takes longer than a step on purpose: an evaluation, an export, another way of
        saving.

        Its limit is `hangPolicy.checkpointTimeoutSeconds`, and it is shown as the phase `checkpoint`. Its
        time counts for no step. Before the first forward pass with gradients it is a part of the start
        (`init`, `startupTimeoutSeconds`).
        """
        was_paused, self._is_paused = self._is_paused, True
        engine = None if self._engine is None else self._engine()
        try:
            with (
                nullcontext() if engine is None else engine.clock.standing_still(),
                nullcontext() if self._events is None else self._events.standing(),
            ):
                yield
        finally:
            self._is_paused = was_paused

    def watch(self, engine: Engine) -> None:
        """Watch the engine; call it before `load_checkpoint`. Its checkpoints are reported from now on.

        Where states are spilled, the drive is measured first, which takes up to a second. Raises TypeError
        for anything but an engine, RuntimeError for a second one.
        """
        if not isinstance(engine, Engine):
            raise TypeError(
                f"watch() takes the engine, the first of the four that initialize() returns (of shard(), the "
                f"optimizer's .engine); got {type(engine).__name__}"
            )
        if self._engine is not None:
            raise RuntimeError(
                "this reporter watches an engine already: a job has one step; watch the engine whose steps "
                "count"
            )
        self._engine, self._step_calls = weakref.ref(engine), engine.step_calls
        if self._stop is not None:
            self._stop.set_callback(_asking(self._engine))
        if self._reporter is not None and self._events is not None and self._meter is not None:
            engine.observer = self._events
            self._hook = engine.register_step_hook(self._meter.count)
            self._reporter.ready(engine)
            measuring.probe_spill(self._reporter.metrics, engine)

    def step(self, loss: torch.Tensor | float, *, tokens: int = 0, data_seconds: float | None = None) -> None:
        """Report a step; call it on every rank, after `engine.step()`. Inside gradient accumulation it only
        collects.

        A call after every N steps reports their means and sums, and is judged by the time that N steps take.

        Args:
            loss: of this micro-batch on this rank, one element on any device; the mean over the
                micro-batches is reported. Rank 0's is shown, so reduce it over the ranks where that matters.
            tokens: number that all ranks together saw since the last call, an integer; 0 = not counted.
            data_seconds: the part of the time since the last call that was spent on getting batches; None =
                not measured.

        A step lasts from the previous call to this one, without pauses and checkpoints; the first one counts
        the time that the engine spent on it. Raises RuntimeError before `watch`, within `pause` and where
        `engine.step()` was not called since, ValueError or TypeError for a loss, tokens or seconds that are
        not valid numbers.
        """
        value, tokens, data_seconds = scalar(loss), count(tokens), duration(data_seconds)
        engine = None if self._engine is None else self._engine()
        if engine is None:
            raise RuntimeError("step() needs the engine: call watch(engine) after initialize()")
        if self._is_paused:
            raise RuntimeError(
                f"step() was called within pause() at step {engine.global_steps}, and the time of a pause is "
                "no step's; leave the pause first"
            )
        if engine.step_calls == self._step_calls:
            raise RuntimeError(
                f"step() was called at step {engine.global_steps} without an engine.step() since the last "
                "call; call it once after every engine.step()"
            )
        self._step_calls = engine.step_calls
        if self._reporter is None or self._meter is None:
            return
        self._meter.add(value, tokens=tokens, data_seconds=data_seconds)
        if self._meter.boundaries and engine.last_step is not None:
            self._reporter.step(self._meter.report(engine, engine.last_step), engine=engine)

    def stop_on_sigterm(self) -> None:
        """Make SIGTERM ask all ranks to stop after the same step: then `engine.stop_agreed` is True.

        Call it once, in the main thread; a signal that comes before `watch` is kept. The signal is handled
        also while a collective waits. Without `close` within the job's grace period (no limit where there is
        no launcher) the process ends itself with code 143 and its stacks in the log.
        """
        if self._stop is not None:
            return
        grace_seconds = (
            threading.TIMEOUT_MAX if self._reporter is None else self._reporter.launch.grace_seconds
        )
        self._stop = StopRequest(grace_seconds=grace_seconds)
        if self._engine is not None:
            self._stop.set_callback(_asking(self._engine))

    def close(self) -> None:
        """Report that all work is done or saved, and that the process is about to end. Close the engine
        first, so that a checkpoint in the background is reported, too. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._stop is not None:
            self._stop.finished()
        if self._reporter is not None:
            self._reporter.done()
        self._end()

    def withdraw(self) -> None:
        """Give way to another reporter. Raises RuntimeError: only one that the program did not make does."""
        raise RuntimeError(
            "this process has a ProgressReporter already, and one rank tells one story: make it once, or "
            "close() the first one"
        )

    def _end(self) -> None:
        """End the reports, and allow another reporter."""
        if ProgressReporter._open is self:
            ProgressReporter._open = None
        if self._reporter is not None:
            self._reporter.channel.close()

    def __enter__(self) -> ProgressReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call `close`, also for `sys.exit` with 0 or 75; report an exception as the reason of the rank's
        end."""
        if error is None or (isinstance(error, SystemExit) and error.code in PROPER_ENDS):
            self.close()
            return
        if isinstance(error, Exception) and self._reporter is not None:
            with suppress(Exception):  # else it would hide the program's own error
                self._reporter.failed()
            self._reporter.channel.failure(error)
        self._end()


def _started(total_steps: int | None) -> Reporter | None:
    """Return the reporter; None without a launcher."""
    rank = RankEnv.from_env(os.environ)
    if rank.channel_socket is None:
        return None
    reporter = Reporter.start(LaunchSpec.from_env(os.environ), rank, RankChannel.from_env())
    reporter.is_quiet = True
    if total_steps is not None:
        reporter.set_plan(steps=total_steps)
    return reporter


def _asking(engine: weakref.ref[Engine]) -> Callable[[], None]:
    """Return a function that asks the engine to stop, if it still exists."""

    def ask() -> None:
        watched = engine()
        if watched is not None:
            watched.request_stop()

    return ask
