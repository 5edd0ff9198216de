"""Calls of the quantising kernels: all rows in one launch, with the bits of `zero/quantize.py` on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zerotrain.runtime.kernels.device import DTYPES, stream_of

if TYPE_CHECKING:  # compiled code
    from zerotrain.runtime._native import Kernels


def can_pack(values: torch.Tensor) -> bool:
    """Return whether the kernels take these values: rows of runs without gaps."""
    return values.dtype in DTYPES and (values.stride(-1) == 1 or values.shape[-1] <= 1)


def can_unpack(packed: torch.Tensor, into: torch.Tensor) -> bool:
    """Return whether the kernels take these packed rows and this target."""
    return into.dtype in DTYPES and into.is_contiguous() and packed.is_contiguous()


def pack(kernels: Kernels, values: torch.Tensor, into: torch.Tensor, *, bits: int) -> None:
    """Quantise every row of `values` (rows, runs, elements) apart; `into` holds the packed rows one behind
    the other. A run is a whole number of blocks."""
    rows, pieces, numel = values.shape
    kernels.quantize(
        values.data_ptr(),
        dtype=DTYPES[values.dtype],
        packed=into.data_ptr(),
        bits=bits,
        rows=rows,
        row_stride=values.stride(0),
        pieces=pieces,
        piece_stride=values.stride(1),
        piece_numel=numel,
        stream=stream_of(values),
    )


def unpack(kernels: Kernels, packed: torch.Tensor, into: torch.Tensor, *, bits: int) -> None:
    """Undo `pack`, up to rounding, into the contiguous rows of `into` (rows, elements)."""
    rows, numel = into.shape
    kernels.dequantize(
        packed.data_ptr(),
        into.data_ptr(),
        dtype=DTYPES[into.dtype],
        bits=bits,
        rows=rows,
        numel=numel,
        stream=stream_of(into),
    )


def unpack_sum(kernels: Kernels, packed: torch.Tensor, into: torch.Tensor, *, rows: int, bits: int) -> None:
    """Set 1-D fp32 `into` to the sum of all unpacked rows, added in their order."""
    kernels.dequantize_sum(
        packed.data_ptr(), into.data_ptr(), bits=bits, rows=rows, numel=into.numel(), stream=stream_of(into)
    )
