"""`full_parameters`: the ranks that may write, the effect of a write, and nested contexts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.runtime.facade.test_state_access import Model, backward, engine_at, parameter
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.engine import Engine

pytestmark = pytest.mark.ranks


STAGES = (0, 1, 2, 3)


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: zt.get_full_fp32(value) for name, value in engine.module.named_parameters()}


def train_once(engine: Engine) -> None:
    """Train once, so that bf16 weights differ from their masters."""
    for index in range(2):
        backward(engine, index)
        engine.step()


@torch.no_grad()
def write(stage: int, dtype: str) -> None:
    """Write on rank 1: its values win on every rank in the given parameters; others keep their digits."""
    engine = engine_at(stage, dtype)
    with torch.enable_grad():
        train_once(engine)
    before = masters(engine)
    names = ("blocks.0.up.weight", "norm.weight", "spare.bias")
    members = [parameter(engine, name) for name in names]
    with zt.full_parameters(members, modifier_rank=1):
        for member in members:
            member.fill_(1.5 if world()[0] == 1 else float("nan"))
        engine.comm.gather_record([0.0])
        if world()[0] == 0:  # last, so that it would win where the ranks share memory
            for member in members:
                member.fill_(float("nan"))
        engine.comm.gather_record([0.0])
    after = masters(engine)
    for name, value in after.items():
        expected = torch.full_like(value, 1.5) if name in names else before[name]
        assert torch.equal(value, expected), (stage, name)
    with zt.full_parameters(engine.module):
        for name, value in engine.module.named_parameters():
            assert torch.equal(value, after[name].to(value.dtype)), (stage, name)


@torch.no_grad()
def nest() -> None:
    engine = engine_at(3, "fp32")
    block, weight = engine.module.get_submodule("blocks.0"), parameter(engine, "blocks.0.up.weight")
    with zt.full_parameters(engine.module):
        with zt.full_parameters(block), zt.full_parameters(weight, modifier_rank=0):
            weight.fill_(2.0)
        assert float(weight.sum()) == 2.0 * weight.numel(), "the inner end freed what the outer one holds"
    assert "values on other ranks" in repr(weight), "the outer end must free"
    assert engine.memory.transient_bytes == 0
    assert float(zt.get_full_fp32(weight).mean()) == 2.0


@torch.no_grad()
def fail_inside() -> None:
    engine = engine_at(3, "fp32")
    before = masters(engine)
    with pytest.raises(KeyError), zt.full_parameters(engine.module, modifier_rank=0):  # noqa: PT012
        parameter(engine, "spare.bias").fill_(7.0)
        raise KeyError
    assert engine.memory.transient_bytes == 0
    assert all(torch.equal(value, before[name]) for name, value in masters(engine).items())


def use_inside() -> None:
    """Run forward and backward on the held weights; none is freed before the context ends."""
    engine = engine_at(3, "fp32")
    with zt.full_parameters(engine.module):
        backward(engine, 0)
        assert float(parameter(engine, "embed.weight").norm()) > 0
    assert engine.memory.transient_bytes == 0
    engine.step()
    with pytest.raises(ValueError, match=r"modifier_rank must be in \[0, 2\) or None; got 2"):  # noqa: SIM117
        with zt.full_parameters(engine.module, modifier_rank=2):
            pass
    with zt.full_parameters(Model(), modifier_rank=2), zt.full_parameters(engine.module, enabled=False):
        assert engine.memory.transient_bytes == 0


def everything() -> None:
    for stage in STAGES:
        write(stage, "fp32")
        write(stage, "bf16")
    nest()
    fail_inside()
    use_inside()


def test_writes_nesting_and_errors() -> None:
    run_ranks(2, everything)


def replace(stage: int, dtype: str) -> list[str]:
    """Give parameters new memory, as `vector_to_parameters` does, with and without a rank that writes."""
    engine, errors = engine_at(stage, dtype), []
    train_once(engine)
    model = engine.module
    with zt.full_parameters(model, modifier_rank=1):
        values = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(torch.full_like(values, world()[0] + 1), model.parameters())
    assert all(bool((value.bfloat16() == 2).all()) for value in masters(engine).values())
    with zt.full_parameters(model, modifier_rank=0), zt.full_parameters(model):
        for member in model.parameters():
            member.data = torch.full_like(member, 3)
    assert all(bool((value.bfloat16() == 3).all()) for value in masters(engine).values())
    for given, rank in ((torch.ones(4), None), (torch.ones(3), 0)):
        try:
            with zt.full_parameters(model, modifier_rank=rank):
                parameter(engine, "norm.weight").data = given
        except RuntimeError as error:
            errors.append(str(error))
    backward(engine, 0)
    engine.step()
    engine.close()
    return errors


def replace_everywhere() -> dict[str, list[str]]:
    return {f"{stage} {dtype}": replace(stage, dtype) for stage in STAGES for dtype in ("fp32", "bf16")}


def test_parameters_that_got_new_memory_keep_what_it_holds() -> None:
    for found in run_ranks(2, replace_everywhere):
        for case, errors in found.items():
            assert errors, case
            assert all("parameter 'norm.weight' of shape" in text for text in errors), case
            assert all("pass modifier_rank=0" in text for text in errors), case


class SharedHead(nn.Module):
    """A model that uses a parameter of one layer in another one, so that its unit lives through a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.block(self.embed(tokens)) + self.embed.weight.mean()
        return hidden.square().mean()


def evaluate_within() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}  # type: ignore[operator]
    engine, *_ = zt.initialize(model=SharedHead(), config=config, unit_modules=["embed", "block"])
    tokens = torch.arange(4)
    for _ in range(2):
        engine.backward(engine(tokens))
        engine.step()
        with torch.no_grad(), zt.full_parameters(engine.module):
            for _ in range(2):
                engine.module(tokens)
                assert all(bool(value.isfinite().all()) for value in engine.module.parameters())


def test_a_forward_pass_within_leaves_parameters_whole() -> None:
    run_ranks(2, evaluate_within)
