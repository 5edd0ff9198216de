"""The one-pass optimizer kernels: near a float64 reference, and the same bits in every way to run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.updates import (
    FLOATS,
    HYPER,
    RULES,
    Arrays,
    as_remainders,
    bits,
    in_float64,
    join,
    make_arrays,
    same_bits,
    ulps,
    update_,
    wild_arrays,
)
from zerotrain.runtime import _native

pytestmark = pytest.mark.unit


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((rule, {}) for rule in RULES),
    ("adamw", {"bias_correction": False}),
    ("adam", {"bias_correction": False, "weight_decay": 0.0}),
    ("adagrad", {"lr_decay": 0.1}),
    ("adagrad", {"initial_sum": 0.25, "step": 1}),
]
WAYS = [*((dtype, False) for dtype in (None, *FLOATS)), (None, True)]
"""Outputs beside the master; True means that the master is a bf16 weight and a remainder."""


def clear_directions(arrays: Arrays) -> torch.Tensor:
    """Return the elements at which Lion's sign does not depend on the last bits."""
    m, g = arrays.states[0].double(), arrays.grad.double() * 0.37
    mixed, terms = 0.9 * m + 0.1 * g, torch.maximum(0.9 * m.abs(), 0.1 * g.abs())
    return mixed.abs() > terms * 2**-20


@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize(("rule", "hyper"), VARIANTS)
def test_master_and_states_are_within_two_ulps_of_float64(
    rule: str, hyper: dict[str, Any], grad_dtype: torch.dtype
) -> None:
    arrays = make_arrays(rule, 20_000, grad_dtype, None)
    before = arrays.copy()
    update_(arrays, rule, **hyper)
    want = in_float64(before, rule, **hyper)
    counts = clear_directions(before) if rule == "lion" else torch.ones(20_000, dtype=torch.bool)
    assert counts.float().mean() > 0.99
    assert ulps(arrays.master[counts], want.master[counts], want.master_terms[counts]) <= 2
    for got, value, terms in zip(arrays.states, want.states, want.state_terms, strict=True):
        assert ulps(got, value, terms) <= 2
    assert not torch.equal(arrays.master, before.master)


@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES)
def test_every_size_and_alignment_gives_the_same_bits_and_writes_nothing_else(
    rule: str, grad_dtype: torch.dtype
) -> None:
    """The reference is one long run, which the test above compares with float64."""
    for weight_dtype, has_remainder in WAYS:
        start = make_arrays(rule, 300, grad_dtype, weight_dtype)
        start = as_remainders(start) if has_remainder else start
        whole = start.copy()
        update_(whole, rule)
        for size in range(1, 258):
            low = size % 13
            got = start.copy()
            update_(got.part(low, low + size), rule)
            assert same_bits(got.part(low, low + size), whole.part(low, low + size)), (weight_dtype, size)
            for outside in (slice(0, low), slice(low + size, 300)):
                assert same_bits(
                    got.part(outside.start, outside.stop), start.part(outside.start, outside.stop)
                )


@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES)
def test_same_bits_on_every_instruction_set_thread_count_and_cut(rule: str, grad_dtype: torch.dtype) -> None:
    """The values include subnormals, infinities and NaN."""
    for weight_dtype, has_remainder in WAYS:
        start = wild_arrays(rule, grad_dtype, weight_dtype)
        start = as_remainders(start) if has_remainder else start
        want = start.copy()
        update_(want, rule, isa="baseline")
        for isa in _native.isas():
            for threads in (1, 3, 0):
                got = start.copy()
                update_(got, rule, threads=threads, isa=isa)
                assert same_bits(got, want), (weight_dtype, isa, threads)
        got = start.copy()
        for low, high in ((0, 1), (1, 12_347), (12_347, 30_000)):
            update_(got.part(low, high), rule)
        assert same_bits(got, want), (weight_dtype, "cut")


@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_that_are_written_past_the_caches_are_the_same(dtype: torch.dtype) -> None:
    """Weights of 2 Mi elements and more bypass the caches.

    The address is not at a cache line, so that the first elements take another path.
    """
    size = (1 << 21) + 77
    start = make_arrays("adagrad", size + 3, torch.bfloat16, dtype)
    for isa in _native.isas()[:2]:
        got = start.copy()
        part = got.part(3, size + 3)
        update_(part, "adagrad", threads=0, isa=isa)
        assert part.weight is not None
        assert torch.equal(part.weight, part.master.to(dtype))
        assert same_bits(got.part(0, 3), start.part(0, 3))


@pytest.mark.parametrize("dtype", FLOATS)
def test_weight_is_the_rounded_master(dtype: torch.dtype) -> None:
    arrays = make_arrays("adamw", 257, torch.bfloat16, dtype)
    update_(arrays, "adamw")
    assert arrays.weight is not None
    assert torch.equal(arrays.weight, arrays.master.to(dtype))


def test_segments_have_their_own_hyperparameters_and_gaps_stay() -> None:
    size = 40_000
    cuts: list[tuple[int, int, dict[str, Any]]] = [
        (5, 700, {"lr": 0.1}),
        (700, 701, {"weight_decay": 0.0}),
        (16_000, 35_000, {"step": 9}),
    ]
    start = make_arrays("adamw", size, torch.bfloat16, torch.bfloat16)
    want = start.copy()
    for low, high, hyper in cuts:
        update_(want.part(low, high), "adamw", **hyper)
    got = start.copy()
    segments = [_native.Segment(low, high, **(HYPER | hyper)) for low, high, hyper in cuts]
    task = _native.UpdateTask("adamw", segments, got.grad, got.weight, grad_scale=0.37)
    for low in range(0, size, 9_000):  # tiles of the states: the task knows their first elements
        part = got.part(low, min(low + 9_000, size))
        _native.update_(task, part.master, part.states, start=low, threads=2)
    assert same_bits(got, want)


def test_fp32_weights_can_be_the_master() -> None:
    want = make_arrays("lion", 5_000, torch.float32, None)
    weight, momentum = want.master.clone(), want.states[0].clone()
    update_(want, "lion")
    task = _native.UpdateTask(
        "lion",
        [_native.Segment(0, 5_000, **HYPER)],
        want.grad,
        weight,
        grad_scale=0.37,
        weight_is_master=True,
    )
    for low, high in ((0, 3_000), (3_000, 5_000)):
        _native.update_(task, None, [momentum[low:high]], start=low)
    assert torch.equal(weight, want.master)
    assert torch.equal(momentum, want.states[0])


def test_the_callers_floating_point_mode_does_not_count() -> None:
    start = wild_arrays("adamw", torch.float32, torch.bfloat16)
    want, got = start.copy(), start.copy()
    update_(want, "adamw")
    assert torch.set_flush_denormal(True)
    try:
        update_(got, "adamw", threads=1)  # this thread alone
        assert (torch.tensor(1e-40) * 1.0).item() == 0.0  # the caller's own mode is restored
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(got, want)
    assert (bits(want.master).abs() < 1 << 23).any()


def test_nan_reaches_the_master_and_is_always_the_same() -> None:
    for rule in RULES:
        for remainders in (False, True):
            start = make_arrays(rule, 64, torch.float32, torch.bfloat16)
            start.grad[10] = float("nan")
            arrays = as_remainders(start) if remainders else start
            update_(arrays, rule)
            assert arrays.weight is not None
            master = join(arrays.weight, arrays.master) if remainders else arrays.master
            assert master.isnan().nonzero().flatten().tolist() == [10]
            assert bits(master)[10] == 0x7FC00000
            assert arrays.weight.isnan().nonzero().flatten().tolist() == [10]
