"""fp32 as a bf16 half and an int16 remainder: exact, half up, and the same step on either form."""

from __future__ import annotations

import math

import pytest
import torch

from zerotrain.runtime.offload.states import Block
from zerotrain.runtime.optim.groups import Hyper
from zerotrain.runtime.optim.rules import AdamRule
from zerotrain.runtime.optim.update import Segment, TorchKernel, UnitUpdate
from zerotrain.runtime.zero.rounding import join, split

pytestmark = pytest.mark.unit


NUMEL = 40_000
HYPER = Hyper(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8, momentum=0.0)


def any_bits() -> torch.Tensor:
    """Return random bit patterns, among them subnormal, huge and infinite values and NaN."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (NUMEL,), generator=generator)
    return bits.to(torch.int32).view(torch.float32)


def test_every_finite_value_comes_back() -> None:
    values = any_bits()
    values = torch.cat([values[values.isfinite()], torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4e38])])
    high, low = split(values)
    assert join(high, low).view(torch.int32).equal(values.view(torch.int32))
    inside = values.abs() < 3.3e38
    error, least = ((half[inside].float() - values[inside]).abs() for half in (high, values.bfloat16()))
    assert error.equal(least)  # never further than the nearest


def test_ties_go_up_and_nan_stays_nan() -> None:
    high, _ = split(torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, math.nan]))
    assert high[:3].tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2**-6]
    payloads = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    halves, rests = split(payloads)
    assert halves.isnan().all()
    assert join(halves, rests).isnan().all()


def test_a_step_without_a_kernel_is_the_same_on_both_forms() -> None:
    """CUDA works so: the rule runs as torch operations."""
    generator = torch.Generator().manual_seed(1)
    grads, masters = torch.randn(2, NUMEL, generator=generator)
    segments = [
        Segment(start=0, stop=30_000, hyper=HYPER, step=1),
        Segment(start=30_000, stop=NUMEL, hyper=HYPER, step=3),
    ]
    rule, (high, low) = AdamRule(), split(masters)
    states = [{kind: torch.zeros(NUMEL) for kind in rule.kinds} for _ in range(2)]
    plain = masters.clone()
    forms = [
        Block(start=0, stop=NUMEL, master=plain, remainder=None, by_kind=states[0], weight=masters.half()),
        Block(start=0, stop=NUMEL, master=None, remainder=low, by_kind=states[1], weight=high),
    ]
    for block in forms:
        assert block.weight is not None
        unit = UnitUpdate(segments=segments, grads=grads.clone(), grad_scale=0.5, weights=block.weight)
        TorchKernel(rule, unit).run(block)
    assert join(high, low).equal(plain)
    assert all(states[0][kind].equal(states[1][kind]) for kind in rule.kinds)
