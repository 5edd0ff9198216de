"""Access to one parameter: reads give plain torch's values, and training continues from written ones.

The tests cover every stage, ranks that do not divide anything, tied, frozen and unused parameters, and
accumulation.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import world
from zerotrain.runtime.engine import Engine

pytestmark = pytest.mark.ranks


ACCUMULATION = 2
PARTS = ("embed.weight", "blocks.1.qkv.bias", "blocks.0.up.weight", "spare.weight")
STATES = ("exp_avg", "exp_avg_sq")


class Model(TinyGPT):
    """A tied model with a frozen norm and an unused layer."""

    def __init__(self) -> None:
        super().__init__(layers=2, tied=True)
        self.spare = nn.Linear(8, 5)
        self.norm.requires_grad_(False)


def plain() -> Model:
    torch.manual_seed(11)
    return Model()


def engine_at(stage: int, dtype: str, *, overlap: bool = False) -> Engine:
    settings = config(stage, gradient_accumulation_steps=ACCUMULATION, bf16={"enabled": dtype == "bf16"})
    settings["zero_optimization"]["overlap_comm"] = overlap
    settings["fp16"] = {"enabled": dtype == "fp16", "loss_scale": 128.0}
    engine, *_ = zt.initialize(model=plain(), config=settings)
    return engine


def micro_batch(index: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return token_batches(1, size=2, seed=10 * index + rank)[0]


def backward(engine: Engine, index: int) -> None:
    engine.backward(engine(*micro_batch(index, world()[0])))


def reference_grads(num_micro_batches: int, world_size: int) -> dict[str, torch.Tensor]:
    """Return plain torch's gradients after so many micro-batches, by name; zeros for those without one."""
    model = plain()
    for index in range(num_micro_batches):
        for rank in range(world_size):
            (model(*micro_batch(index, rank)) / ACCUMULATION / world_size).backward()
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad
        for name, value in model.named_parameters()
        if value.requires_grad
    }


def parameter(engine: Engine, name: str) -> nn.Parameter:
    return engine.module.get_parameter(name)


def check_gradients(engine: Engine, dtype: str) -> None:
    """Check gradients between micro-batches and before the step, and that the step's norm is made of them."""
    world_size = world()[1]
    tolerance = 1e-6 if dtype == "fp32" else 2e-2
    for index in range(ACCUMULATION):
        backward(engine, index)
        expected = reference_grads(index + 1, world_size)
        grads = {name: zt.get_full_grad(parameter(engine, name)) for name in expected}
        for name, grad in grads.items():
            assert grad.dtype is torch.float32, name
            assert torch.allclose(grad, expected[name], rtol=0, atol=tolerance), name
        assert not grads["spare.weight"].any()
        if index + 1 < ACCUMULATION:
            engine.step()
    squares = sum(float(grad.double().square().sum()) for grad in grads.values())
    assert engine.step().grad_norm == pytest.approx(squares**0.5, rel=1e-6)
    for name in PARTS:  # the first step of Adam
        average = zt.get_full_optimizer_state(parameter(engine, name), "exp_avg")
        assert torch.allclose(average, 0.1 * grads[name], rtol=1e-5, atol=1e-9), name


def check_local(engine: Engine) -> None:
    """Check that the parts of all ranks, concatenated, are the whole."""
    rank, world_size = world()
    for name in PARTS:
        member = parameter(engine, name)
        whole = zt.get_full_fp32(member).flatten()
        start, stop = zt.local_interval(member)
        assert torch.equal(zt.get_local_fp32(member), whole[start:stop])
        edges = engine.comm.gather_record([float(start), float(stop)])
        owned = [edge for edge in edges if edge[0] < edge[1]]
        assert (owned[0][0], owned[-1][1]) == (0, member.numel()), (rank, world_size)
        assert all(left[1] == right[0] for left, right in pairwise(owned))


def check_writes(engine: Engine) -> None:
    """Check that written values come back to the last bit, also in weights, and no other value changes."""
    torch.manual_seed(5)
    before = {name: zt.get_full_fp32(value) for name, value in engine.module.named_parameters()}
    for name in PARTS:
        member = parameter(engine, name)
        fresh = torch.randn(member.shape)
        zt.set_full_fp32(member, fresh)
        for kind in STATES:
            zt.set_full_optimizer_state(member, kind, fresh.abs())
            assert torch.equal(zt.get_full_optimizer_state(member, kind), fresh.abs()), name
        before[name] = fresh
    local = parameter(engine, "blocks.1.up.bias")
    start, stop = zt.local_interval(local)
    zt.set_local_fp32(local, torch.arange(start, stop).float())
    zt.set_local_optimizer_state(local, "exp_avg", torch.arange(start, stop).float())
    before["blocks.1.up.bias"] = torch.arange(local.numel()).float()
    assert torch.equal(zt.get_full_optimizer_state(local, "exp_avg"), before["blocks.1.up.bias"])
    for name, value in engine.module.named_parameters():
        assert torch.equal(zt.get_full_fp32(value), before[name]), name
    with zt.full_parameters(engine.module):
        for name, value in engine.module.named_parameters():
            assert torch.equal(value.detach(), before[name].to(value.dtype)), name


