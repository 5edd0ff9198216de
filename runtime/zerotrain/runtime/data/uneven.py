"""Joint training of ranks with unequal numbers of batches or samples (`uneven_inputs` "join").

Before each update the ranks exchange the number of samples that they have for it, in one small collective. A
rank that has fewer batches repeats its last one at weight zero, so that it takes part in every collective.
The weights make the gradient the mean over all samples of the step, wherever they are, as if one process had
them all. A pass over the data ends with the last rank's data, at an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from zerotrain.runtime.comm.group import Comm


class Rounds:
    """Samples of every rank between two updates, and the resulting weights."""

    def __init__(self, comm: Comm, *, steps_taken: Callable[[], int]) -> None:
        """`steps_taken`: calls of the engine's `step()` so far, one per batch."""
        self.comm = comm
        self.steps_taken = steps_taken
        self.last: Any = None
        """The last batch of this rank that had samples."""
        self._weights: dict[int, float] = {}
        """Weights by number of the `step()` call that ends the batch."""

    def weight(self, step_call: int) -> float:
        """Return the weight of the batch that this call ends."""
        return self._weights.get(step_call, 1.0)

    def agree(self, sizes: list[int]) -> bool:
        """Exchange the sample counts of this rank's next batches, as many as are left to the update; set
        their weights, and return whether a rank has any samples. Raises ValueError, on every rank, when one
        has no batch to repeat."""
        rows = self.comm.gather_record([float(self.last is not None), *map(float, sizes)], label="samples")
        total = sum(sum(row[1:]) for row in rows)
        if not total:
            self._weights = {}
            return False
        if bare := [rank for rank, row in enumerate(rows) if not row[0]]:
            raise ValueError(
                f"ranks {bare} have no batch at all, so they have none to repeat while the others train; "
                "give every rank at least one"
            )
        share = len(sizes) * len(rows) / total
        first = self.steps_taken()
        self._weights = {first + index: size * share for index, size in enumerate(sizes)}
        return True


def joined(batches: Iterator[Any], rounds: Rounds, *, length: Callable[[], int]) -> Iterator[Any]:
    """Yield the batches and, while other ranks have data, repeated ones. `length`: batches up to the
    update."""
    while True:
        wanted = length()
        round_: list[Any] = list(islice(batches, wanted))
        sizes = [num_samples(batch) for batch in round_]
        for batch, size in zip(round_, sizes, strict=True):
            rounds.last = batch if size else rounds.last
        missing = wanted - len(round_)
        sizes += [0] * missing
        round_ += [None] * missing
        if not rounds.agree(sizes):
            return
        for batch, size in zip(round_, sizes, strict=True):
            before = rounds.steps_taken()
            yield batch if size else rounds.last
            if rounds.steps_taken() != before + 1:
                raise RuntimeError(
                    'with uneven_inputs "join" every batch is trained before the next one is taken: call '
                    "step() once for each (to look at data, use a loader of your own)"
                )


def num_samples(batch: Any) -> int:
    """Return the number of samples of a batch: the first size of its first tensor, at whatever depth; 0 for
    None and for empty containers. Raises TypeError for a batch without tensors, lists or texts."""
    found = _first_size(batch)
    if found is None:
        raise TypeError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} has; with uneven_inputs "
            '"join" a batch is a tensor, or a list, tuple or dictionary of them'
        )
    return found


def _first_size(batch: Any) -> int | None:
    if batch is None:
        return 0
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        parts = list(batch)
    else:
        return None
    sizes = (_first_size(part) for part in parts if part is not None)
    first = next((size for size in sizes if size is not None), None)
    return len(parts) if first is None and not isinstance(batch, Mapping) else (first if parts else 0)
