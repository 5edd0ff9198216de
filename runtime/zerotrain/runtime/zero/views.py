"""The parameters of a unit: views of its whole weights, or placeholders while these are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zerotrain.runtime.zero.placeholder import hide, show


class ParameterViews:
    """Shows and hides the values of one unit's parameters; the objects stay."""

    def __init__(self, parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> None:
        """`views` are the parameters' places in the whole weights."""
        self._parameters, self._views = parameters, views
        self._classes = [type(parameter) for parameter in parameters]
        dtype, device = views[0].dtype, views[0].device
        self._nan = torch.zeros((), dtype=dtype, device=device)
        if dtype.is_floating_point:
            self._nan.fill_(float("nan"))

    def show_all(self) -> None:
        """Make the parameters views of the whole weights."""
        for parameter, original, view in zip(self._parameters, self._classes, self._views, strict=True):
            show(parameter, original, view)

    def hide_all(self) -> None:
        """Make the parameters refuse reads: their values are elsewhere, or about to change."""
        for parameter in self._parameters:
            hide(parameter, self._nan)

    def show(self, parameter: nn.Parameter) -> None:
        """Show one parameter."""
        place = next(index for index, member in enumerate(self._parameters) if member is parameter)
        show(parameter, self._classes[place], self._views[place])

    def hide(self, parameter: nn.Parameter) -> None:
        """Hide one parameter."""
        hide(parameter, self._nan)

    def moved(self) -> list[tuple[int, torch.Tensor]]:
        """Return index and place of each parameter that is shown and was given other memory."""
        pairs = enumerate(zip(self._parameters, self._views, strict=True))
        return [
            (index, view)
            for index, (parameter, view) in pairs
            if parameter.data_ptr() != view.data_ptr() and (view.numel() or parameter.numel())
        ]

    def release(self) -> None:
        """Give the parameters, whose values are whole, tensors of their own."""
        for parameter, original, view in zip(self._parameters, self._classes, self._views, strict=True):
            show(parameter, original, view.clone())