def check_written_gradient(engine: Engine) -> None:
    """Check that the step uses the gradient that was written."""
    for index in range(ACCUMULATION):
        backward(engine, index)
        if index + 1 < ACCUMULATION:
            engine.step()
    member, local = parameter(engine, "blocks.0.up.weight"), parameter(engine, "blocks.0.up.bias")
    fresh = torch.linspace(-1, 1, member.numel()).view(member.shape)
    zt.set_full_grad(member, fresh)
    start, stop = zt.local_interval(local)
    zt.set_local_grad(local, torch.ones(stop - start))
    assert torch.allclose(zt.get_full_grad(member), fresh, rtol=3e-7, atol=0)
    assert torch.allclose(zt.get_local_grad(local), torch.ones(stop - start), rtol=3e-7, atol=0)
    old = zt.get_full_optimizer_state(member, "exp_avg")
    engine.step()
    new = zt.get_full_optimizer_state(member, "exp_avg")
    assert torch.allclose(new, 0.9 * old + 0.1 * fresh, rtol=0, atol=1e-6)


def access(stages: tuple[int, ...], dtype: str) -> None:
    for stage in stages:
        engine = engine_at(stage, dtype)
        check_gradients(engine, dtype)
        check_local(engine)
        check_writes(engine)
        check_written_gradient(engine)
        engine.close()
        engine = engine_at(stage, dtype, overlap=stage < 2)
        check_gradients(engine, dtype)
        check_written_gradient(engine)
        assert engine.memory.transient_bytes == 0
        sums = engine.comm.gather_record(
            [float(zt.get_full_fp32(value).double().sum()) for value in engine.module.parameters()]
        )
        assert all(row == sums[0] for row in sums)
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reads_and_writes_equal_plain_torch(world_size: int) -> None:
    run_ranks(world_size, access, (0, 1, 2, 3) if world_size > 1 else (3,), "fp32")


@pytest.mark.parametrize(("dtype", "stages"), [("bf16", (1, 3)), ("fp16", (0, 2))])
def test_reads_and_writes_in_16_bits(dtype: str, stages: tuple[int, ...]) -> None:
    """Gradients are shown without the loss scale, values as the fp32 masters."""
    run_ranks(2, access, stages, dtype)


def refusals() -> dict[str, str]:
    """Return the error by the wrong call."""
    engine = engine_at(3, "fp32")
    member, frozen = parameter(engine, "embed.weight"), parameter(engine, "norm.weight")
    backward(engine, 0)
    calls = {
        "shape": lambda: zt.set_full_fp32(member, torch.ones(3)),
        "kind": lambda: zt.get_full_optimizer_state(member, "momentum"),
        "frozen gradient": lambda: zt.get_full_grad(frozen),
        "frozen state": lambda: zt.set_full_optimizer_state(frozen, "exp_avg", torch.ones(32)),
        "stranger": lambda: zt.get_full_fp32(nn.Parameter(torch.ones(2))),
    }
    messages = {name: message(call) for name, call in calls.items()}
    engine.step()
    backward(engine, 1)
    engine.step()
    messages["after step"] = message(lambda: zt.get_full_grad(member))
    with zt.full_parameters(engine.module):
        messages["held"] = message(lambda: zt.set_full_fp32(member, torch.ones(member.shape)))
        messages["step while held"] = message(engine.step)
    engine.module.get_submodule("blocks.0").register_forward_hook(
        lambda *_: zt.get_full_fp32(member) and None
    )
    messages["forward"] = message(lambda: engine(*micro_batch(0, 0)))
    return messages


def message(call: Any) -> str:
    try:
        call()
    except (RuntimeError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    found: dict[str, str] = run_ranks(2, refusals)[0]
    return found


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("shape", "ValueError: the value for 'embed.weight' must have shape (64, 32); got (3,)"),
        ("kind", "it has ['exp_avg', 'exp_avg_sq']"),
        ("frozen gradient", "ValueError: parameter 'norm.weight' is frozen"),
        ("frozen state", "ValueError: parameter 'norm.weight' is frozen"),
        ("stranger", "ValueError: no engine drives this parameter"),
        ("after step", "RuntimeError: there is no gradient of 'embed.weight': step() clears gradients"),
        ("held", "RuntimeError: set_full_fp32 is not possible within full_parameters"),
        ("step while held", "RuntimeError: step() is not possible within full_parameters"),
        ("forward", "RuntimeError: get_full_fp32 is not possible while the model is in forward"),
    ],
)
def test_wrong_uses_are_named(messages: dict[str, str], case: str, words: str) -> None:
    assert words in messages[case]
