"""Models for tests of the trainer, named by `model.factory`."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional


class TinyModel(nn.Module):
    """A model that predicts the next byte from the one before; dropout draws from the random generators."""

    context = 8
    vocabulary = 256

    def __init__(
        self,
        *,
        width: int,
        dropout: float,
        step_seconds: float,
        poison: bool | str,
        no_memory_from: int | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))
        self.head = nn.Linear(width, 256)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: torch.Tensor
        self._step_seconds = step_seconds
        self._poison = poison
        self._no_memory_from = no_memory_from

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(self._step_seconds)
        self.calls += 1
        if self._no_memory_from is not None and int(self.calls) >= self._no_memory_from:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        logits = self.head(self.hidden(self.embed(ids[:, :-1])))
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        if self._poison == "gradient":  # the loss is finite, 0 * inf in its gradient is not
            zero: torch.Tensor = logits.float().mean() * 0.0
            return loss.add(zero.abs().sqrt())
        return loss * float("nan") if self._poison else loss


def build(
    *,
    width: int = 16,
    dropout: float = 0.1,
    step_seconds: float = 0.0,
    poison: bool | str = False,
    no_memory_from: int | None = None,
) -> nn.Module:
    """Build the model; the factory of the tests."""
    return TinyModel(
        width=width,
        dropout=dropout,
        step_seconds=step_seconds,
        poison=poison,
        no_memory_from=no_memory_from,
    )


def build_nothing() -> str:
    """Return no model, as a faulty factory does."""
    return "no model"


def build_badly() -> nn.Module:
    """Raise an error, as a faulty factory does."""
    raise KeyError("the user's own mistake")
