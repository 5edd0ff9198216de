"""Calls of the Adam and AdamW kernels: runs of elements of any number of units, in few launches.

They have the bits of the native CPU kernel, for gradients in fp32 and bf16 and for all encodings of masters.
The factor of the gradients and the verdict that a step does not count may be on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerotrain.runtime.kernels.device import DTYPES, stream_of

if TYPE_CHECKING:  # compiled code
    from zerotrain.runtime._native import Kernels, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamArrays:
    """Elements `[start, start + numel)` of a unit, whose segments count in the unit's elements. All tensors
    are 1-D of one length; there is either a master or a remainder, which belongs to bf16 weights."""

    segments: Sequence[Segment]
    start: int = 0
    master: torch.Tensor | None
    remainder: torch.Tensor | None = None
    first: torch.Tensor
    second: torch.Tensor
    grad: torch.Tensor
    weight: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that there are."""
        every = (self.master, self.remainder, self.first, self.second, self.grad, self.weight)
        return [tensor for tensor in every if tensor is not None]

    def is_valid(self) -> bool:
        """Return whether the kernels take these tensors."""
        weight = None if self.weight is None else self.weight.dtype
        states = [self.first, self.second] if self.master is None else [self.first, self.second, self.master]
        if self.remainder is not None:
            is_encoded = self.master is None and weight is torch.bfloat16
            is_encoded = is_encoded and self.remainder.dtype is torch.int16
        else:
            is_encoded = self.master is not None and (weight is None or weight in DTYPES)
        return (
            is_encoded
            and self.grad.dtype in (torch.float32, torch.bfloat16)
            and all(state.dtype is torch.float32 for state in states)
            and all(one.is_contiguous() and one.numel() == self.first.numel() for one in self.tensors)
        )


def update(
    kernels: Kernels,
    rule: str,
    units: Sequence[AdamArrays],
    *,
    grad_scale: float = 1.0,
    factor: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Update units of the same dtypes by one step of "adam" or "adamw"; gradients stay as they are.

    `factor`, one float64 element on the device, replaces `grad_scale`. Where `found_inf`, one float64 element
    there, is not zero, nothing is written.
    """
    from zerotrain.runtime._native import AdamUnit

    given = [
        AdamUnit(
            rule,
            unit.segments,
            grad_scale=grad_scale,
            start=unit.start,
            stop=unit.start + unit.first.numel(),
            first=unit.first.data_ptr(),
            second=unit.second.data_ptr(),
            grad=unit.grad.data_ptr(),
            master=_address(unit.master),
            remainder=_address(unit.remainder),
            weight=_address(unit.weight),
        )
        for unit in units
        if unit.first.numel()
    ]
    if not given:
        return
    kernels.update(
        rule,
        given,
        grad=DTYPES[units[0].grad.dtype],
        weight="none" if units[0].weight is None else DTYPES[units[0].weight.dtype],
        factor=_address(factor),
        found_inf=_address(found_inf),
        stream=stream_of(units[0].grad),
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
