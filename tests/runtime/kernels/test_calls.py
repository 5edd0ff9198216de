"""The engine's calls of kernels, with their host build, have the bits of its CPU path."""

from __future__ import annotations

import sys
import threading
from itertools import product
from typing import Any

import pytest
import torch

from tests.support.host_kernels import pretend_gpu
from tests.support.updates import as_remainders, bits, make_arrays, same_bits, update_, wild_arrays
from zerotrain.runtime import _native
from zerotrain.runtime.comm import sums
from zerotrain.runtime.kernels import adam
from zerotrain.runtime.kernels import sums as sum_calls
from zerotrain.runtime.kernels.adam import AdamArrays
from zerotrain.runtime.offload.states import Block
from zerotrain.runtime.optim.fused import FusedAdamRule
from zerotrain.runtime.optim.groups import Hyper
from zerotrain.runtime.optim.native import CudaKernel, NativeAdamRule, NativeKernel
from zerotrain.runtime.optim.update import Segment, UnitUpdate
from zerotrain.runtime.zero.quantize import BLOCK_NUMEL, INT4, INT8, Quantizer
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ

pytestmark = pytest.mark.unit

HOST = _native.host_kernels()
HYPER = Hyper(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6, momentum=0.0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overwrite", [False, True])
def test_sums_have_the_native_kernels_bits(
    dtype: torch.dtype, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pretend_gpu(monkeypatch)
    for numel, count in product((0, 1, 5, 4099), (1, 2, 8, 64, 65, 130)):
        wanted, parts = random(numel), list(random(count, numel, seed=1).to(dtype))
        found = wanted.clone()
        _native.accumulate_(wanted, parts, 1 / count, overwrite=overwrite)
        before = kernels.launches
        sums.accumulate_(found, parts, 1 / count, overwrite=overwrite)
        assert torch.equal(found, wanted), (numel, count)
        assert kernels.launches - before == (0 if numel == 0 else -(-count // 64))
        assert sums.sums_of_squares([found]) == pytest.approx([_native.sum_squares(wanted)], rel=1e-12)


def test_a_part_may_lie_where_the_sum_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = random(100), random(100, seed=1)
    wanted = first.clone()
    sums.accumulate_(wanted, [wanted, second], 0.5, overwrite=True)
    pretend_gpu(monkeypatch)
    sums.accumulate_(first, [first, second], 0.5, overwrite=True)
    assert torch.equal(first, wanted)


def test_a_part_of_a_later_launch_may_lie_where_the_sum_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, found = list(random(70, 100)), random(100, seed=1)
    wanted = found.clone()
    sums.accumulate_(wanted, [*parts, wanted], 0.5, overwrite=True)
    pretend_gpu(monkeypatch)
    sums.accumulate_(found, [*parts, found], 0.5, overwrite=True)
    assert torch.equal(found, wanted)


def test_the_square_sum_comes_with_the_sum() -> None:
    into, parts = random(5000), list(random(3, 5000, seed=1))
    squares = torch.zeros(1, dtype=torch.float64)
    sum_calls.sum_parts(HOST, into, parts, 0.5, squares=squares)
    assert float(squares) == pytest.approx(_native.sum_squares(into), rel=1e-12)
    into[7] = float("inf")
    assert not sum_calls.square_sums(HOST, [into]).isfinite().any()
    large = torch.full((3000,), 1e30)
    assert sum_calls.square_sums(HOST, [large]).item() == pytest.approx(3e63, rel=1e-6)


def test_parts_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="every part must have the 5 elements"):
        sum_calls.sum_parts(HOST, random(5), [random(4)], 1.0)


def awkward_values(dtype: torch.dtype) -> torch.Tensor:
    """Return rows of two runs: exponents of all sizes, halves of codes, zeros, infinities and NaN."""
    values = random(3, 2, 8 * BLOCK_NUMEL) * torch.logspace(-44, 37, 48).view(3, 2, 8).repeat_interleave(
        BLOCK_NUMEL, dim=2
    )
    values[0, 0, :BLOCK_NUMEL] = torch.arange(BLOCK_NUMEL) / 2 - 64  # ties of int8
    values[0, 1, :BLOCK_NUMEL] = (torch.arange(BLOCK_NUMEL) % 29) / 4 - 3.5
    values[0, 1, 0] = 7.0  # ties of int4
    values[1, 0, :BLOCK_NUMEL] = 0.0
    for block, wrong in enumerate((float("nan"), float("inf"), -float("inf"))):
        values[1, 1, block * BLOCK_NUMEL + 17] = wrong
    return values.to(dtype)


@pytest.mark.parametrize("quantizer", [INT8, INT4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_those_of_torch_on_a_cpu(
    quantizer: Quantizer, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = awkward_values(dtype).transpose(0, 1)
    num_bytes = quantizer.packed_bytes(values[0].numel())
    wanted, found = (torch.zeros(len(values), num_bytes, dtype=torch.uint8) for _ in range(2))
    back, got = (torch.empty(len(values), values[0].numel(), dtype=dtype) for _ in range(2))
    total, sum_found, spare = (torch.empty(values[0].numel()) for _ in range(3))
    quantizer.pack(values, wanted)
    quantizer.unpack(wanted, back)
    quantizer.unpack_sum(wanted, total, spare)
    kernels = pretend_gpu(monkeypatch)
    before = kernels.launches
    quantizer.pack(values, found)
    quantizer.unpack(wanted, got)
    quantizer.unpack_sum(wanted, sum_found, spare)
    assert kernels.launches - before == 3
    scales = num_bytes - values[0].numel() // BLOCK_NUMEL * 4
    assert torch.equal(found[:, :scales], wanted[:, :scales])
    for one, other in zip(found, wanted, strict=True):
        one_scales, other_scales = one[scales:].view(torch.float32), other[scales:].view(torch.float32)
        torch.testing.assert_close(one_scales, other_scales, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got, back, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(sum_found, total, rtol=0, atol=0, equal_nan=True)


def test_a_scale_that_rounds_to_nothing_keeps_codes_in_range() -> None:
    """The largest value of a block may be more than 127 times its scale where that is subnormal."""
    smallest = torch.tensor(1, dtype=torch.int32).view(torch.float32)
    for quantizer, steps in ((INT8, 190), (INT4, 10)):
        values = torch.zeros(BLOCK_NUMEL)
        values[0], values[1] = smallest * steps, -smallest * steps
        packed = torch.zeros(quantizer.packed_bytes(BLOCK_NUMEL), dtype=torch.uint8)
        back = torch.empty(BLOCK_NUMEL)
        quantizer.pack(values, packed)
        quantizer.unpack(packed, back)
        assert back[0] > 0 > back[1]
        assert not back[2:].any()


def moved(arrays: Any, start: int, stop: int, segments: list[_native.Segment], split: bool) -> AdamArrays:
    part = arrays.part(start, stop)
    return AdamArrays(
        segments=segments,
        start=start,
        master=None if split else part.master,
        remainder=part.master if split else None,
        first=part.states[0],
        second=part.states[1],
        grad=part.grad,
        weight=part.weight,
    )


@pytest.mark.parametrize("rule", ["adamw", "adam"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [None, torch.float32, torch.bfloat16, torch.float16, "remainder"])
def test_updates_have_the_native_kernels_bits(rule: str, grad_dtype: torch.dtype, kept: Any) -> None:
    weight = torch.bfloat16 if kept == "remainder" else kept
    for wanted in (make_arrays(rule, 1003, grad_dtype, weight), wild_arrays(rule, grad_dtype, weight)):
        if kept == "remainder":
            wanted.master.nan_to_num_(0.0, 1.0, -1.0)
        wanted = as_remainders(wanted) if kept == "remainder" else wanted
        found, numel = wanted.copy(), wanted.grad.numel()
        update_(wanted, rule)
        segment = _native.Segment(
            0, numel, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3
        )
        units = [
            moved(found, low, high, [segment], kept == "remainder")
            for low, high in ((0, 0), (0, 501), (501, numel))
        ]
        adam.update(HOST, rule, units, grad_scale=0.37)
        assert same_bits(found, wanted)


def test_factor_and_verdict_are_read_from_the_device() -> None:
    wanted = make_arrays("adamw", 300, torch.float32, torch.bfloat16)
    found, kept = wanted.copy(), wanted.copy()
    segment = _native.Segment(0, 300, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
    unit = moved(found, 0, 300, [segment], False)
    factor, verdict = (torch.full((), value, dtype=torch.float64) for value in (0.37, 1.0))
    adam.update(HOST, "adamw", [unit], factor=factor, found_inf=verdict)
    assert same_bits(found, kept)
    adam.update(HOST, "adamw", [unit], factor=factor, found_inf=verdict.zero_())
    update_(wanted, "adamw")
    assert same_bits(found, wanted)


@pytest.mark.parametrize("kept", ["weight", "master", "split"])
def test_the_engines_update_is_the_cpus(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numel, rule = 700, NativeAdamRule()
    cuts = [Segment(start=5 * k, stop=5 * k + 4, hyper=HYPER, step=1 + k % 20) for k in range(140)]
    found = []
    for uses_ours in (False, True):
        if uses_ours:
            kernels = pretend_gpu(monkeypatch)
            monkeypatch.setattr(NativeAdamRule, "kernel", lambda self, unit: CudaKernel(self, unit, kernels))  # noqa: B023
        master, weight = random(numel), random(numel).bfloat16()
        if kept == "weight":
            weight = master
        remainder = torch.arange(numel, dtype=torch.int16) if kept == "split" else None
        states = {EXP_AVG: random(numel, seed=2), EXP_AVG_SQ: random(numel, seed=3).abs()}
        unit = UnitUpdate(
            segments=cuts, grads=random(numel, seed=4), grad_scale=0.3, weights=weight,
            writes_masters=kept == "weight",
        )  # fmt: skip
        block = Block(
            start=0, stop=numel, master=None if kept == "split" else master, remainder=remainder,
            by_kind=states, weight=None if kept == "weight" else weight,
        )  # fmt: skip
        kernel = rule.kernel(unit)
        assert type(kernel) is (CudaKernel if uses_ours else NativeKernel)
        for part in (slice(0, 333), slice(333, numel)):
            kernel.run(block.cut(part))
        found.append([bits(one) for one in (master, weight, *states.values())])
        if remainder is not None:
            found[-1].append(remainder)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_device_with_kernels_chooses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = UnitUpdate(segments=[], grads=torch.zeros(1), grad_scale=1.0, weights=torch.zeros(1))
    assert type(NativeAdamRule().kernel(unit)) is NativeKernel
    pretend_gpu(monkeypatch)
    assert type(NativeAdamRule().kernel(unit)) is CudaKernel
    assert type(FusedAdamRule().kernel(unit)) is not CudaKernel


def test_other_threads_run_during_a_call() -> None:
    """A launch waits while the stream's queue is full. Meanwhile the watchdog's thread may have to end a
    collective that hangs, before which the queue does not move."""
    into, parts = torch.zeros(1 << 20), [torch.ones(1 << 20)] * 20
    began, is_over = threading.Event(), threading.Event()
    looks: list[bool] = []

    def look() -> None:
        while not is_over.wait(0.001):
            looks.append(began.is_set())

    thread = threading.Thread(target=look)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # only a release lets the other thread run
    try:
        began.set()
        sum_calls.sum_parts(HOST, into, parts, 1.0)
        looks_during = sum(looks)
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()
    assert looks_during
