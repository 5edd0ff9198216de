"""Sums over flat gradients: by the native kernels on CPU where they are compiled in, else by torch.

Both ways add in the order of the ranks with one fused multiply-add per part, so they give the same bits.
Called by whoever ends a reduction (`zero/reduce.py`, `comm`) and by the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch

_TILE = 1 << 17
"""Elements that torch widens at a time: a float64 copy of a whole shard would be twice its size."""
_WIDE, _PARTS = torch.float32, (torch.float32, torch.bfloat16)


def _load() -> ModuleType | None:
    try:
        return import_module("zerotrain.runtime._native")
    except ImportError:
        return None


_native = _load()


@torch.no_grad()
def accumulate_(
    into: torch.Tensor, parts: Sequence[torch.Tensor], scale: float, *, overwrite: bool = False
) -> None:
    """`into (+)= scale * part` for every part in turn; all 1-D of one length, the parts of one dtype.

    With `overwrite` what `into` held does not count; a part may then lie in the same memory.
    """
    if overwrite and any(part.data_ptr() == into.data_ptr() for part in parts):
        for start in range(0, into.numel(), _TILE):
            stop = min(start + _TILE, into.numel())
            total = torch.empty_like(into[start:stop])
            accumulate_(total, [part[start:stop] for part in parts], scale, overwrite=True)
            into[start:stop].copy_(total)
        return
    is_fast = into.device.type == "cpu" and into.dtype is _WIDE and parts[0].dtype in _PARTS
    if _native is not None and is_fast:
        _native.accumulate_(into, parts, scale, overwrite=overwrite)
        return
    if overwrite:
        into.zero_()
    for part in parts:
        into.add_(part, alpha=scale)


@torch.no_grad()
def sum_squares(flat: torch.Tensor) -> float:
    """Sum of squares of a 1-D tensor in float64."""
    if _native is not None and flat.device.type == "cpu" and flat.dtype is _WIDE:
        return float(_native.sum_squares(flat))
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _TILE):
        wide = flat[start : start + _TILE].double()
        total += wide.dot(wide)
    return float(total)
