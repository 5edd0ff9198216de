"""Linear layers that compute in FP8: how the product is entered, and the magnitudes that it saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import NamedTuple

import torch
from torch import nn

from zerotrain.runtime.fp8.product import Operand, Scheme, linear


class Fp8Range(NamedTuple):
    """Range of one operand in the layers' last products."""

    amax: float
    """Largest finite magnitude over all layers."""
    overflow_ratio: float
    """Share of the layers in which it held infinity or NaN, 0..1."""


class Fp8Layers:
    """Layers whose products are FP8, until `remove`. Their class, parameters and hooks stay as they are."""

    def __init__(self, layers: Sequence[nn.Linear], scheme: Scheme, device: torch.device) -> None:
        self._layers = layers
        self._magnitudes = torch.zeros(len(layers), len(Operand), device=device)
        for layer, magnitudes in zip(layers, self._magnitudes, strict=True):
            # An attribute of the instance hides the method of the class, and `remove` uncovers it.
            vars(layer)["forward"] = MethodType(_forward(scheme, magnitudes), layer)

    def __len__(self) -> int:
        return len(self._layers)

    def ranges(self) -> dict[Operand, Fp8Range]:
        """Return the ranges in the last products. Waits for the device."""
        columns = self._magnitudes.cpu().unbind(1)
        found = {}
        for operand in Operand:
            is_finite = columns[operand].isfinite()
            amax = float(columns[operand].where(is_finite, 0.0).max())
            found[operand] = Fp8Range(amax, 1.0 - float(is_finite.float().mean()))
        return found

    def remove(self) -> None:
        """Give the layers their own product back."""
        for layer in self._layers:
            vars(layer).pop("forward", None)


def _forward(scheme: Scheme, magnitudes: torch.Tensor) -> Callable[[nn.Linear, torch.Tensor], torch.Tensor]:
    """Return what replaces `nn.Linear.forward` in one layer."""

    def forward(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        return linear(input, layer.weight, layer.bias, scheme, magnitudes)

    return forward
