"""Events of an engine whose program reports nothing itself: losses, tokens and pauses from the passes alone.

[Note: pauses] An evaluation begins with a pass without gradients or in evaluation mode, and ends with the
next training pass. Some of these passes belong to a step: a reference model's, generated answers, a teacher.
So a pause begins only when they have gone on for a while, and if every step has one, its time is part of the
steps. The limit of a checkpoint applies in a pause, from its last pass on: an evaluation of hours is no hang,
and a rank that stops within it is one (docs/operator/hangs.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from zerotrain.contract.progress import RejectedCheckpoint
from zerotrain.runtime.checkpoint import LoadResult, SaveResult
from zerotrain.runtime.late_numbers import StepLoss
from zerotrain.runtime.train.engine_events import EngineEvents
from zerotrain.runtime.train.report import Reporter

PAUSE_AFTER_SECONDS = 1.0
"""Time from the first pass of an evaluation from which on it is a pause."""

TOKEN_ARGUMENTS = ("input_ids", "decoder_input_ids", "labels")
"""Arguments of a model with one element for each token; the first that is given counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Choice of a program's library from what to resume."""

    folder: Path | None
    """The checkpoint, of which the engine loads a part; None = there is none."""
    rejected: tuple[RejectedCheckpoint, ...] = ()
    """Newer ones that are damaged."""


class AutomaticEvents(EngineEvents):
    """Observer of one engine that also measures its steps and finds its pauses."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(reporter)
        self._loads_from: Path | None = None
        """Folder whose load comes next; None = show the engine's own."""
        self._has_saved_to_stop = False
        """Whether a durable checkpoint was made since all ranks were to stop."""
        self._is_silent = False
        self._loss = StepLoss()
        self._tokens = 0
        self._pause: Callable[[], AbstractContextManager[None]] | None = None
        self._finish: Callable[[], None] | None = None
        self._running = ExitStack()
        """The pause in progress."""
        self._began: float | None = None
        """Beginning of the pause."""
        self._evaluates_since: float | None = None
        """Time of the first pass of an evaluation."""
        self._had_pause = self._has_pause = False
        """Whether the previous step had a pause, and whether this one has."""

    def attach(self, pause: Callable[[], AbstractContextManager[None]], finish: Callable[[], None]) -> None:
        """Set what begins a pause, and what ends a process that has stopped."""
        self._pause, self._finish = pause, finish

    def resume(self, chosen: Resume) -> None:
        """Report the checkpoints that were passed over, and the next load as that of the chosen one."""
        self._loads_from = chosen.folder
        if chosen.rejected:
            self._reporter.rejected(chosen.rejected)

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens of a batch, if it trains; end a process that has stopped."""
        engine = self._reporter.engine
        if engine is None or not (torch.is_grad_enabled() and engine.module.training):
            return
        if self._has_saved_to_stop and self._finish is not None:
            self._finish()
        for name in TOKEN_ARGUMENTS:
            if isinstance(tokens := kwargs.get(name), torch.Tensor):
                self._tokens += tokens.numel()
                break

    def loss(self, loss: torch.Tensor, *, weight: float) -> None:
        """Add a part of the step's loss, without waiting for the device."""
        self._loss.add(loss, weight=weight)

    def take_step(self) -> tuple[float, int]:
        """Return loss and tokens of the step that ended, NaN and 0 where they are not known. Waits until the
        device has computed the loss, not for the update."""
        self._end_pause()
        self._had_pause, self._has_pause = self._has_pause, False
        loss, tokens, self._tokens = self._loss.take(), self._tokens, 0
        return nan if loss is None else loss, tokens

    def training_pass(self) -> None:
        """End a pause; training goes on."""
        self._end_pause()
        super().training_pass()

    def evaluation_pass(self) -> None:
        """Begin a pause when an evaluation has lasted for a while; see [Note: pauses]."""
        if not self._depth:
            now = perf_counter()
            self._evaluates_since = self._evaluates_since or now
            if self._pause is not None and now - self._evaluates_since >= PAUSE_AFTER_SECONDS:
                self._began = now
                self._running.enter_context(self._pause())
        super().evaluation_pass()

    def _end_pause(self) -> None:
        self._evaluates_since = None
        began, self._began = self._began, None
        if began is None:
            return
        self._running.close()
        self._has_pause = True
        if self._had_pause:
            self.paused_seconds -= perf_counter() - began

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Report no save and no load of the engine within."""
        before, self._is_silent = self._is_silent, True
        try:
            yield
        finally:
            self._is_silent = before

    def saved(self, result: SaveResult, *, is_latest: bool) -> None:
        """Report the checkpoint, unless it is one part of another."""
        if self._is_silent:
            return
        super().saved(result, is_latest=is_latest)
        engine = self._reporter.engine
        if is_latest and engine is not None and engine.stop_agreed:
            self._has_saved_to_stop = True

    def loaded(self, result: LoadResult, *, seconds: float, module_only: bool) -> None:
        """Report the load under the name of the folder that the program resumes from, unless it is silent."""
        if self._is_silent:
            return
        if self._loads_from is not None and result.path is not None:
            result = replace(result, path=self._loads_from)
        self._loads_from = None
        super().loaded(result, seconds=seconds, module_only=module_only)
