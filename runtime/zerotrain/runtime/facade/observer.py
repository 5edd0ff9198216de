"""Interface of the observer that an engine notifies of events within its calls; by default one that does
nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerotrain.runtime.checkpoint import LoadResult, SaveResult


class EngineObserver:
    """Does nothing; a reporter overrides the methods of the events that it needs.

    Called on every rank, in the thread that calls the engine. Overrides must neither raise nor communicate.
    """

    def closing(self) -> None:
        """Handle the engine's closing; all work is complete, and the engine may be read for the last time."""

    def training_pass(self) -> None:
        """Handle the beginning of a step, with a forward pass in training mode or with a backward pass; may
        be called twice for a step. An evaluation does not count."""

    def saving(self) -> AbstractContextManager[None]:
        """Return a context for a pause of training: a save, or the wait for one in the background."""
        return nullcontext()

    def saved(self, result: SaveResult, *, is_latest: bool) -> None:
        """Handle a durable checkpoint, written just now or in the background. `is_latest`: a load without a
        tag may find it."""

    def loading(self) -> AbstractContextManager[None]:
        """Return a context for a load."""
        return nullcontext()

    def loaded(self, result: LoadResult, *, seconds: float, module_only: bool) -> None:
        """Handle the end of a load; `result.path` is None if nothing was found. `module_only`: the steps
        stay."""


NO_OBSERVER = EngineObserver()
