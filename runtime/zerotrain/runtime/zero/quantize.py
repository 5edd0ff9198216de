"""Block quantisation of traffic (ZeRO++, https://arxiv.org/abs/2306.10209): int8 weights, int4 gradients.

Every block of 256 elements has one fp32 scale, its largest magnitude divided by the largest code, so the
error of a value is at most half a scale. Packed form: the codes of all blocks, then the scales. A block with
a non-finite value decodes to NaN, so an overflow is detected after the transfer as before it. On CUDA our
kernels take all rows at once, with the bits that torch computes on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerotrain.runtime.kernels import quantize as kernel_calls
from zerotrain.runtime.kernels.device import Family, find

BLOCK_NUMEL = 256
SCALE_BYTES = 4
_TILE, _CUDA_TILE = 1 << 16, 1 << 21
"""Number of elements processed at a time, a whole number of blocks; on CUDA launches cost more than cache
misses."""


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Codes of 8 or 4 bits, symmetric around zero."""

    bits: int

    def packed_bytes(self, numel: int) -> int:
        """Return the packed size in bytes of `numel` elements, a whole number of blocks."""
        return numel * self.bits // 8 + numel // BLOCK_NUMEL * SCALE_BYTES

    @torch.no_grad()
    def pack(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        """Quantise every row of `rows` (rows, ..., elements) apart, as each goes to another rank, into
        `packed_bytes` bytes each."""
        runs = rows.reshape(1, 1, -1) if rows.dim() == 1 else rows.unsqueeze(1) if rows.dim() == 2 else rows
        kernels = find(rows, Family.QUANTIZE)
        if kernels is not None and kernel_calls.can_pack(runs):
            kernel_calls.pack(kernels, runs, into, bits=self.bits)
            return
        for row, packed in zip(runs, into.view(len(runs), -1), strict=True):
            self._pack_row(row.reshape(-1), packed)

    @torch.no_grad()
    def unpack(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        """Undo `pack`, up to rounding, into the rows of a floating tensor (rows, elements), or into one
        row."""
        rows = into if into.dim() == 2 else into.unsqueeze(0)
        kernels = find(into, Family.QUANTIZE)
        if kernels is not None and kernel_calls.can_unpack(packed, rows):
            kernel_calls.unpack(kernels, packed, rows, bits=self.bits)
            return
        for one, row in zip(packed.reshape(len(rows), -1), rows, strict=True):
            self._unpack_row(one, row)

    @torch.no_grad()
    def unpack_sum(self, packed: torch.Tensor, into: torch.Tensor, spare: torch.Tensor) -> None:
        """Set 1-D fp32 `into` to the sum of the rows of `packed`, added in fp32 in their order; `spare` is
        overwritten."""
        kernels = find(into, Family.QUANTIZE)
        if kernels is not None and packed.is_contiguous():
            kernel_calls.unpack_sum(kernels, packed, into, rows=len(packed), bits=self.bits)
            return
        into.zero_()
        for one in packed:
            self._unpack_row(one, spare)
            into.add_(spare)

    def _pack_row(self, values: torch.Tensor, into: torch.Tensor) -> None:
        codes, scales = self._split(into, values.numel())
        for start, stop in _tiles(values):
            blocks = values[start:stop].float().view(-1, BLOCK_NUMEL)
            scale = blocks.abs().amax(dim=1) / self._largest
            scales[start // BLOCK_NUMEL : stop // BLOCK_NUMEL] = scale
            steps = blocks / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
            # The limits matter where the scale is subnormal, and rounds, or NaN.
            steps = steps.nan_to_num(0.0, 0.0, 0.0).clamp_(-self._largest, self._largest)
            whole = steps.round_().to(torch.int8).view(-1)
            codes[start * self.bits // 8 : stop * self.bits // 8] = self._join(whole)

    def _unpack_row(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        codes, scales = self._split(packed, into.numel())
        for start, stop in _tiles(into):
            whole = self._part(codes[start * self.bits // 8 : stop * self.bits // 8])
            scale = scales[start // BLOCK_NUMEL : stop // BLOCK_NUMEL]
            values = whole.float().view(-1, BLOCK_NUMEL) * scale.unsqueeze(1)
            into[start:stop] = values.view(-1)

    @property
    def _largest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _split(self, packed: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        code_bytes = numel * self.bits // 8
        return packed[:code_bytes], packed[code_bytes:].view(torch.float32)

    def _join(self, whole: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            return whole.view(torch.uint8)
        pairs = (whole + 8).view(torch.uint8).view(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 4)

    def _part(self, codes: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            return codes.view(torch.int8)
        pairs = torch.stack((codes & 0xF, codes >> 4), dim=1)
        return pairs.view(torch.int8).view(-1) - 8


def _tiles(flat: torch.Tensor) -> Iterator[tuple[int, int]]:
    size = _TILE if flat.device.type == "cpu" else _CUDA_TILE
    for start in range(0, flat.numel(), size):
        yield start, min(start + size, flat.numel())


INT8, INT4 = Quantizer(8), Quantizer(4)
