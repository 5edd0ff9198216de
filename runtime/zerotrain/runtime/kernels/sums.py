"""Calls of the summing kernel: parts of all ranks into one fp32 tensor, with the sum of its squares.

One launch reads every part once, whatever their number (up to 64). Its bits are those of
`_native.accumulate_`. The sum of squares is exact to rounding, and the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zerotrain.runtime.kernels.device import DTYPES, stream_of

if TYPE_CHECKING:  # compiled code
    from zerotrain.runtime._native import Kernels

MOST_PARTS = 64
"""Parts that one launch adds; a launch for further ones reads what the one before wrote."""

_PARTS = (torch.float32, torch.bfloat16)
_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}


def can_sum(into: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Return whether the kernel takes these tensors. A part that lies where the sum goes must be in the first
    launch."""
    dtype = parts[0].dtype if parts else into.dtype
    return (
        into.dtype is torch.float32
        and dtype in _PARTS
        and into.is_contiguous()
        and all(part.dtype is dtype and part.is_contiguous() for part in parts)
        and all(part.data_ptr() != into.data_ptr() for part in parts[MOST_PARTS:])
    )


def sum_parts(
    kernels: Kernels,
    into: torch.Tensor,
    parts: Sequence[torch.Tensor],
    scale: float,
    *,
    overwrite: bool = False,
    squares: torch.Tensor | None = None,
) -> None:
    """Compute `into (+)= scale * part` for one part after the other; `squares`, one float64 element, gets the
    sum of squares of the result. Without parts `into` is only read."""
    stream, numel = stream_of(into), into.numel()
    if any(part.numel() != numel for part in parts):
        raise ValueError(f"sum_parts: every part must have the {numel} elements of the target")
    workspace = None if squares is None else _workspace(into, stream)
    kernels.sum_parts(
        into.data_ptr(),
        [part.data_ptr() for part in parts],
        dtype=DTYPES[parts[0].dtype if parts else into.dtype],
        numel=numel,
        scale=scale,
        overwrite=overwrite,
        squares=0 if squares is None else squares.data_ptr(),
        workspace=0 if workspace is None else workspace.data_ptr(),
        stream=stream,
    )


def square_sums(kernels: Kernels, flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each fp32 tensor, in float64 on their device."""
    sums = torch.empty(len(flats), dtype=torch.float64, device=flats[0].device)
    for flat, found in zip(flats, sums, strict=True):
        sum_parts(kernels, flat, (), 1.0, squares=found)
    return sums


def _workspace(into: torch.Tensor, stream: int) -> torch.Tensor:
    """Return the workspace of a stream, which launches on it use one after the other and leave zeroed where
    it matters."""
    from zerotrain.runtime._native import sum_workspace

    key, numel = (into.device, stream), sum_workspace(into.numel())
    found = _workspaces.get(key)
    if found is None or found.numel() < numel:
        found = torch.zeros(numel, dtype=torch.float64, device=into.device)
        _workspaces[key] = found
    return found
