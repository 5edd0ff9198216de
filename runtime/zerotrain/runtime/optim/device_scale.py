"""The factor of a step's gradients on the device, for an update that starts before the host knows the norm.

The step makes it of the ranks' sums of squares, and the kernels of an update read it there (docs/adr/0073).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerotrain.runtime.zero.clipping import CLIP_EPSILON


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceScale:
    """Factor of the gradients of an update, and whether it happens: tensors of one float64 element."""

    factor: torch.Tensor
    found_inf: torch.Tensor | None
    """Flag of a gradient that is not finite: the update then writes nothing. None: every step counts."""


GradScale = float | DeviceScale
"""The factor on the host, or on the device for rules of which `takes_device_scale` is true."""


def on_host(scale: GradScale) -> float:
    """Return a factor that is known on the host."""
    assert not isinstance(scale, DeviceScale), "this rule needs the factor on the host"
    return scale


@torch.no_grad()
def device_scale(
    squares: torch.Tensor, *, gradient_scale: float, max_norm: float, skips_non_finite: bool
) -> DeviceScale:
    """Return the factor that removes `gradient_scale` and bounds the norm by `max_norm` (0 = no bound).

    `squares` are the ranks' sums of squares, float64. The arithmetic is that of `StepPipeline.grad_scale`, so
    divisors are tensors: torch multiplies by the reciprocal of a number.
    """
    total = squares.sum().view(1)
    scale = torch.full_like(total, gradient_scale)
    if max_norm > 0.0:
        factor = torch.full_like(total, max_norm) / (total.sqrt() / scale + CLIP_EPSILON)
        factor = factor.masked_fill_(factor > 1.0, 1.0) / scale
    else:
        factor = torch.full_like(total, 1.0 / gradient_scale)
    found_inf = (~squares.isfinite().all()).double().view(1) if skips_non_finite else None
    return DeviceScale(factor=factor, found_inf=found_inf)
