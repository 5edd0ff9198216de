"""Masters, states and sums in bf16: the bits of fp32 arithmetic between a cast from bf16 and one to it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.updates import (
    FLOATS,
    GRAD_SCALE,
    HYPER,
    RULES,
    Arrays,
    make_arrays,
    same_bits,
    update_,
    wild_arrays,
)
from zerotrain.runtime import _native
from zerotrain.runtime.comm import sums

pytestmark = pytest.mark.unit


STATE_DTYPES = (torch.float32, torch.bfloat16)


def narrow(arrays: Arrays, state_dtype: torch.dtype) -> Arrays:
    """Return the same values as masters in bf16, and states in the given dtype."""
    copied = arrays.copy()
    states = [_rounded(state, state_dtype) for state in copied.states]
    return replace(copied, master=_rounded(copied.master, torch.bfloat16), states=states)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast, with one NaN for all: torch's depends on the instruction set."""
    return values.to(dtype).masked_fill(values.isnan(), math.nan)


def reference(arrays: Arrays, rule: str) -> Arrays:
    """Return the arrays after a step of the fp32 kernel on copies, rounded by torch."""
    copied = arrays.copy()
    states = [state.float() for state in copied.states]
    wide = replace(copied, master=copied.master.float(), states=states)
    update_(wide, rule, isa="baseline")
    return narrow(wide, arrays.states[0].dtype)


def update_bf16(arrays: Arrays, rule: str, *, threads: int = 1, isa: str = "") -> None:
    segment = _native.Segment(0, arrays.grad.numel(), **HYPER)
    task = _native.UpdateTask(
        rule,
        [segment],
        arrays.grad,
        arrays.master,
        grad_scale=GRAD_SCALE,
        weight_is_master=True,
        bf16_states=arrays.states[0].dtype is torch.bfloat16,
    )
    _native.update_(task, None, arrays.states, threads=threads, isa=isa)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES)
def test_an_update_is_an_fp32_update_between_casts(
    rule: str, grad_dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """The values include subnormals, infinities and NaN, on every instruction set."""
    for start in (make_arrays(rule, 5003, grad_dtype, None), wild_arrays(rule, grad_dtype, None)):
        start = narrow(start, state_dtype)
        want = reference(start, rule)
        assert not same_bits(want, start)
        for isa in _native.isas():
            for threads in (1, 3):
                got = start.copy()
                update_bf16(got, rule, threads=threads, isa=isa)
                assert same_bits(got, want), (isa, threads)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_every_size_and_alignment_writes_its_own_elements_alone(rule: str, state_dtype: torch.dtype) -> None:
    start = narrow(make_arrays(rule, 100, torch.bfloat16, None), state_dtype)
    whole = reference(start, rule)
    for size in range(1, 70):
        low = size % 13
        got = start.copy()
        update_bf16(got.part(low, low + size), rule)
        assert same_bits(got.part(low, low + size), whole.part(low, low + size)), size
        for outside in (slice(0, low), slice(low + size, 100)):
            left, right = (each.part(outside.start, outside.stop) for each in (got, start))
            assert same_bits(left, right), size


def test_half_way_between_two_bf16_values_goes_to_the_even_one() -> None:
    """Lion's step of 2 ** -8 is half of the last place at 1, and at 1 + 2 ** -7."""
    master = torch.tensor([1.0, 1.0 + 2**-7, -1.0], dtype=torch.bfloat16)
    grad, momentum = -master.sign(), torch.zeros(3, dtype=torch.bfloat16)
    hyper = {**HYPER, "lr": 2**-8, "weight_decay": 0.0}
    task = _native.UpdateTask(
        "lion",
        [_native.Segment(0, 3, **hyper)],
        grad,
        master,
        weight_is_master=True,
        bf16_states=True,
    )
    _native.update_(task, None, [momentum])
    assert master.tolist() == [1.0, 1.0 + 2**-6, -1.0]


def test_wrong_arrays_are_named() -> None:
    arrays = make_arrays("adamw", 8, torch.bfloat16, None)
    segments = [_native.Segment(0, 8, **HYPER)]
    with pytest.raises(ValueError, match="bfloat16 states need a bfloat16 weight that is the master"):
        _native.UpdateTask(
            "adamw", segments, arrays.grad, arrays.master, weight_is_master=True, bf16_states=True
        )
    with pytest.raises(ValueError, match="only float32 and bfloat16 weights can be the master"):
        _native.UpdateTask("adamw", segments, arrays.grad, arrays.master.half(), weight_is_master=True)
    for is_bf16, wanted in ((True, "bfloat16"), (False, "float32")):
        task = _native.UpdateTask(
            "adamw",
            segments,
            arrays.grad,
            arrays.master.bfloat16(),
            weight_is_master=True,
            bf16_states=is_bf16,
        )
        other = torch.float32 if is_bf16 else torch.bfloat16
        with pytest.raises(ValueError, match=f"state 0 must be {wanted}, as the task says"):
            _native.update_(task, None, [state.to(other) for state in arrays.states])


# --- sums


def make_parts(size: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(size * 10 + count)
    into = torch.randn(size, generator=generator).bfloat16()
    return into, [torch.randn(size, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", STATE_DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9, 17])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_sum_is_rounded_once(dtype: torch.dtype, count: int, overwrite: bool) -> None:
    for size in (1, 17, 1023, 1024, 1025, 16385, 40000):
        into, parts = make_parts(size, count, dtype)
        wide = torch.zeros(size) if overwrite else into.float()
        for part in parts:
            wide.add_(part, alpha=1 / count)
        wanted = wide.bfloat16()
        for isa in _native.isas():
            for threads in (1, 3):
                got = into.clone()
                _native.accumulate_(got, parts, 1 / count, overwrite=overwrite, threads=threads, isa=isa)
                assert torch.equal(got, wanted), (size, isa, threads)


def test_sums_without_native_code_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last case has the sum itself among its parts."""
    monkeypatch.setattr(sums, "_TILE", 4096)
    into, parts = make_parts(10_000, 3, torch.bfloat16)
    cases = [(into, parts, False), (into, parts, True), (parts[1], parts, True)]
    found: list[list[torch.Tensor]] = []
    for native in (_native, None):
        monkeypatch.setattr(sums, "_native", native)
        found.append([])
        for target, given, overwrite in cases:
            copies = [part.clone() for part in given]
            sum_of = copies[1] if target is parts[1] else target.clone()
            sums.accumulate_(sum_of, copies, 1 / 3, overwrite=overwrite)
            found[-1].append(sum_of)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert torch.equal(found[0][1], found[0][2])


def test_a_sum_of_squares_is_that_of_the_widened_values() -> None:
    for size in (1, 15, 16, 17, 16385, 50000):
        values = make_parts(size, 1, torch.float32)[0]
        found = {
            _native.sum_squares(each, threads=threads, isa=isa)
            for each in (values, values.float())
            for isa in _native.isas()
            for threads in (1, 3)
        }
        assert len(found) == 1
        assert found.pop() == pytest.approx(math.fsum(value**2 for value in values.tolist()), rel=1e-13)
