"""What an engine does within its own calls, told through a rank's reporter: saves, loads, the first pass.

The built-in trainer and programs of one's own (`own_program.py`) make it the engine's observer.
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


class Telling(EngineObserver):
    """Of one engine and one reporter; used by the thread that trains."""

    def __init__(self, reporter: Reporter) -> None:
        self.paused_seconds = 0.0
        """In all phases that are over."""
        self._reporter = reporter
        self._depth = 0

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """This rank is in `phase`, and afterwards in the one it was in before, also when something raises."""
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
        """Training stands still on purpose. Before the first pass that is part of the start: a worker that
        told of a checkpoint would count as ready, and then not."""
        starts = self._reporter.progress.phase in STARTING
        return self.during(Phase.INIT if starts else Phase.CHECKPOINT)

    def closing(self) -> None:
        """The last look at what is not counted at every step; nothing of the engine is held from now on."""
        if self._reporter.engine is not None:
            measuring.measure(self._reporter.metrics, self._reporter.engine)
            # Its memory may be wanted for something else.
            self._reporter.engine = None
            self._reporter.channel.attach_wait(lambda: None)

    def training_pass(self) -> None:
        """What was done since the start is over, and compilation may come."""
        if self._reporter.progress.phase is Phase.INIT:
            self._reporter.phase(Phase.FIRST_STEP)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Told as a checkpoint, and counted as lost time or as a failure."""
        began = perf_counter()
        try:
            with self.standing():
                yield
        except CheckpointError:
            self._reporter.metrics.checkpoint_failed()
            raise
        self._reporter.stood_still(perf_counter() - began)

    def saved(self, result: SaveResult, *, is_latest: bool) -> None:
        """One that no load without a tag would take is nothing to go on from, so it is not told."""
        if is_latest:
            self._reporter.saved(result)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Part of the start; later on it is judged by the limit of a checkpoint."""
        with self.standing():
            yield

    def loaded(self, result: LoadResult, *, seconds: float, module_only: bool) -> None:
        """Damaged checkpoints always; a resume only where the steps were taken over."""
        if result.rejected:
            self._reporter.rejected(passed_over(result))
        if result.path is not None and not module_only:
            self._reporter.resumed(result, seconds=seconds)
