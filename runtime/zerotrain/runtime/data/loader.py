"""Micro-batches of one rank, and the position that a checkpoint keeps.

A global batch of B samples is dealt out micro-step by micro-step, rank-strided: sample `base + j * world +
rank` is the j-th of this rank. So the samples of one optimizer step, over all ranks and micro-steps, depend
on B alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zerotrain.contract.config import BatchConfig
from zerotrain.runtime.data.corpus import Corpus
from zerotrain.runtime.data.errors import DataError
from zerotrain.runtime.data.order import SampleOrder


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Division of the samples among ranks and micro-batches, and the length of a sample."""

    rank: int
    world_size: int
    batch: BatchConfig
    context: int


class TokenLoader:
    """Endless int64 batches `[micro_batch_size, context + 1]`; epochs follow one another."""

    def __init__(self, corpus: Corpus, shape: Shape, *, seed: int, vocabulary: int | None = None) -> None:
        """Raises DataError when the corpus is shorter than one sample."""
        self._corpus = corpus
        self._shape = shape
        self._seed = seed
        self._vocabulary = vocabulary
        # Windows do not overlap except for one token: the last of a window is the first input of the next.
        self.num_windows = (corpus.num_tokens - 1) // shape.context
        if self.num_windows < 1:
            raise DataError(
                f"the data has {corpus.num_tokens} tokens but one sample needs {shape.context + 1}; "
                "give more data or a smaller context"
            )
        self._order = SampleOrder(num_windows=self.num_windows, seed=seed)
        self._samples_done = 0
        """Samples that all ranks together have finished; advances by whole global batches."""

    def step_batches(self) -> Iterator[torch.Tensor]:
        """Yield the micro-batches of one optimizer step; the position advances after the last one."""
        shape, batch = self._shape, self._shape.batch
        for micro in range(batch.gradient_accumulation_steps):
            base = self._samples_done + micro * batch.micro_batch_size * shape.world_size + shape.rank
            numbers = [base + j * shape.world_size for j in range(batch.micro_batch_size)]
            yield self._batch(numbers)
        self._samples_done += batch.train_batch_size

    def _batch(self, numbers: list[int]) -> torch.Tensor:
        context = self._shape.context
        rows = [self._corpus.read(self._order.window(number) * context, context + 1) for number in numbers]
        ids = np.stack(rows)
        if self._vocabulary is not None and (ids.max() >= self._vocabulary or ids.min() < 0):
            bad = int(ids.max() if ids.max() >= self._vocabulary else ids.min())
            raise DataError(
                f"token id {bad} is outside the model's vocabulary of {self._vocabulary}; "
                "give data that was tokenised for this model"
            )
        return torch.from_numpy(ids)

    def state(self) -> dict[str, Any]:
        """Return the position as JSON-compatible values; the same on every rank."""
        return {
            "samples_done": self._samples_done,
            "seed": self._seed,
            "context": self._shape.context,
            "fingerprint": self._corpus.fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Continue from a stored position; return the differences from the run that stored it, for the
        log."""
        self._samples_done = int(state["samples_done"])
        mine = self.state()
        return tuple(
            f"{name} was {state.get(name)!r} when the checkpoint was written and is {mine[name]!r} now: "
            "the sequence of samples is not that of an uninterrupted run"
            for name in ("seed", "context", "fingerprint")
            if state.get(name) != mine[name]
        )
