"""DeepSpeed's names on the optimizer for what the last step did; the engine answers them."""

from __future__ import annotations

from collections.abc import Callable


class ScaleNames:
    """Base of the engine's optimizer. The engine puts its functions into the two attributes."""

    read_loss_scale: Callable[[], float] = staticmethod(lambda: 1.0)
    read_skipped: Callable[[], bool] = staticmethod(lambda: False)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss as it is now; 1 unless fp16 computes."""
        return self.read_loss_scale()

    @property
    def cur_scale(self) -> float:
        """The same."""
        return self.read_loss_scale()

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because the gradient was not finite."""
        return self.read_skipped()
