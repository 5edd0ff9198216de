"""Reports of what an engine does within its own calls (saves, loads, the first pass), through a rank's
reporter.

The built-in trainer and users' own programs (`progress_reporter.py`) make it the engine's observer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter

from zerotrain.contract.progress import Phase
from zerotrain.runtime.checkpoint import CheckpointError, LoadResult, SaveResult
from zerotrain.runtime.facade.observer import EngineObserver
from zerotrain.runtime.train import measuring
from zerotrain.runtime.train.report import Reporter, passed_over

STARTING = (Phase.INIT, Phase.RENDEZVOUS)
"""Phases before the first pass."""

PAUSED = (*STARTING, Phase.CHECKPOINT)
"""Phases in which no step is made."""


class EngineEvents(EngineObserver):
    """Observer of one engine for one reporter; used by the training thread."""

    def __init__(self, reporter: Reporter) -> None:
        self.paused_seconds = 0.0
        """Seconds in all phases that are over."""
        self._reporter = reporter
        self._depth = 0

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Report `phase`, and the previous phase on exit, also when an exception is raised."""
        before, began = self._reporter.progress.phase, perf_counter()
        if phase is not before:
            self._reporter.phase(phase)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.paused_seconds += perf_counter() - began
            if phase is not before and self._reporter.progress.phase is phase:
                self._reporter.phase(before)

    def standing(self) -> AbstractContextManager[None]:
        """Report a deliberate pause of training. Before the first pass that is part of the start: a worker
        that reported a checkpoint would count as ready, and afterwards as not ready."""
        starts = self._reporter.progress.phase in STARTING
        return self.during(Phase.INIT if starts else Phase.CHECKPOINT)

    def closing(self) -> None:
        """Measure for the last time what is not counted at every step, and release the engine."""
        if self._reporter.engine is not None:
            measuring.measure(self._reporter.metrics, self._reporter.engine)
            # Its memory may be needed for something else.
            self._reporter.engine = None
            self._reporter.channel.attach_wait(lambda: None)

    def training_pass(self) -> None:
        """Report that the start is over and the first step begins, which may include compilation."""
        if self._reporter.progress.phase is Phase.INIT:
            self._reporter.phase(Phase.FIRST_STEP)

    def evaluation_pass(self) -> None:
        """Report a sign of life within a pause, which may be long."""
        if self._reporter.progress.phase in PAUSED:
            self._reporter.evaluated()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Report a save as a checkpoint; record its time as lost, or its failure."""
        began = perf_counter()
        try:
            with self.standing():
                yield
        except CheckpointError:
            self._reporter.metrics.checkpoint_failed()
            raise
        self._reporter.stood_still(perf_counter() - began)

    def saved(self, result: SaveResult, *, is_latest: bool) -> None:
        """Report the checkpoint, unless a load without a tag would not take it: then a job cannot resume from
        it."""
        if is_latest:
            self._reporter.saved(result)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Report a load as part of the start; later loads are judged by the limit of a checkpoint."""
        with self.standing():
            yield

    def loaded(self, result: LoadResult, *, seconds: float, module_only: bool) -> None:
        """Report damaged checkpoints in any case, a resume only where the steps were loaded."""
        if result.rejected:
            self._reporter.rejected(passed_over(result))
        if result.path is not None and not module_only:
            self._reporter.resumed(result, seconds=seconds)
