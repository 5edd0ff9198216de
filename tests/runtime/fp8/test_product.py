"""The FP8 product of a linear layer equals a reference that looks every code up in a table: codes and scales
to the bit, results to the rounding of bf16."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest
import torch
from torch.nn import functional

from zerotrain.runtime.fp8.product import E4M3, E5M2, Operand, Scheme, linear
from zerotrain.runtime.matmul_support import scaled_product

pytestmark = pytest.mark.unit

BF16_ULP = 2.0**-8
ROWS, TENSOR = (Scheme(by_row=by_row, weight_gradient=True) for by_row in (True, False))
SCHEMES = pytest.mark.parametrize("scheme", [ROWS, TENSOR], ids=["rowwise", "tensorwise"])


def table(dtype: torch.dtype) -> list[float]:
    """Return the finite codes of at least 0, ascending."""
    values = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    finite: list[float] = values[values.isfinite()].tolist()
    return finite


def nearest(value: float, codes: list[float]) -> float:
    """Return the code nearest to a value, of two equally near ones that with an even index."""
    above = min(bisect_left(codes, abs(value)), len(codes) - 1)
    index = min((above - 1, above), key=lambda i: (abs(codes[max(i, 0)] - abs(value)), i % 2))
    return math.copysign(codes[max(index, 0)], value)


def reference(values: torch.Tensor, dtype: torch.dtype, *, by_row: bool) -> torch.Tensor:
    """Return in float64 what values are after rounding to codes under the scale of their row or tensor."""
    codes, result = table(dtype), torch.empty(values.shape, dtype=torch.float64)
    for row, (source, target) in enumerate(zip(values.tolist(), result, strict=True)):
        group = values[row] if by_row else values
        largest = max(float(group.abs().max()), 2.0**-80)
        scale = 2.0 ** math.floor(math.log2(largest / (codes[-1] / 2)))
        target.copy_(torch.tensor([nearest(value / scale, codes) * scale for value in source]))
    return result


def drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return rows whose magnitudes differ by much."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    return (values * torch.logspace(-6, 3, rows, base=2)[:, None]).bfloat16()


@SCHEMES
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_codes_are_the_nearest_ones(scheme: Scheme, dtype: torch.dtype) -> None:
    values = drawn(8, 32, 1)
    values[3] = 0.0
    found = scheme.quantize(values, dtype)
    expected = reference(values, dtype, by_row=scheme.by_row)
    assert (found.values_RC.double() * found.scale).equal(expected)


@SCHEMES
def test_every_binade_is_scaled_without_saturation(scheme: Scheme) -> None:
    for exponent in range(-70, 120, 7):
        for factor in (1.0, 1.75, 1.9921875):
            values = torch.tensor([[factor * 2.0**exponent, 0.0]], dtype=torch.bfloat16)
            found = scheme.quantize(values, E4M3)
            decoded = float(found.values_RC[0, 0].float() * found.scale.flatten()[0])
            assert decoded == pytest.approx(float(values[0, 0]), rel=2.0**-4)
            assert 224.0 <= float(found.values_RC.float().max()) <= 448.0
            assert float(found.amax) == float(values.max())


@SCHEMES
def test_forward_and_backward_are_products_of_rounded_values(scheme: Scheme) -> None:
    x, weight, gradient = drawn(16, 32, 2), drawn(48, 32, 3), drawn(16, 48, 4)
    bias = drawn(1, 48, 5)[0]
    inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
    out = linear(inputs[0], inputs[1], inputs[2], scheme, torch.zeros(3))
    torch.autograd.backward(out, gradient)

    def rounded(values: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
        return reference(values, dtype, by_row=scheme.by_row)

    narrow = scheme.gradient_dtype
    product = rounded(x) @ rounded(weight).t()
    dx = rounded(gradient, narrow) @ rounded(weight.t().contiguous()).t()
    dw = rounded(gradient.t().contiguous(), narrow) @ rounded(x.t().contiguous()).t()
    for found, expected in ((out, product.bfloat16() + bias), (inputs[0].grad, dx), (inputs[1].grad, dw)):
        assert found is not None
        error = (found.double() - expected.double()).abs().max()
        assert error <= 2 * BF16_ULP * expected.abs().max()
    assert inputs[2].grad is not None
    assert inputs[2].grad.equal(gradient.sum(0))


def test_the_gradient_of_weights_is_of_bf16_unless_asked_for() -> None:
    x, gradient = drawn(16, 32, 2), drawn(16, 48, 4)
    weight = drawn(48, 32, 3).requires_grad_()
    out = linear(x, weight, None, Scheme(by_row=True, weight_gradient=False), torch.zeros(3))
    torch.autograd.backward(out, gradient)
    assert weight.grad is not None
    assert weight.grad.equal(gradient.t() @ x)


def test_products_of_rows_have_the_bits_of_torch() -> None:
    a, b = ROWS.quantize(drawn(16, 32, 5), E4M3), ROWS.quantize(drawn(48, 32, 6), E4M3)
    ours = scaled_product(a.values_RC, a.scale, b.values_RC, b.scale, fast_sum=False)
    try:
        torchs = torch._scaled_mm(
            a.values_RC, b.values_RC.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=torch.bfloat16
        )
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch multiplies no rows of FP8 on this CPU: {error}")
    assert ours.equal(torchs)


@SCHEMES
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_no_scale_holds_is_seen(scheme: Scheme, bad: float) -> None:
    x, weight, magnitudes = drawn(16, 32, 2), drawn(48, 32, 3), torch.zeros(3)
    x[5, 7] = bad
    out = linear(x, weight, None, scheme, magnitudes)
    assert out[5].isnan().all()
    assert not magnitudes[Operand.INPUT].isfinite()
    assert float(magnitudes[Operand.WEIGHT]) == float(weight.abs().max())


def test_other_dtypes_and_empty_batches_take_the_product_of_torch() -> None:
    x, weight = torch.randn(4, 32), torch.randn(48, 32)
    assert linear(x, weight, None, ROWS, torch.zeros(3)).equal(functional.linear(x, weight))
    assert linear(x[:0].bfloat16(), weight.bfloat16(), None, ROWS, torch.zeros(3)).shape == (0, 48)
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x, weight.bfloat16(), None, ROWS, torch.zeros(3))
