"""The engine trains with what a script reads and writes in a deferred model before `initialize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime import deepspeed
from zerotrain.runtime.construct.pending import is_pending

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.tied = self.head


def deferred() -> Net:
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        return Net()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(model):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def surgery(order: str) -> list[str]:
    """Read and change a model before `initialize`; return what the engine has otherwise."""
    rank, _ = world()
    torch.manual_seed(11 + rank)
    model = deferred()
    if order == "half":
        model.to(torch.bfloat16)
    read = values(model)
    last = 1
    changed = [model.get_parameter(name) for name in ("head.weight", "body.bias")]
    with deepspeed.zero.GatheredParameters(changed, modifier_rank=last):
        if rank == last:
            model.head.weight.data.fill_(float(rank))
            with torch.no_grad():
                model.body.bias.copy_(model.head.weight.sum(0))
    expected = {
        **read,
        "head.weight": torch.full_like(read["head.weight"], last),
        "body.bias": torch.full_like(read["body.bias"], 4 * last),
    }
    engine, *_ = zt.initialize(model=model, config=CONFIG)
    found = values(engine.module)
    engine.close()
    return [name for name, want in expected.items() if not torch.equal(found[name].to(want.dtype), want)]


@pytest.mark.ranks
@pytest.mark.parametrize("order", ["float", "half"])
def test_two_ranks(order: str) -> None:
    assert run_ranks(2, surgery, order) == [[], []]


@pytest.mark.unit
def test_what_is_only_read_stays_without_memory() -> None:
    model = deferred()
    before = model.head.weight
    assert values(model)["head.weight"].abs().max() > 0
    assert model.head.weight is before
    assert is_pending(before)


@pytest.mark.unit
def test_attributes_of_deferred_parameters_stay() -> None:
    model = deferred()
    vars(model.head.weight)["mark"] = vars(model.body.weight)["mark"] = "kept"
    values(model.head)
    engine, *_ = zt.initialize(model=model, config=CONFIG)
    assert [getattr(each, "mark", "") for each in (model.head.weight, model.body.weight)] == ["kept", "kept"]
    engine.close()
