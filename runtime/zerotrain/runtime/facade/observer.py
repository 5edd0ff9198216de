"""Interface of the observer that an engine notifies of events within its calls; by default one that does
nothing. Whoever made no engine itself learns of new ones by `on_new_engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from zerotrain.runtime.checkpoint import LoadResult, SaveResult


class EngineObserver:
    """Does nothing; a reporter overrides the methods of the events that it needs.

    Called on every rank, in the thread that calls the engine. Overrides must neither raise nor communicate,
    except `called`, which may end the process on all ranks.
    """

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Handle a call of the engine, before its forward pass."""

    def closing(self) -> None:
        """Handle the engine's closing; all work is complete, and the engine may be read for the last time."""

    def training_pass(self) -> None:
        """Handle the beginning of a step, with a forward pass in training mode or with a backward pass; may
        be called twice for a step. An evaluation does not count."""

    def evaluation_pass(self) -> None:
        """Handle the beginning of a forward pass without gradients or in evaluation mode. Of a model that is
        trained in that mode, `training_pass` follows with its backward pass."""

    def loss(self, loss: torch.Tensor, *, weight: float) -> None:
        """Handle the loss of a backward pass, which counts in its step with this weight."""

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

_watchers: list[Callable[[Any], None]] = []


def on_new_engine(watcher: Callable[[Any], None]) -> None:
    """Call `watcher(engine)` for every engine that `initialize` makes from now on, on each rank."""
    _watchers.append(watcher)


def announce(engine: Any) -> None:
    """Tell those who asked for it that an engine is made. Raises their errors."""
    for watcher in _watchers:
        watcher(engine)
