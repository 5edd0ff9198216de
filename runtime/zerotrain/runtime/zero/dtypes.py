"""Dtypes of parameters: the table between the layout's names and torch's objects, and the choice for
storage."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zerotrain.runtime.zero.layout import DTYPE_BYTES, LayoutError

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, _SHORT.get(name, name)) for name in DTYPE_BYTES}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the layout's name of a torch dtype. Raises LayoutError for one that cannot be sharded."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise LayoutError(
            f"parameters of {dtype} cannot be sharded; known are {sorted(TORCH_DTYPES)}"
        ) from None


class StoredDtypes:
    """Choice of the dtype in which each parameter of a model is stored.

    Trained parameters take the compute precision, integer ones keep their dtype. Frozen floating ones take
    the compute precision if it is narrower than fp32, which a precision block requested. In fp32, the
    default, they keep their own dtype, unless trained parameters of the same dtype are converted: layers of
    one dtype stay so.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], compute_dtype: str) -> None:
        """`parameters` are all of the model."""
        self._compute_dtype = compute_dtype
        self._converted = {parameter.dtype for parameter in parameters if parameter.requires_grad}

    def of(self, parameter: nn.Parameter) -> str:
        """Return the layout's name of the parameter's dtype. Raises LayoutError for one that cannot be
        sharded."""
        if not parameter.dtype.is_floating_point:
            return dtype_name(parameter.dtype)
        keeps = self._compute_dtype == "fp32" and not parameter.requires_grad
        if keeps and parameter.dtype not in self._converted:
            return dtype_name(parameter.dtype)
        return self._compute_dtype
