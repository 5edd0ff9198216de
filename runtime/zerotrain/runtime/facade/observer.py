"""Whom an engine tells what happens within its calls: nobody, unless a reporter takes this place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerotrain.runtime.checkpoint import LoadResult, SaveResult


class EngineObserver:
    """Does nothing; a reporter overrides what it wants to know.

    Called on every rank, in the thread that calls the engine. Overrides must neither raise nor communicate.
    """

    def closing(self) -> None:
        """The engine closes; everything is settled, and may be looked at for the last time."""

    def training_pass(self) -> None:
        """A step begins: with a forward pass in training mode, or with a backward pass; maybe told twice. An
        evaluation is none."""

    def saving(self) -> AbstractContextManager[None]:
        """Around what training stands still for: a save, or the wait for one in the background."""
        return nullcontext()

    def saved(self, result: SaveResult, *, is_latest: bool) -> None:
        """A checkpoint is durable, just now or in the background. `is_latest`: a load without a tag may find
        it."""

    def loading(self) -> AbstractContextManager[None]:
        """Around a load."""
        return nullcontext()

    def loaded(self, result: LoadResult, *, seconds: float, module_only: bool) -> None:
        """A load is over; `result.path` is None where there was nothing. `module_only`: the steps stay."""


NOBODY = EngineObserver()
