"""Masters kept as bf16 weight and int16 remainder are exact and equal fp32 masters bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.updates import (
    FLOATS,
    HYPER,
    RULES,
    as_remainders,
    bits,
    join,
    make_arrays,
    split,
    update_,
    wild_arrays,
)
from zerotrain.runtime import _native

pytestmark = pytest.mark.unit


LOWS = (
    0x0000,
    0x0001,
    0x00FF,
    0x0FFF,
    0x1000,
    0x1001,
    0x2000,
    0x3000,
    0x7FFF,
    0x8000,
    0x8001,
    0xEFFF,
    0xFFFF,
)
"""Lower halves around both sides of every rounding tie of bf16 and fp16."""


def every_pattern() -> torch.Tensor:
    """Return fp32 values: every upper half, with the lower halves at which rounding changes."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    whole = (upper[:, None] + torch.tensor(LOWS)).flatten()
    return ((whole + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32)


def update_without_change(master: torch.Tensor, weight: torch.Tensor, isa: str) -> None:
    """Do a step of zero, which writes back what it reads."""
    grad, momentum = torch.zeros(weight.numel()), torch.zeros(weight.numel())
    segment = _native.Segment(0, weight.numel(), lr=0.0, beta1=0.9, beta2=0.99, step=1)
    _native.update_(_native.UpdateTask("lion", [segment], grad, weight), master, [momentum], isa=isa)


@pytest.mark.parametrize("isa", _native.isas())
def test_every_pattern_survives_decoding_and_encoding(isa: str) -> None:
    values = every_pattern()
    high, low = split(values)
    got_high, got_low = high.clone(), low.clone()
    update_without_change(got_low, got_high, isa)
    finite = values.isfinite()
    assert torch.equal(bits(got_high)[finite], bits(high)[finite])
    assert torch.equal(got_low[finite], low[finite])
    assert torch.equal(bits(join(got_high, got_low))[finite], bits(values)[finite])
    assert torch.equal(bits(join(got_high, got_low))[values.isinf()], bits(values)[values.isinf()])
    nan = values.isnan()
    assert set(bits(got_high)[nan].tolist()) == {0x7FC0}  # NaN stays NaN, and no other value becomes NaN
    assert set(got_low[nan].tolist()) == {0}


def test_ties_go_away_from_zero_and_everything_else_to_the_nearest() -> None:
    values = every_pattern()
    values = values[values.isfinite()]
    weight, low = split(values)
    update_without_change(low, weight, "")
    nearest = values.to(torch.bfloat16)
    is_tie = (bits(values) & 0xFFFF) == 0x8000
    assert torch.equal(weight[~is_tie], nearest[~is_tie])
    assert (weight[is_tie].float().abs() > values[is_tie].abs()).all()
    largest = torch.tensor([0x7F7FFFFF], dtype=torch.int32).view(torch.float32)
    high, rest = split(largest)
    assert high.isinf().all()
    assert rest.item() == -1
    update_without_change(rest, high, "")
    assert torch.equal(join(high, rest), largest)  # the weight is infinite, the master is not


def test_any_pair_of_halves_is_a_master() -> None:
    """Pairs that rounding never gives, as a damaged state could hold, also count as their sum."""
    generator = torch.Generator().manual_seed(3)
    random = torch.randint(-(2**15), 2**15, (2, 50_000), generator=generator).to(torch.int16)
    high, low = random[0].view(torch.bfloat16).clone(), random[1].clone()
    want = join(high, low)
    update_without_change(low, high, "")
    finite = want.isfinite()
    assert torch.equal(bits(join(high, low))[finite], bits(want)[finite])


@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES)
def test_both_encodings_give_the_same_masters(rule: str, grad_dtype: torch.dtype) -> None:
    for start in (make_arrays(rule, 20_000, grad_dtype, torch.bfloat16), wild_arrays(rule, grad_dtype, None)):
        whole, halves = start.copy(), as_remainders(start)
        for step in range(1, 6):
            update_(whole, rule, step=step)
            update_(halves, rule, step=step)
        assert halves.weight is not None
        assert torch.equal(bits(join(halves.weight, halves.master)), bits(whole.master))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(halves.states, whole.states, strict=True))


@pytest.mark.parametrize("isa", _native.isas())
def test_fp16_weights_are_torchs_bits(isa: str) -> None:
    """Ties, subnormals and values that round to infinity, with and without the processor's conversion."""
    values = every_pattern()
    weight = torch.zeros(values.numel(), dtype=torch.float16)
    update_without_change(values.clone(), weight, isa)
    want = values.half()
    nan = values.isnan()
    assert torch.equal(bits(weight)[~nan], bits(want)[~nan])
    assert set(bits(weight)[nan].tolist()) == {0x7E00}


@pytest.mark.parametrize("isa", _native.isas())
def test_every_fp16_gradient_is_read_exactly(isa: str) -> None:
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    master, momentum = torch.zeros(1 << 16), torch.zeros(1 << 16)
    segment = _native.Segment(0, 1 << 16, **(HYPER | {"beta1": 0.0, "beta2": 0.0}))
    _native.update_(_native.UpdateTask("lion", [segment], grad), master, [momentum], isa=isa)
    want = grad.float()
    finite = want.isfinite()
    assert torch.equal(momentum[finite], want[finite])
    assert not momentum[~finite].isfinite().any()
