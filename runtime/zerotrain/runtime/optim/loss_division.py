"""The division of losses by the accumulation steps, exact also where the loss is bf16.

The gradient of a bf16 loss begins as a bf16 number, and bf16 cannot represent a third: it is 0.333984, 0.2 %
too much in every element of the gradient. So where bf16 computes, a step that begins with a bf16 loss divides
in backward only by the power of two in the number of steps, which is exact. It divides by the odd rest in
fp32: in the factor that removes the loss scale from the sum of the gradients and clips it. Whether it does so
is the same on every rank, which the step record checks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerotrain.contract.config import PrecisionConfig
from zerotrain.runtime.zero.gradients import UnitGradients, scale_gradients


class LossDivision:
    """The division of the losses of one engine's steps.

    Attributes:
        rest: divisor that is still to be applied to the sum of this step's gradients; 1 unless the step
            began with a bf16 loss and the number of its micro-batches is not a power of two.
    """

    def __init__(self, precision: PrecisionConfig) -> None:
        self._may_leave_rest = precision.compute_dtype == "bf16"
        self.rest = 1

    def divide(self, loss: torch.Tensor, steps: int | None, *, begins: bool) -> torch.Tensor:
        """Return the loss that backward starts from, divided by a number of steps (None = not divided).
        `begins`: this step has no gradient yet."""
        if begins:
            leaves = self._may_leave_rest and steps is not None and loss.dtype is torch.bfloat16
            self.rest = _odd_part(steps) if leaves and steps else 1
        if steps is not None:
            return loss / (steps // self.rest)
        return loss if self.rest == 1 else loss * self.rest

    def settle(self, gradients: Iterable[UnitGradients]) -> None:
        """Divide this step's gradients by the rest now, before gradients that other code scaled are added."""
        if self.rest != 1:
            for part in gradients:
                scale_gradients(part, 1.0 / self.rest)
            self.rest = 1


def _odd_part(number: int) -> int:
    """Return the number without its factors of two."""
    return number // (number & -number)
