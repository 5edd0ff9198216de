"""The rule on a GPU, torch's fused kernel, equals the plain rule up to rounding.

The tests cover all variants of Adam, groups within a unit, scaled gradients, and both encodings of masters.
The kernel exists for CPUs as well.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.support.unit_updates import update_on
from zerotrain.runtime.offload.states import Block
from zerotrain.runtime.optim.device_scale import DeviceScale, GradScale
from zerotrain.runtime.optim.fused import FusedAdamRule, FusedKernel
from zerotrain.runtime.optim.groups import Hyper
from zerotrain.runtime.optim.rules import AdamRule
from zerotrain.runtime.optim.update import Segment, TorchKernel, UnitUpdate
from zerotrain.runtime.zero.rounding import join, split

pytestmark = pytest.mark.unit


NUMEL, BORDER, SCALE = 5000, 1203, 0.37
HYPERS = (
    Hyper(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6, momentum=0.0),
    Hyper(lr=3e-3, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, momentum=0.0),
)


def segments(step: int) -> list[Segment]:
    """Return segments of which the second group started later, as after an unfreezing."""
    return [
        Segment(start=0, stop=BORDER, hyper=HYPERS[0], step=step),
        Segment(start=BORDER, stop=NUMEL, hyper=HYPERS[1], step=max(1, step - 2)),
    ]


def block_of(weight: torch.Tensor, first: torch.Tensor | None, states: Any) -> Block:
    """Return all elements. `first`: masters or remainders; None: the weights are the masters."""
    is_split = first is not None and first.dtype is torch.int16
    return Block(
        start=0,
        stop=weight.numel(),
        master=weight if first is None else None if is_split else first,
        remainder=first if is_split else None,
        by_kind=states,
        weight=None if first is None else weight,
    )


def apply_plain(rule: AdamRule, master: torch.Tensor, grad: torch.Tensor, states: Any, step: int) -> None:
    for one in segments(step):
        part = slice(one.start, one.stop)
        held = {kind: state[part] for kind, state in states.items()}
        rule.update(master[part], grad[part] * SCALE, held, one.hyper, one.step)


@pytest.mark.parametrize(("decoupled", "bias_correction", "amsgrad"), [*product((True, False), repeat=3)])
@pytest.mark.parametrize("kept", ["weight", "master", "split"])
def test_close_to_the_plain_rule(decoupled: bool, bias_correction: bool, amsgrad: bool, kept: str) -> None:
    options: dict[str, Any] = {
        "decoupled": decoupled,
        "bias_correction": bias_correction,
        "amsgrad": amsgrad,
    }
    plain = AdamRule(**options)
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randn(NUMEL, generator=generator, dtype=torch.float32)
    states, theirs = (
        {kind: torch.zeros(NUMEL, dtype=torch.float32) for kind in plain.kinds} for _ in range(2)
    )
    weight = wanted.clone() if kept == "weight" else wanted.bfloat16()
    first = None if kept == "weight" else wanted.clone()
    if kept == "split":
        weight, first = split(wanted.clone())
    for step in range(1, 5):
        grad = torch.randn(NUMEL, generator=generator, dtype=torch.float32)
        apply_plain(plain, wanted, grad, theirs, step)
        unit = UnitUpdate(segments=segments(step), grads=grad.clone(), grad_scale=SCALE, weights=weight)
        kernel = FusedKernel(plain, unit)
        for part in (slice(0, 700), slice(700, NUMEL)):  # blocks that cut a segment
            kernel.run(block_of(weight, first, states).cut(part))
    found = weight if first is None else join(weight, first) if kept == "split" else first
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for kind, state in theirs.items():
        torch.testing.assert_close(states[kind], state, rtol=1e-5, atol=1e-7)
    if kept == "master":
        assert torch.equal(weight, found.bfloat16())


def test_a_clip_of_zero_is_a_step_as_elsewhere() -> None:
    """Infinite gradients are not skipped here: their norm scales the finite ones to nothing."""
    weight, rule = torch.ones(3), AdamRule()
    states = {kind: torch.zeros(3) for kind in rule.kinds}
    grad = torch.tensor([1.0, float("inf"), -2.0])
    everything = [Segment(start=0, stop=3, hyper=HYPERS[1], step=1)]
    unit = UnitUpdate(segments=everything, grads=grad, grad_scale=0.0, weights=weight)
    FusedKernel(rule, unit).run(block_of(weight, None, states))
    assert weight.isnan().tolist() == [False, True, False]
    assert weight[[0, 2]].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kept", ["master", "split", "bf16"])
def test_a_scale_on_the_device_is_the_hosts(kept: str) -> None:
    """Change no bit with `found_inf`, whatever the gradients hold."""
    rule, everything = AdamRule(), [Segment(start=0, stop=64, hyper=HYPERS[0], step=2)]
    values = torch.linspace(-2.0, 3.0, 64, dtype=torch.float32)
    start = [values.bfloat16(), values.clone()] if kept == "master" else [*split(values.clone())]
    scale = torch.tensor([SCALE], dtype=torch.float64)

    def updated(grad_scale: GradScale, grad: torch.Tensor) -> list[torch.Tensor]:
        weight, first = (half.clone() for half in start)
        states = {kind: torch.full((64,), 0.5, dtype=torch.float32) for kind in rule.kinds}
        block = block_of(weight, first, states)
        if kept == "bf16":
            block, first = replace(block_of(weight, None, states), master=weight), weight
        unit = UnitUpdate(segments=everything, grads=grad, grad_scale=grad_scale, weights=weight)
        FusedKernel(rule, unit).run(block)
        return [weight, first, *states.values()]

    counts, bad = (DeviceScale(factor=scale, found_inf=torch.full_like(scale, flag)) for flag in (0.0, 1.0))
    for found, wanted in zip(updated(counts, values.cos()), updated(SCALE, values.cos()), strict=True):
        assert torch.equal(found, wanted)
    weight, first, *states = updated(bad, values.log())
    assert torch.equal(weight, start[0])
    assert kept == "bf16" or torch.equal(first, start[1])
    assert all((state == 0.5).all() for state in states)


def test_the_programs_default_dtype_is_not_the_kernels() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        test_close_to_the_plain_rule(True, True, False, "master")
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_is_for_gpus() -> None:
    rule = FusedAdamRule()
    assert type(rule.kernel(update_on("cuda"))) is FusedKernel
    assert type(rule.kernel(update_on("cpu"))) is TorchKernel, "there the native kernel is faster"


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_bf16_masters_are_the_rounded_result_of_fp32_copies(amsgrad: bool, state_dtype: torch.dtype) -> None:
    rule = AdamRule(amsgrad=amsgrad)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(NUMEL, generator=generator, dtype=torch.float32).bfloat16()
    states = {kind: torch.rand(NUMEL, generator=generator).to(state_dtype) for kind in rule.kinds}
    grad = torch.randn(NUMEL, generator=generator, dtype=torch.float32).bfloat16()
    wide, kept = weight.float(), {kind: state.to(torch.float32, copy=True) for kind, state in states.items()}
    for values, moments, own in ((wide, kept, grad.float()), (weight, states, grad)):
        kernel = FusedKernel(
            rule, UnitUpdate(segments=segments(3), grads=own, grad_scale=SCALE, weights=values)
        )
        for part in (slice(0, 700), slice(700, NUMEL)):
            kernel.run(block_of(values, None, moments).cut(part))
    assert torch.equal(weight, wide.bfloat16())
    for kind, state in kept.items():
        assert torch.equal(states[kind], state.to(state_dtype)), kind
