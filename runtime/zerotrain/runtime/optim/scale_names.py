"""DeepSpeed's names on the optimizer for the outcome of the last step; the engine supplies the values."""

from __future__ import annotations

from collections.abc import Callable


class ScaleNames:
    """Base of the engine's optimizer. The engine sets the two attributes to functions of its own."""

    read_loss_scale: Callable[[], float] = staticmethod(lambda: 1.0)
    read_skipped: Callable[[], bool] = staticmethod(lambda: False)

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
