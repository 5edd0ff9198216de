"""The one table between dtype names of the layout and torch's objects."""

from __future__ import annotations

import torch

from zerotrain.runtime.zero.layout import LayoutError

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Layout name of a torch dtype. Raises LayoutError for one that cannot be sharded."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise LayoutError(
            f"parameters of {dtype} cannot be sharded; known are {sorted(TORCH_DTYPES)}"
        ) from None
