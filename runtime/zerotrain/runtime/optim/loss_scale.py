"""The factors on losses: the loss scale, and the division by the accumulation steps.

[Note: loss scale] A factor on an fp16 loss keeps small gradients from vanishing; it reacts to overflows. The
engine multiplies the loss by `scale`; the step divides by it again, in the same factor that clips. The
dynamic scale takes the same values as DeepSpeed's `DynamicLossScaler` for the same overflows and settings, so
that DeepSpeed's configurations have the same meaning here.

[Note: loss division] Losses are divided by the accumulation steps, exactly also where the loss is bf16. The
gradient of a bf16 loss begins as a bf16 number, and bf16 cannot represent a third: it is 0.333984, 0.2 % too
much in every element of the gradient. So where bf16 computes, a step that begins with a bf16 loss divides in
backward only by the power of two in the number of steps, which is exact. It divides by the odd rest in fp32:
in the factor that removes the loss scale from the sum of the gradients and clips it. Whether it does so is
the same on every rank, which the step record checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zerotrain.contract.config import PrecisionConfig
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.zero.gradients import UnitGradients

FACTOR = 2.0
"""Factor of a back-off and of a growth."""


class LossScaleError(RuntimeError):
    """Error of gradients that overflow although the loss scale has reached its minimum."""

    exit_code: ExitCode = ExitCode.DIVERGED


class LossScaler:
    """The loss scale of one engine; see [Note: loss scale]. Equal on every rank, since all ranks agree on
    what overflowed.

    fp32 and bf16 have the exponent range of the loss itself: their scale is 1 and stays so. fp16 computes
    where parameters are cast to it, or under autocast.
    """

    def __init__(self, precision: PrecisionConfig) -> None:
        self.is_active = is_fp16 = "fp16" in (precision.compute_dtype, precision.autocast_dtype)
        self.is_dynamic = is_fp16 and precision.loss_scale == 0.0
        self.scale = 1.0
        if is_fp16:
            self.scale = precision.loss_scale or FACTOR**precision.initial_scale_power
        self._settings = precision
        self._iteration = 0
        self._last_overflow = -1
        self._hysteresis = precision.hysteresis
        """Number of overflows left before the scale falls, including the one that makes it fall."""

    def update(self, *, overflow: bool, where: Sequence[str] = ()) -> None:
        """Update the scale after a step; `where` names the units whose gradients overflowed, for the error.

        Raises LossScaleError when the scale would have to fall below `fp16.min_loss_scale` and
        `fp16.raise_error_at_min_scale` is on.
        """
        if not self.is_dynamic:
            return
        if overflow:
            self._back_off(where)
            self._last_overflow = self._iteration
        else:
            self._grow()
        self._iteration += 1

    def _back_off(self, where: Sequence[str]) -> None:
        settings = self._settings
        if self._hysteresis > 1:
            self._hysteresis -= 1
            return
        if self.scale == settings.min_loss_scale and settings.raise_error_at_min_scale:
            units = f" in units {list(where)[:5]} of this rank" if where else " on another rank"
            raise LossScaleError(
                f"the gradients overflow{units} although fp16.min_loss_scale, {settings.min_loss_scale:g}, "
                "is reached: the training has most likely diverged. Lower the learning rate, use bf16, lower "
                "fp16.min_loss_scale, or set fp16.raise_error_at_min_scale to false to go on skipping steps"
            )
        self.scale = max(self.scale / FACTOR, settings.min_loss_scale)

    def _grow(self) -> None:
        settings = self._settings
        if settings.consecutive_hysteresis:
            self._hysteresis = settings.hysteresis
        good_steps = self._iteration - self._last_overflow - 1  # before this step, as DeepSpeed counts
        if good_steps > 0 and good_steps % settings.loss_scale_window == 0:
            self._hysteresis = settings.hysteresis
            self.scale *= FACTOR

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "scale": self.scale,
            "iteration": self._iteration,
            "last_overflow": self._last_overflow,
            "hysteresis": self._hysteresis,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`. A fixed scale, or none, stays that of this run's
        configuration."""
        if self.is_dynamic and "iteration" in state:
            self.scale = float(state["scale"])
            self._iteration = int(state["iteration"])
            self._last_overflow = int(state["last_overflow"])
            self._hysteresis = int(state["hysteresis"])


class LossDivision:
    """The division of the losses of one engine's steps, see [Note: loss division].

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
                part.scale(1.0 / self.rest)
            self.rest = 1


def _odd_part(number: int) -> int:
    """Return the number without its factors of two."""
    return number // (number & -number)
