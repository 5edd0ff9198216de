"""The product of a linear layer in FP8, forward and backward, of bf16 tensors that stay bf16.

[Note: scales are powers of two] A scale is the power of two in (2 m / L, m / L], with m = the largest
magnitude of the group and L = half of the largest finite code. So no finite value saturates, dividing by the
scale is exact in bf16, and every element is rounded once, where it becomes a code. A group (a row, or the
whole tensor) with infinity or NaN gets an infinite scale, which makes all its results NaN: the overflow check
of the step sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from zerotrain.runtime.matmul_support import scaled_product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZE_STEP = 16
"""Number that divides every size of a product but its rows, as the GPU's kernels need it."""
SMALLEST_AMAX = 2.0**-80
"""Magnitude from which on scales are limited, so that those of zeros are finite."""
_EXPONENT_BITS = 0x7F800000


class Operand(IntEnum):
    """Operands of a layer's products, whose magnitudes are exported."""

    INPUT = 0
    WEIGHT = 1
    GRADIENT = 2


class Codes(NamedTuple):
    """Rows of FP8 codes with their scales: a value is its code times its scale."""

    values_RC: torch.Tensor
    scale: torch.Tensor
    """fp32, `[R, 1]` by rows, `[]` for the whole tensor."""
    amax: torch.Tensor
    """fp32, of the shape of `scale`: the largest magnitude of each group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """Scaling and formats of the products."""

    by_row: bool
    """Whether each row of an operand has a scale of its own, instead of one for the tensor."""
    weight_gradient: bool
    """Whether the product that gives the weight's gradient is FP8, too."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Format of gradients: rows have ranges of their own, so e4m3 with its third bit of mantissa is wide
        enough for them; one scale for all needs the range of e5m2."""
        return E4M3 if self.by_row else E5M2

    def quantize(self, values_RC: torch.Tensor, dtype: torch.dtype) -> Codes:
        """Return the codes of contiguous bf16 rows; see [Note: scales are powers of two]."""
        dims = 1 if self.by_row else (0, 1)
        amax = torch.linalg.vector_norm(
            values_RC, ord=torch.inf, dim=dims, keepdim=self.by_row, dtype=torch.float32
        )
        quotient = amax.clamp(min=SMALLEST_AMAX) / (torch.finfo(dtype).max / 2)
        scale = (quotient.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
        return Codes((values_RC * scale.reciprocal().to(values_RC.dtype)).to(dtype), scale, amax)

    def product(self, a: Codes, b: Codes, *, fast_sum: bool = False) -> torch.Tensor:
        """Return a b^T in bf16."""
        return scaled_product(a.values_RC, a.scale, b.values_RC, b.scale, fast_sum=fast_sum)


def linear(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    scheme: Scheme,
    magnitudes: torch.Tensor,
) -> torch.Tensor:
    """Return `functional.linear` of `x`, `[..., K]`, with the product in FP8.

    `magnitudes`, `[3]` fp32, gets the largest magnitude of each `Operand`. Operands that are not bf16, or
    empty, take torch's own product, with its errors. Sharded parameters are made whole as for torch's
    functions.
    """
    operands = (x, weight_NK) if bias_N is None else (x, weight_NK, bias_N)
    if has_torch_function(operands):
        result: torch.Tensor = handle_torch_function(
            linear, operands, x, weight_NK, bias_N, scheme, magnitudes
        )
        return result
    if not x.numel() or any(each.dtype != torch.bfloat16 for each in operands):
        return functional.linear(x, weight_NK, bias_N)
    rows_MK = x.reshape(-1, x.shape[-1])
    product: torch.Tensor = _LinearProduct.apply(rows_MK, weight_NK, scheme, magnitudes)  # type: ignore[no-untyped-call]
    result = product.view(*x.shape[:-1], weight_NK.shape[0])
    return result if bias_N is None else result + bias_N


class _LinearProduct(torch.autograd.Function):
    """x W^T. It keeps what torch's own product keeps, the bf16 operands, and makes codes again in backward,
    where they are scaled along other sums."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, weight_NK: torch.Tensor, scheme: Scheme, magnitudes: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.scheme, ctx.magnitudes = scheme, magnitudes
        x = scheme.quantize(x_MK.contiguous(), E4M3)
        weight = scheme.quantize(weight_NK.contiguous(), E4M3)
        x = _noted(x, magnitudes, Operand.INPUT)
        weight = _noted(weight, magnitudes, Operand.WEIGHT)
        return scheme.product(x, weight, fast_sum=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x_MK, weight_NK), scheme = ctx.saved_tensors, ctx.scheme
        dx_MK = dw_NK = None
        if ctx.needs_input_grad[0]:
            gradient = scheme.quantize(gradient_MN.contiguous(), scheme.gradient_dtype)
            gradient = _noted(gradient, ctx.magnitudes, Operand.GRADIENT)
            weight_KN = weight_NK.t().contiguous()
            dx_MK = scheme.product(gradient, scheme.quantize(weight_KN, E4M3))
        if ctx.needs_input_grad[1]:
            dw_NK = _weight_gradient(x_MK, gradient_MN, scheme)
        return dx_MK, dw_NK, None, None


def _weight_gradient(x_MK: torch.Tensor, gradient_MN: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return G^T X: in bf16, unless the scheme wants FP8 and the number of rows, which is summed over,
    allows it."""
    gradient_NM = gradient_MN.t()
    if not scheme.weight_gradient or x_MK.shape[0] % SIZE_STEP:
        return gradient_NM @ x_MK
    gradient = scheme.quantize(gradient_NM.contiguous(), scheme.gradient_dtype)
    return scheme.product(gradient, scheme.quantize(x_MK.t().contiguous(), E4M3))


def _noted(codes: Codes, magnitudes: torch.Tensor, operand: Operand) -> Codes:
    """Write the largest magnitude, on the device: nothing waits for it. Return the codes to use."""
    if torch.compiler.is_compiling():
        return codes._replace(scale=_note_in_graph(codes.scale, codes.amax, magnitudes, int(operand)))
    _note(codes.amax, magnitudes, operand)
    return codes


def _note(amax: torch.Tensor, magnitudes: torch.Tensor, operand: int) -> None:
    torch.amax(amax, dim=tuple(range(amax.ndim)), out=magnitudes[operand])


@torch.library.custom_op("zerotrain::note_amax", mutates_args=())
def _note_in_graph(
    scale: torch.Tensor, amax: torch.Tensor, magnitudes: torch.Tensor, operand: int
) -> torch.Tensor:
    """Return a copy of the scale, and write the largest magnitude.

    It does not declare the write: a graph keeps `magnitudes` for its backward, and would refuse to run that
    after any layer's next write. Nothing in a graph reads what is written. The copy keeps the call in the
    graph.
    """
    _note(amax, magnitudes.data, operand)  # `data` has a count of writes of its own
    return scale.clone()


@_note_in_graph.register_fake
def _(scale: torch.Tensor, _amax: torch.Tensor, _magnitudes: torch.Tensor, _operand: int) -> torch.Tensor:
    return torch.empty_like(scale)
