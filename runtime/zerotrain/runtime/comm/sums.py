"""Sums over flat gradients: by the native kernels on CPU and ours on CUDA where there are any, else by torch.

All add in rank order with one fused multiply-add per part, so they give the same bits. A sum in bf16 is
computed in fp32 and rounded once, to nearest with ties to even. Called at the end of a reduction
(`zero/reduce.py`, `comm`) and by the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from math import isfinite
from types import ModuleType

import torch

from zerotrain.runtime.kernels.device import Family, find
from zerotrain.runtime.kernels.sums import can_sum, square_sums, sum_parts

_TILE = 1 << 17
"""Elements that torch widens at a time: a float64 copy of a whole shard would be twice its size."""
_CUDA_TILE = 1 << 24
"""Elements that torch widens at a time on CUDA, where launches cost more than cache misses."""
_ROW = 1 << 10
"""Elements per row on CUDA, whose squares are added in float32."""
_PARTS = (torch.float32, torch.bfloat16)


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
    """Compute `into (+)= scale * part` for one part after the other; all are 1-D of one length, the parts of
    one dtype.

    With `overwrite` the old contents of `into` do not count; a part may then lie in the same memory.
    """
    kernels = find(into, Family.SUMS)
    if kernels is not None and can_sum(into, parts):
        sum_parts(kernels, into, parts, scale, overwrite=overwrite)
        return
    if overwrite and any(part.data_ptr() == into.data_ptr() for part in parts):
        _overwrite_parts(into, parts, scale)
        return
    is_fast = into.device.type == "cpu" and into.dtype in _PARTS and parts[0].dtype in _PARTS
    if _native is not None and is_fast:
        _native.accumulate_(into, parts, scale, overwrite=overwrite)
        return
    if into.dtype is torch.bfloat16:
        _round_sums(into, parts, scale, overwrite=overwrite)
        return
    if overwrite:
        first, *parts = parts
        into.copy_(first)
        if scale != 1.0:
            into.mul_(scale)
    for part in parts:
        into.add_(part, alpha=scale)


def _round_sums(into: torch.Tensor, parts: Sequence[torch.Tensor], scale: float, *, overwrite: bool) -> None:
    """Run `accumulate_` in fp32, and round the sums into `into`."""
    for tile in _tiles_of(into, divisor=8):  # fp32 copies must not take much of a device's memory
        total = into[tile].float()
        accumulate_(total, [part[tile] for part in parts], scale, overwrite=overwrite)
        into[tile].copy_(total)


def _tiles_of(flat: torch.Tensor, *, divisor: int = 1) -> Iterator[slice]:
    size = (_TILE if flat.device.type == "cpu" else _CUDA_TILE) // divisor
    for start in range(0, flat.numel(), size):
        yield slice(start, min(start + size, flat.numel()))


def _overwrite_parts(into: torch.Tensor, parts: Sequence[torch.Tensor], scale: float) -> None:
    """Run `accumulate_` with `overwrite`, where `into` is one of the parts."""
    if len(parts) == 1:
        if scale != 1.0:
            into.mul_(scale)
        return
    for tile in _tiles_of(into):
        total = torch.empty_like(into[tile])
        accumulate_(total, [part[tile] for part in parts], scale, overwrite=True)
        into[tile].copy_(total)


@torch.no_grad()
def sums_of_squares(flats: Sequence[torch.Tensor]) -> list[float]:
    """Return the sum of squares of each 1-D tensor in float64; its bits do not depend on the number of calls.

    On CUDA all sums are copied to the host at once; without our kernel, rows of 1,024 elements are added in
    float32.
    """
    beside = [flat for flat in flats if flat.device.type != "cpu"]
    found = iter(_on_gpu(beside) if beside else ())
    return [_on_host(flat) if flat.device.type == "cpu" else next(found) for flat in flats]


@torch.no_grad()
def squares_on_device(flats: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the values of `sums_of_squares`, float64 on the tensors' device, without waiting for it.

    None where our kernel may not be used for all of them: without it, a sum that is infinite says nothing
    about the values.
    """
    kernels = find(flats[0], Family.SUMS) if flats else None
    if kernels is None or not all(can_sum(flat, ()) for flat in flats):
        return None
    return square_sums(kernels, flats)


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Return the value of `sums_of_squares` for one tensor, on its device, 0-d float64. On CUDA without our
    kernel it may be infinite for values that are finite."""
    if flat.device.type == "cpu":
        return torch.tensor(_on_host(flat), dtype=torch.float64)
    kernels = find(flat, Family.SUMS)
    if kernels is not None and can_sum(flat, ()):
        return square_sums(kernels, [flat])[0]
    return _by_rows(flat)


def _on_gpu(flats: Sequence[torch.Tensor]) -> list[float]:
    exact = squares_on_device(flats)
    if exact is not None:
        known: list[float] = exact.tolist()
        return known
    sums = [_by_rows(flat) for flat in flats]
    found: list[float] = torch.stack(sums).tolist()
    # Recompute sums that are not finite in float64: squares may overflow float32 although the values are
    # finite.
    return [
        value if isfinite(value) else float(_by_tiles(flat)) for value, flat in zip(found, flats, strict=True)
    ]


def _on_host(flat: torch.Tensor) -> float:
    if _native is not None and flat.dtype in _PARTS:
        return float(_native.sum_squares(flat))
    return float(_by_tiles(flat))


def _by_tiles(flat: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for tile in _tiles_of(flat):
        wide = flat[tile].double()
        total += wide.dot(wide)
    return total


def _by_rows(flat: torch.Tensor) -> torch.Tensor:
    rows = flat.numel() // _ROW
    norms = torch.linalg.vector_norm(flat[: rows * _ROW].view(rows, _ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[rows * _ROW :], dtype=torch.float32)
    total: torch.Tensor = norms.double().square().sum() + rest.double().square()
    return total
