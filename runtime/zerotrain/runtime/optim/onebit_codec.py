"""Compression to one bit per element: the sign, with one fp32 scale per block. Used by 1-bit Adam's
collectives.

A block has 2,048 elements, the unit in which shards are cut, so a rank's part is compressed on its own and no
block crosses ranks. The scale is the root mean square of the block's real elements; gaps between parameters
are zeros and come out as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerotrain.runtime.zero.layout import ALIGN, UnitLayout

BLOCK = ALIGN
"""Number of elements that share a scale."""

_TILE_BLOCKS, _CUDA_TILE_BLOCKS = 64, 1 << 13
"""Number of blocks processed at a time; on CUDA launches cost more than cache misses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSigns:
    """A compressed flat tensor: `bits` holds 8 elements per byte, `scales` one fp32 per block."""

    bits: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, numel: int, device: torch.device) -> PackedSigns:
        """Allocate signs for `numel` elements, a multiple of the block."""
        return cls(
            bits=torch.empty(numel // 8, dtype=torch.uint8, device=device),
            scales=torch.empty(numel // BLOCK, dtype=torch.float32, device=device),
        )

    def framed(self, parts: int) -> torch.Tensor:
        """Return the signs as bytes, cut in equal parts of which each has its bits and then its scales."""
        rows = self.bits.view(parts, -1), self.scales.view(torch.uint8).view(parts, -1)
        return torch.cat(rows, dim=1).flatten()

    @classmethod
    def unframed(cls, frame: torch.Tensor, parts: int) -> PackedSigns:
        """Restore signs from the bytes of `framed`."""
        rows = frame.view(parts, -1)
        blocks = rows.shape[1] // (BLOCK // 8 + 4)
        return cls(
            bits=rows[:, : blocks * BLOCK // 8].flatten(),
            scales=rows[:, blocks * BLOCK // 8 :].flatten().view(torch.float32),
        )

    def part(self, index: int, parts: int) -> PackedSigns:
        """Return one of `parts` equal parts."""
        return PackedSigns(bits=self.bits.view(parts, -1)[index], scales=self.scales.view(parts, -1)[index])

    def add_to(self, target: torch.Tensor, *, weight: float) -> None:
        """Compute `target += weight * self`; gaps get values too, see `SignCodec.clear_gaps`."""
        rows, packed = target.view(-1, BLOCK), self.bits.view(-1, BLOCK // 8)
        weights = _bit_weights(target.device)
        for tile in _tiles(rows):
            positive = (packed[tile][..., None] & weights).ne(0).view(rows[tile].shape)
            scale = self.scales[tile][:, None]
            rows[tile].add_(torch.where(positive, scale, -scale), alpha=weight)


class SignCodec:
    """Compressor of flat tensors that cover the elements `[start, stop)` of a unit, in whole blocks."""

    def __init__(self, layout: UnitLayout, start: int, stop: int, device: torch.device) -> None:
        self._gaps = _gaps(layout, start, stop)
        real = torch.ones(stop - start, device=device)
        self.clear_gaps(real)
        self._counts = real.view(-1, BLOCK).sum(dim=1).clamp_(min=1.0)

    def clear_gaps(self, flat: torch.Tensor) -> None:
        """Zero the elements between and behind parameters."""
        for gap in self._gaps:
            flat[gap].zero_()

    def pack(self, value: torch.Tensor) -> PackedSigns:
        """Compress `value`, and leave in it the error of the compression."""
        signs = PackedSigns.empty(value.numel(), value.device)
        rows, packed = value.view(-1, BLOCK), signs.bits.view(-1, BLOCK // 8)
        weights = _bit_weights(value.device)
        for tile in _tiles(rows):
            part = rows[tile]
            scale = part.square().sum(dim=1).div_(self._counts[tile]).sqrt_()
            signs.scales[tile] = scale
            positive = part >= 0
            octets = positive.view(*packed[tile].shape, 8) * weights
            packed[tile] = octets.sum(dim=-1, dtype=torch.uint8)
            part.sub_(torch.where(positive, scale[:, None], -scale[:, None]))
        self.clear_gaps(value)
        return signs


def _bit_weights(device: torch.device) -> torch.Tensor:
    return torch.bitwise_left_shift(
        torch.ones(8, dtype=torch.uint8, device=device), torch.arange(8, dtype=torch.uint8, device=device)
    )


def _tiles(rows: torch.Tensor) -> Sequence[slice]:
    count, size = rows.shape[0], _TILE_BLOCKS if rows.device.type == "cpu" else _CUDA_TILE_BLOCKS
    return [slice(low, min(low + size, count)) for low in range(0, count, size)]


def _gaps(layout: UnitLayout, start: int, stop: int) -> list[slice]:
    gaps, end = [], 0
    for low, high in [*((part.start, part.stop) for part in layout.segments), (layout.padded_numel, 0)]:
        first, last = max(end, start), min(low, stop)
        if first < last:
            gaps.append(slice(first - start, last - start))
        end = high
    return gaps
