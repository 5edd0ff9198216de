"""Writes that cannot be kept are refused by name on every rank, with a remedy that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.runtime.facade.test_outside_writes import PRECISIONS, Net, engine_at, masters, train
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.training import world

pytestmark = pytest.mark.ranks


def message_of(stage: int, precision: str, write: Any) -> tuple[str, str]:
    """The step's error after a write; and after all ranks took rank 0's values."""
    model, engine = engine_at(stage, precision, 0.01)
    train(engine)
    write(model)
    try:
        train(engine)
        message = "nothing"
    except zt.OutsideWrite as error:
        message = str(error)
    engine.zero_grad()
    with zt.full_parameters(model, modifier_rank=0):
        pass
    train(engine)
    digest = [float(value.double().sum()) for value in masters(engine).values()]
    rows = engine.comm.gather_record(digest)
    then = "replicas are equal" if all(row == rows[0] for row in rows) else "replicas differ"
    engine.close()
    return message, then


@torch.no_grad()
def write_on_one_rank(model: Net) -> None:
    if world()[0] == 1:
        model.head.weight[0, 0] = 7.0


@torch.no_grad()
def write_differently(model: Net) -> None:
    model.base.bias.fill_(float(world()[0]))


def differing() -> list[str]:
    wrong = []
    for precision in ("fp32", "bf16", "fp16"):
        for stage in (0, 1, 2):
            for write, name in ((write_on_one_rank, "'head.weight'"), (write_differently, "'base.bias'")):
                message, then = message_of(stage, precision, write)
                if name not in message or "modifier_rank=0" not in message or then != "replicas are equal":
                    wrong.append(f"stage {stage}, {precision}, {name}: {message}; {then}")
    return wrong


def test_what_ranks_wrote_differently_is_refused_everywhere() -> None:
    assert run_ranks(2, differing) == [[], []]


class Limited(nn.Module):
    """A model that writes into its embedding in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32, max_norm=0.5)
        self.out = nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.out(self.embed(tokens))
        return hidden.float().square().mean()


def limited(stage: int, precision: dict[str, Any], same_rows: bool) -> str:
    """Return the largest norm of a row after two steps, or the error."""
    torch.manual_seed(0)
    model = Limited()
    settings = config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **precision)
    engine, *_ = zt.initialize(model=model, config=settings)
    rank, world_size = world()
    tokens = torch.arange(50) if same_rows else torch.arange(50).chunk(world_size)[rank]
    try:
        for _ in range(2):
            engine.backward(engine(tokens))
            engine.step()
        with zt.full_parameters(model):
            norm = float(model.embed.weight.float().norm(dim=1).max())
        found = "limited" if norm < 0.55 else f"a norm of {norm}"
    except zt.OutsideWrite as error:
        found = "refused" if "'embed.weight'" in str(error) and "max_norm" in str(error) else str(error)
    engine.core.close()
    return found


def all_limited() -> dict[tuple[int, str, bool], str]:
    return {
        (stage, precision, same_rows): limited(stage, PRECISIONS[precision], same_rows)
        for stage in (0, 1, 2, 3)
        for precision in ("fp32", "bf16")
        for same_rows in (True, False)
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_embeddings_with_max_norm(world_size: int) -> None:
    for found in run_ranks(world_size, all_limited):
        for (stage, precision, same_rows), outcome in found.items():
            is_kept = world_size == 1 or (same_rows and stage < 3)
            assert outcome == ("limited" if is_kept else "refused"), (stage, precision, same_rows)


@torch.no_grad()
def written_while_held() -> list[str]:
    model, engine = engine_at(3, "fp32", 0.01)
    outcomes = []
    try:
        with zt.full_parameters(model):
            model.head.weight.fill_(1.0)
    except zt.OutsideWrite as error:  # on the ranks that own what was written
        outcomes.append(str("'head.weight'" in str(error) and "modifier_rank=0" in str(error)))
    with zt.full_parameters(model):  # as an evaluation with averaged weights does
        kept = model.head.weight.clone()
        model.head.weight.fill_(1.0)
        model.head.weight.copy_(kept)
    with zt.full_parameters(model, modifier_rank=0), zt.full_parameters(model.head):
        model.head.weight.fill_(2.0)
    with torch.enable_grad():
        train(engine)
    outcomes.append(str(bool((zt.get_full_fp32(model.get_parameter("head.weight")) - 2).abs().max() < 0.1)))
    try:
        model.tower.load_state_dict(Net().tower.state_dict())
    except RuntimeError as error:
        outcomes.append(str("partitioned over the ranks" in str(error)))
    engine.close()
    return outcomes


def test_partitioned_weights_are_written_with_a_rank_named() -> None:
    assert run_ranks(2, written_while_held) == [["True"] * 3, ["True"] * 2]


def halve(module: nn.Module, _: object) -> None:
    module.get_parameter("weight").data.mul_(0.5)


def through_data(stage: int, is_watched: bool) -> str:
    model, engine = engine_at(stage, "bf16", 0.01)
    if is_watched:
        engine.watch_data_writes()
    train(engine)
    model.head.register_forward_pre_hook(halve)
    try:
        train(engine)
        found = "nothing"
    except zt.OutsideWrite as error:
        found = str(error)
    engine.core.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_writes_through_data_are_found_on_request(stage: int) -> None:
    assert run_ranks(2, through_data, stage, False) == ["nothing"] * 2
    for message in run_ranks(2, through_data, stage, True):
        assert "'head.weight'" in message
        assert stage == 3 or ".data" in message
