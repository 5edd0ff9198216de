"""DeepSpeed's names on parameters, and `GatheredParameters` and `zero.Init` inside forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import check_equal, config
from tests.support.ranks import RankFailed, run_ranks
from tests.support.training import world
from zerotrain.runtime import deepspeed
from zerotrain.runtime.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param

pytestmark = pytest.mark.ranks

WIDTH, VOCABULARY = 8, 40


class ChunkedHead(torch.autograd.Function):
    """Logits and loss without storing the logits: forward and backward each gather and read the weight."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        with deepspeed.zero.GatheredParameters([weight]):
            ctx.weight, values = weight, weight.detach()
            ctx.save_for_backward(hidden)
            return (hidden @ values.T).square().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (hidden,) = ctx.saved_tensors
        with deepspeed.zero.GatheredParameters([ctx.weight]), torch.no_grad():
            values = ctx.weight.detach()
            logits = hidden @ values.T
            slope = gradients[0] * 2 * logits / logits.numel()
            return slope @ values, slope.T @ hidden


class Norm(nn.Module):
    """A module that scales by the norm of another module's weight, as DoRA does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self._base = [base]  # not a child

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._base[0].weight
        with deepspeed.zero.GatheredParameters(weight):
            norm = weight.norm(dim=1).detach()
        out: torch.Tensor = hidden * self.scale / norm
        return out


class Model(nn.Module):
    """A model that gathers its own and other parameters in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = Norm(self.blocks[0])  # type: ignore[arg-type]
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        with deepspeed.zero.GatheredParameters(self.blocks.parameters()):
            for block in self.blocks:
                hidden = torch.tanh(block(hidden))
        return ChunkedHead.apply(self.norm(hidden), self.head.weight)  # type: ignore[no-untyped-call, no-any-return]


def loss(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    out: torch.Tensor = model(torch.randint(0, VOCABULARY, (5,), generator=generator))
    return out


def test_gathering_within_a_pass_trains_as_plain_torch_does() -> None:
    check_equal(Model, loss, stages=(0, 2, 3))


def builds_within_forward() -> list[bool]:
    class Builds(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with deepspeed.zero.Init():
                found.append(nn.Linear(2, 2).weight)
            return super().forward(tokens)

    found: list[torch.Tensor] = []
    engine, *_ = zt.initialize(model=Builds(), config=config(3))
    engine.backward(loss(engine, 0, world()[0]))
    engine.step()
    with deepspeed.zero.Init():
        found.append(nn.Linear(2, 2).weight)
    return [weight.is_meta for weight in found]


def test_building_within_a_pass_makes_plain_tensors() -> None:
    assert run_ranks(2, builds_within_forward) == [[False, True]] * 2


def writes_within_forward() -> None:
    class Writes(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with deepspeed.zero.GatheredParameters(self.head.weight, modifier_rank=0):
                return super().forward(tokens)

    engine, *_ = zt.initialize(model=Writes(), config=config(3))
    loss(engine, 0, 0)


def test_writing_within_a_pass_is_refused() -> None:
    with pytest.raises(RankFailed, match="full_parameters is not possible while the model is in forward"):
        run_ranks(2, writes_within_forward)


def state_of(parameter: Any) -> Any:
    """Read a parameter as the scripts of LLaVA, FastChat and others do."""
    if hasattr(parameter, "ds_id"):
        assert parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.data.detach().cpu().clone()
    return parameter.detach().cpu().clone()


def looks(stage: int) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Model()
    whole = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine, *_ = zt.initialize(model=model, config=config(stage))
    read = {name: state_of(value) for name, value in model.named_parameters()}
    labelled: dict[str, Any] = {
        name: value for name, value in model.named_parameters() if hasattr(value, "ds_id")
    }
    found: dict[str, Any] = {
        "equal": all(torch.equal(read[name], value) for name, value in whole.items()),
        "labelled": len(labelled),
        "shapes": all(value.ds_shape == whole[name].shape for name, value in labelled.items()),
        "numels": all(value.ds_numel == whole[name].numel() for name, value in labelled.items()),
        "ids": len({value.ds_id for value in labelled.values()}),
        "again": [value.ds_id for value in labelled.values()] == [v.ds_id for v in labelled.values()],
        "parts": {name: value.ds_tensor.tolist() for name, value in labelled.items()},
        "whole": {name: whole[name].flatten().tolist() for name in labelled},
        "zero": all(is_zero_param(value) for value in labelled.values()),
        "own": [name for value in model.parameters() for name in vars(value)],
    }
    weight: Any = model.head.weight
    weight.ds_status = 7  # as libraries that set it themselves
    found["assigned"] = weight.ds_status
    del weight.ds_status
    with zt.full_parameters(model):
        found["within"] = [name for name, value in model.named_parameters() if hasattr(value, "ds_id")]
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_scripts_read_parameters_by_their_labels(stage: int) -> None:
    reports = run_ranks(2, looks, stage)
    count = len(list(Model().parameters())) if stage == 3 else 0
    for report in reports:
        assert report["equal"]
        assert (report["labelled"], report["ids"]) == (count, count)
        assert report["shapes"]
        assert report["numels"]
        assert report["again"]
        assert report["zero"]
        assert report["assigned"] == 7
        assert report["own"] == report["within"] == [], "nothing is stored on the tensors"
    for name, value in reports[0]["whole"].items():
        parts = [report["parts"][name] for report in reports]
        assert np.allclose(np.concatenate(parts), value)


def groups_of() -> tuple[Any, ...]:
    groups = deepspeed.utils.groups
    engine, *_ = zt.initialize(model=nn.Linear(2, 2), config=config(1))
    same = groups._get_data_parallel_group() is engine.data_parallel_group
    found = (
        groups._get_data_parallel_rank() == engine.rank == world()[0],
        groups._get_data_parallel_world_size(),
        groups._get_model_parallel_world_size(),
        groups._get_sequence_parallel_world_size(),
        groups._get_sequence_parallel_group(),
    )
    return (same, *found)


def test_groups() -> None:
    assert run_ranks(2, groups_of) == [(True, True, 2, 1, 1, None)] * 2


class Experts(nn.Module):
    """A module in which each rank uses only its own expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        out: torch.Tensor = self.experts[index](hidden)
        return out


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixture = Experts()

    def forward(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        out: torch.Tensor = self.mixture(self.first(hidden), index).square().mean()
        return out


def visit(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    out: torch.Tensor = model(torch.randn(3, WIDTH, generator=generator), (step + 2 * rank) % 4)
    return out


def marked() -> nn.Module:
    model = WithExperts()
    assert deepspeed.utils.set_z3_leaf_modules(model, [Experts]) == [model.mixture]
    return model


def test_marked_leaf_modules_are_gathered_as_a_whole() -> None:
    check_equal(marked, visit, stages=(3,))
