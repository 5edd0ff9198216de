"""`deepspeed.checkpoint.utils`: copies of tensors that may be views of larger ones."""

from __future__ import annotations

from typing import Any

import torch

from zerotrain.runtime.deepspeed.absent import attributes_of

__all__ = ["clone_tensors_for_torch_save"]

__getattr__ = attributes_of(__name__)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return the same lists, tuples and dicts with every tensor as a copy of its own size on the device.

    Saving a view of a unit's buffer would write the whole buffer.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True).contiguous()
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(clone_tensors_for_torch_save(value, device) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item
