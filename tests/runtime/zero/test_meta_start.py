"""Models built within `init_context` take no memory, and get the same values however they are sharded."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import Case, whole_parameters, world
from zerotrain.runtime.construct import context
from zerotrain.runtime.zero.layout import LayoutError


class Unusual(nn.Module):
    """A model whose constructors set values in every possible way."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 3.0))
        self.register_buffer("inv_freq", 1.0 / (100 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)).bool())
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.listed = torch.linspace(0, 1, 3).tolist()
        self.array = (torch.arange(3) * 2).numpy()
        block = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(2))
        self.constant = nn.Linear(2, 2)
        self.constant.weight.data.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.constant.weight.data[0] = 7
        self.orthogonal = nn.Linear(6, 6)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.trunc_normal_(self.orthogonal.bias, std=0.1, b=0.2)
        self.embed = nn.Embedding(9, 8, padding_idx=2)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight
        self.real = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x).sum() + self.scale.sum() + self.orthogonal(x[:, :6]).sum()
        rest: torch.Tensor = self.real.sum() + self.constant(x[:, :2]).sum()
        return out + rest


@pytest.mark.unit
def test_what_the_constructor_did_is_done() -> None:
    with zt.init_context(seed=1):
        model = Unusual()
        assert model.scale.device.type == "cpu", "initialisers would skip what says that it is elsewhere"
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if name != "real")
    assert (model.rates, model.listed) == ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0])
    assert model.array.tolist() == [0, 2, 4]
    scale = model.scale
    zt.materialize(model)
    assert model.scale is scale
    assert scale.tolist() == [3.0] * 5
    expected = Unusual()
    assert torch.equal(model.get_buffer("inv_freq"), expected.get_buffer("inv_freq"))
    assert torch.equal(model.get_buffer("mask"), expected.get_buffer("mask"))
    assert model.constant.weight.tolist() == [[7.0, 7.0], [3.0, 4.0]]
    assert torch.equal(model.blocks[0].weight, model.blocks[1].weight)  # type: ignore[arg-type]
    product = model.orthogonal.weight @ model.orthogonal.weight.T
    torch.testing.assert_close(product, torch.eye(6), atol=1e-6, rtol=0)
    assert model.orthogonal.bias.max() <= 0.2
    assert model.embed.weight[2].eq(0).all()
    assert model.embed.weight[3].std() > 0.3
    assert model.head.weight is model.embed.weight


@pytest.mark.unit
def test_a_change_of_dtype_afterwards_keeps_the_values() -> None:
    with zt.init_context(seed=1):
        model = TinyGPT(tied=True)
    model.bfloat16()
    with zt.init_context(seed=1):
        expected = TinyGPT(tied=True)
    zt.materialize(model)
    zt.materialize(expected)
    assert model.head.weight is model.embed.weight
    first, second = (model.get_parameter(f"blocks.{index}.up.weight") for index in (0, 1))
    assert not torch.equal(first, second), "every random operation has a seed of its own"
    for name, value in model.named_parameters():
        assert torch.equal(value, expected.get_parameter(name).bfloat16()), name


@pytest.mark.unit
def test_the_generator_of_the_program_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with zt.init_context():
        model = nn.Linear(4, 4)
    zt.materialize(model)
    assert torch.equal(torch.rand(3), expected)


def start(case: Case, seed: int | None) -> dict[str, np.ndarray[Any, Any]]:
    """Return values right after the start; then do one step to check that the model trains."""
    rank, world_size = world()
    torch.manual_seed(rank)  # the ranks differ: rank 0's seed must win
    config = {**case.config(world_size), "train_batch_size": world_size}
    with zt.init_context(config=config, seed=seed):
        model = TinyGPT(tied=case.tied)
    engine, *_ = zt.initialize(model=model, config=config)
    with zt.full_parameters(model):
        found = whole_parameters(model)
    tokens, targets = next(iter(token_batches(1, size=world_size)))
    loss = engine(tokens[rank : rank + 1], targets[rank : rank + 1])
    engine.backward(loss)
    engine.step()
    assert loss.isfinite()
    engine.close()
    return found


def start_all(cases: tuple[Case, ...], seed: int | None) -> list[dict[str, np.ndarray[Any, Any]]]:
    return [start(case, seed) for case in cases]


CASES = tuple(Case(stage=stage, tied=stage == 2) for stage in (0, 2, 3))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "seed"), with_slow_rows([(1, None), (2, None), (3, 11)], quick=[(2, None)])
)
def test_values_do_not_depend_on_ranks_or_stage(world_size: int, seed: int | None) -> None:
    expected = {}
    for tied in (False, True):
        torch.manual_seed(0)
        with zt.init_context(seed=seed):
            model = TinyGPT(tied=tied)
        expected[tied] = whole_parameters(zt.materialize(model))
    for answers in run_ranks(world_size, start_all, CASES, seed):
        for case, found in zip(CASES, answers, strict=True):
            assert found.keys() == expected[case.tied].keys()
            for name, value in expected[case.tied].items():
                assert np.array_equal(found[name], value), (case.stage, name)


def mixed_start(stage: int) -> dict[str, np.ndarray[Any, Any]]:
    """Start a model of which a part was built outside of the context, differently on each rank."""
    rank, world_size = world()
    with zt.init_context(seed=2):
        model = Unusual()
    torch.manual_seed(rank)
    model.blocks.append(nn.Linear(8, 8))
    model.blocks[0].weight.requires_grad = False
    groups = [{"params": list(model.parameters()), "lr": 0.1}]
    config = Case(stage=stage).config(world_size)
    engine, *_ = zt.initialize(model=model, config=config, model_parameters=groups)
    with zt.full_parameters(model):
        found = whole_parameters(model)
    engine.backward(engine(torch.ones(2, 8)))
    engine.step()
    engine.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_parts_that_hold_values_keep_rank_0s(stage: int) -> None:
    with zt.init_context(seed=2):
        expected = Unusual()
    torch.manual_seed(0)
    expected.blocks.append(nn.Linear(8, 8))
    zt.materialize(expected)
    for found in run_ranks(2, mixed_start, stage):
        for name, value in whole_parameters(expected).items():
            assert np.array_equal(found[name], value), name


@pytest.mark.unit
def test_parameters_without_values_are_named() -> None:
    with torch.device("meta"):
        bare = nn.Linear(2, 2)
    with pytest.raises(LayoutError, match=r"'weight', 'bias': on the meta device, without values"):
        zt.initialize(model=bare, config={"train_batch_size": 1})
    with zt.init_context():
        model = nn.Linear(2, 2)
        model.extra = nn.Parameter(torch.empty(3))
    with pytest.raises(LayoutError, match=r"'extra': made by torch.empty .* never filled"):
        zt.initialize(model=model, config={"train_batch_size": 1})


@pytest.mark.unit
def test_a_wrong_configuration_is_refused_before_the_model_is_built() -> None:
    with pytest.raises(ValueError, match="a value must be"), zt.init_context(config="{wrong"):
        raise AssertionError("the model would be built first")


@pytest.mark.unit
def test_what_was_recorded_is_dropped_with_the_start() -> None:
    with zt.init_context():
        model = nn.Linear(2, 2)
    log = weakref.ref(context.logs_of(model)[0])
    engine, *_ = zt.initialize(model=model, config={"train_batch_size": 1})
    gc.collect()
    assert log() is None
    engine.close()


@pytest.mark.unit
def test_a_switch_builds_plainly() -> None:
    with zt.init_context(enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta
