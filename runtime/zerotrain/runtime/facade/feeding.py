"""Data feeding of an engine: its loader's position in checkpoints, and ranks with unequal amounts of data
(`uneven_inputs`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.data.uneven import Rounds, joined
from zerotrain.runtime.facade.accumulation import Accumulation
from zerotrain.runtime.facade.state import EngineState

if TYPE_CHECKING:
    from zerotrain.runtime.data.epochs import EpochLoader

LOADER = "loader"
"""Key of the loader's position in the scalars of a checkpoint."""


class Feeding:
    """Keeps track of the batches."""

    def __init__(
        self, state: EngineState, comm: Comm, accumulation: Accumulation, loader: EpochLoader | None
    ) -> None:
        self._state, self._comm, self._accumulation = state, comm, accumulation
        self.loader = loader
        """The engine's own loader, the third value that `initialize` returns."""
        self._rounds: Rounds | None = None
        self._empty_batch: list[tuple[int, ...]] | None = None
        """Shapes of the tensors of the last forward pass if it had no samples."""
        if loader is not None:
            loader.steps_taken = lambda: state.step_calls
            loader.on_batch = comm.note_batch
            loader.around = self.join

    def join(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the batches until every rank has had all of its own; see `Engine.join`."""
        if self._state.config.uneven_inputs != "join":
            return iter(batches)
        if self._rounds is None:
            self._rounds = Rounds(self._comm, steps_taken=lambda: self._state.step_calls)
        return joined(iter(batches), self._rounds, length=self._accumulation.steps_left)

    @property
    def batch_weight(self) -> float:
        """Factor on the loss of the current batch."""
        return 1.0 if self._rounds is None else self._rounds.weight(self._state.step_calls)

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the batch's weight, in fp32 on every rank; the loss itself without `join`."""
        return loss if self._rounds is None else loss.float() * self.batch_weight

    def look_at_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record whether a forward pass has tensors and all of them are without samples."""
        given: list[Any] = [*args, *kwargs.values()]
        if len(given) == 1 and isinstance(given[0], (Mapping, list, tuple)):
            given = list(given[0].values() if isinstance(given[0], Mapping) else given[0])
        shapes = [tuple(value.shape) for value in given if isinstance(value, torch.Tensor) and value.ndim]
        self._empty_batch = shapes if shapes and not any(shape[0] for shape in shapes) else None

    def check_batch(self, loss: torch.Tensor) -> None:
        """Raise ValueError where the batch had no samples and its loss is not finite: the gradients of all
        ranks would not be finite either, and every rank would silently skip the step."""
        if self._empty_batch is None or math.isfinite(float(loss.detach())):
            return
        error = ValueError(
            f"the batch of rank {self._comm.rank} has no samples (shapes {self._empty_batch[:3]}), so its "
            f"loss is {float(loss.detach())} and no rank could update; leave such batches out on every rank, "
            'or set uneven_inputs to "join" and take the batches from the engine\'s loader or '
            "engine.join(loader)"
        )
        self._comm.note_error(error)
        raise error

    def loader_scalars(self) -> dict[str, Any]:
        """Return the position of the engine's loader, for a checkpoint."""
        return {} if self.loader is None else {LOADER: self.loader.state_dict()}

    def restore_loader(self, scalars: Mapping[str, Any]) -> None:
        """Restore what `loader_scalars` returned; a loader that is not in the checkpoint keeps its
        position."""
        if self.loader is not None and LOADER in scalars:
            self.loader.load_state_dict(scalars[LOADER])
