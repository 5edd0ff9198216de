"""Splits fp32 values into a bf16 upper half and an int16 remainder: two bytes less per weight than fp32 with
bf16.

`bits = (high << 16) + low` with `high` rounded half up, so that `low` fits an int16 (ties to even would need
+32768). Exact for every finite value, also one that rounds to infinity. The native kernels compute the same
bits; this is for CUDA, for rules without a kernel and for reading and writing.
"""

from __future__ import annotations

import math

import torch


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 into (bf16, int16). Every NaN becomes the same one, since those with high payloads would
    wrap."""
    bits = values.masked_fill(values.isnan(), math.nan).view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Undo `split`: return a new fp32 tensor."""
    bits = high.view(torch.int16).to(torch.int32)
    return (bits << 16).add_(low).view(torch.float32)


def round_half_up(values: torch.Tensor) -> torch.Tensor:
    """Return the bf16 half of `split`; ties go away from zero."""
    return split(values)[0]
