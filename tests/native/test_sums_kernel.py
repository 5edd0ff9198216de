"""The summing kernels: torch's bits for the mean over ranks; the same sum of squares on every path."""

from __future__ import annotations

import math

import pytest
import torch

from zerotrain.runtime import _native
from zerotrain.runtime.comm import sums

pytestmark = pytest.mark.unit


SIZES = [1, 15, 16, 17, 31, 100, 16384, 16385, 50000]


def make_parts(size: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(size * 10 + count)
    into = torch.randn(size, generator=generator)
    return into, [torch.randn(size, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("overwrite", [False, True])
def test_accumulate_gives_torchs_bits(dtype: torch.dtype, count: int, overwrite: bool) -> None:
    for size in SIZES:
        into, parts = make_parts(size, count, dtype)
        wanted = torch.zeros_like(into) if overwrite else into.clone()
        for part in parts:
            wanted.add_(part, alpha=1 / count)
        for isa in _native.isas():
            for threads in (1, 3):
                got = into.clone()
                _native.accumulate_(got, parts, 1 / count, overwrite=overwrite, threads=threads, isa=isa)
                assert torch.equal(got, wanted), (size, isa, threads)


def test_sum_squares_is_exact_to_rounding_and_the_same_everywhere() -> None:
    for size in SIZES:
        values = make_parts(size, 1, torch.float32)[0]
        wanted = math.fsum(value * value for value in values.tolist())
        found = {
            _native.sum_squares(values, threads=threads, isa=isa)
            for isa in _native.isas()
            for threads in (1, 2, 3)
        }
        assert len(found) == 1
        assert found.pop() == pytest.approx(wanted, rel=1e-13)


def test_sum_squares_of_what_is_not_finite_is_not_finite() -> None:
    for bad in (float("inf"), float("nan")):
        values = torch.zeros(20_000)
        values[17_001] = bad
        assert _native.sum_squares(values) != 0.0
        assert not torch.tensor(sums.sums_of_squares([values])).isfinite()


@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 5000])
def test_sum_squares_as_on_a_gpu(numel: int) -> None:
    flats = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    wanted = [float(flat.double().square().sum()) for flat in flats]
    assert sums._on_gpu(flats) == pytest.approx(wanted, rel=1e-6)


def test_what_is_too_large_for_fp32_squares_is_finite_on_a_gpu_too() -> None:
    large, infinite = torch.full((3000,), 1e30), torch.zeros(3000)
    infinite[17] = float("inf")
    found = sums._on_gpu([large, infinite, torch.tensor([float("nan")])])
    assert found[0] == pytest.approx(3000e60, rel=1e-6)
    assert not torch.tensor(found[1:]).isfinite().any()


def test_other_dtypes_go_through_torch() -> None:
    into, parts = make_parts(40, 2, torch.float16)
    wanted = into.clone().add_(parts[0], alpha=0.5).add_(parts[1], alpha=0.5)
    sums.accumulate_(into, parts, 0.5)
    assert torch.equal(into, wanted)
    sums.accumulate_(into, parts, 0.5, overwrite=True)
    assert torch.equal(into, torch.zeros(40).add_(parts[0], alpha=0.5).add_(parts[1], alpha=0.5))


def test_wrong_arguments_are_named() -> None:
    into, parts = make_parts(8, 2, torch.float32)
    with pytest.raises(ValueError, match="part has 7 elements, the target has 8"):
        _native.accumulate_(into, [parts[0][:7]], 1.0)
    with pytest.raises(ValueError, match="differ in dtype"):
        _native.accumulate_(into, [parts[0], parts[1].bfloat16()], 1.0)
    with pytest.raises(ValueError, match="parts is empty"):
        _native.accumulate_(into, [], 1.0)
    with pytest.raises(ValueError, match="must be float32 or bfloat16"):
        _native.accumulate_(into, [parts[0].half()], 1.0)


def test_arrays_that_would_be_copied_are_refused() -> None:
    part = torch.ones(8)
    for wrong in (torch.zeros(8).double(), torch.zeros(16)[::2]):
        with pytest.raises((TypeError, ValueError)):
            _native.accumulate_(wrong, [part], 1.0)
        with pytest.raises((TypeError, ValueError)):
            _native.accumulate_(part, [wrong], 1.0)
        with pytest.raises((TypeError, ValueError)):
            _native.sum_squares(wrong)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_sum_that_overlaps_its_parts_is_refused(overwrite: bool) -> None:
    memory = torch.ones(24)
    apart = torch.ones(8)
    for low in (0, 1, 7):
        with pytest.raises(ValueError, match="into and a part overlap in memory"):
            _native.accumulate_(memory[low : low + 8], [apart, memory[:8]], 1.0, overwrite=overwrite)
    assert torch.equal(memory, torch.ones(24))
    _native.accumulate_(memory[8:16], [memory[:8], memory[16:]], 0.5, overwrite=True)  # adjacent memory
    assert torch.equal(memory, torch.ones(24))
