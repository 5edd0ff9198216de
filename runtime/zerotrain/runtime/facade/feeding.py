"""Data feeding of an engine: its loader's position in checkpoints, and ranks with unequal amounts of data
(`uneven_inputs`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.runtime.data.uneven import Rounds, joined
from zerotrain.runtime.facade.parts import EngineParts

if TYPE_CHECKING:
    from zerotrain.runtime.data.epochs import EpochLoader

LOADER = "loader"
"""Key of the loader's position in the scalars of a checkpoint."""


class Feeding(EngineParts):
    """Keeps track of the batches."""

    training_dataloader: EpochLoader | None = None
    """The third value that `initialize` returns."""
    _rounds: Rounds | None = None
    _empty_batch: list[tuple[int, ...]] | None = None
    """Shapes of the tensors of the last forward pass if it had no samples."""

    def follow_loader(self, loader: EpochLoader | None) -> None:
        """Attach the engine's own loader."""
        self.training_dataloader = loader
        if loader is not None:
            loader.steps_taken = lambda: self.step_calls
            loader.on_batch = self.comm.note_batch
            loader.around = self.join

    def join(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterate over this rank's batches until every rank has had all of its own. Collective.

        With `uneven_inputs` "join" a rank without data goes on with its last batch at weight zero, and every
        batch is weighted by its samples: `engine.batch_weight`. Otherwise the batches are returned unchanged.
        The loader that `initialize` returns is joined already.

        Train each batch, up to `step()`, before the next one is taken. Raises RuntimeError otherwise, and
        ValueError on every rank when a rank has no batch at all.
        """
        if self.config.uneven_inputs != "join":
            return iter(batches)
        if self._rounds is None:
            self._rounds = Rounds(self.comm, steps_taken=lambda: self.step_calls)
        return joined(iter(batches), self._rounds, length=self._batches_to_boundary)

    def _batches_to_boundary(self) -> int:
        """Return the number of micro-batches up to the next update."""
        every = self.config.batch.gradient_accumulation_steps
        is_counted = self.config.managed_gradient_accumulation and self._forced_boundary is None
        return every - self.micro_steps % every if is_counted else 1

    @property
    def batch_weight(self) -> float:
        """Factor on the loss of the current batch: 1 unless the ranks' batches differ in size or number."""
        return 1.0 if self._rounds is None else self._rounds.weight(self.step_calls)

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
            f"the batch of rank {self.rank} has no samples (shapes {self._empty_batch[:3]}), so its loss is "
            f"{float(loss.detach())} and no rank could update; leave such batches out on every rank, or set "
            'uneven_inputs to "join" and take the batches from the engine\'s loader or engine.join(loader)'
        )
        self.comm.note_error(error)
        raise error

    def loader_scalars(self) -> dict[str, Any]:
        """Return the position of the engine's loader, for a checkpoint."""
        loader = self.training_dataloader
        return {} if loader is None else {LOADER: loader.state_dict()}

    def restore_loader(self, scalars: Mapping[str, Any]) -> None:
        """Restore what `loader_scalars` returned; a loader that is not in the checkpoint keeps its
        position."""
        if self.training_dataloader is not None and LOADER in scalars:
            self.training_dataloader.load_state_dict(scalars[LOADER])
