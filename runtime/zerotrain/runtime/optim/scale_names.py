"""DeepSpeed's names on the optimizer for losses and the outcome of the last step; the engine supplies what
they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ScaleNames:
    """Base of the engine's optimizer. The engine sets the attributes to functions of its own."""

    read_loss_scale: Callable[[], float] = staticmethod(lambda: 1.0)
    read_skipped: Callable[[], bool] = staticmethod(lambda: False)
    run_backward: Callable[..., Any]

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Accumulate the gradients of a scalar loss, which is not divided by the accumulation steps.

        Errors are those of `engine.backward`.
        """
        self.run_backward(loss, retain_graph=retain_graph)

    @property
    def loss_scale(self) -> float:
        """Present factor on the loss; 1 unless fp16 computes."""
        return self.read_loss_scale()

    @property
    def cur_scale(self) -> float:
        """Present factor on the loss, by another name."""
        return self.read_loss_scale()

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because the gradient was not finite."""
        return self.read_skipped()
