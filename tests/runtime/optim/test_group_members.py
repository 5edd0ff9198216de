"""Parameter groups are recognised at a resume by the parameters they hold, whatever their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from zerotrain.runtime.checkpoint import CheckpointMismatch
from zerotrain.runtime.optim.saved_values import match_groups, members_of, regrouped


@pytest.mark.unit
def test_groups_are_matched_by_their_members() -> None:
    stored = [["a.w", "b.w"], ["a.b", "b.b"], ["c"]]
    now = {"c": 0, "a.b": 1, "b.b": 1, "a.w": 2, "b.w": 2}
    assert match_groups(stored, 3, now, 3) == [2, 1, 0]
    assert members_of(now, 3) == [["c"], ["a.b", "b.b"], ["a.w", "b.w"]]


@pytest.mark.unit
def test_members_of_one_side_do_not_count() -> None:
    """Members of one side are frozen on the other; groups without a common member keep their order."""
    assert match_groups([["a", "b"], ["c"]], 2, {"c": 0, "new": 0, "a": 1}, 2) == [1, 0]
    assert match_groups([[], ["a"], ["gone"]], 3, {"a": 0, "x": 2}, 3) == [1, 0, 2]


@pytest.mark.unit
def test_a_checkpoint_without_members_is_matched_by_order() -> None:
    assert match_groups(None, 2, {"a": 1, "b": 0}, 2) == [0, 1]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("stored", "now", "found"),
    [
        ([["a", "b"], ["c"]], {"a": 0, "b": 1, "c": 1}, "parameters 'a' and 'b' were in one parameter group"),
        ([["a"], ["b", "c"]], {"a": 0, "b": 0, "c": 1}, "parameters 'a' and 'b' were in different parameter"),
        ([["a"]], {"a": 0, "b": 1}, "the checkpoint has 1 parameter groups, this optimizer 2"),
    ],
)
def test_other_members_are_refused_by_name(stored: list[list[str]], now: dict[str, int], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        match_groups(stored, len(stored), now, 2)


@pytest.mark.unit
def test_values_per_group_move_and_nothing_else() -> None:
    state = {
        "base_lrs": [1.0, 2.0],
        "_milestones": [5, 7],
        "_schedulers": [{"_last_lr": [3.0, 4.0], "last_epoch": 2}],
    }
    assert regrouped(state, [1, 0]) == {
        "base_lrs": [2.0, 1.0],
        "_milestones": [5, 7],
        "_schedulers": [{"_last_lr": [4.0, 3.0], "last_epoch": 2}],
    }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.norm(self.a(x)))
        return out


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "name": "decay", "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "name": "plain", "lr": 0.02},
    ]


def schedule(optimizer: Any) -> Any:
    """Return a schedule whose state has values per group at two depths."""
    halves = [lambda k: 1 / (1 + k), lambda k: 1 / (2 + k)]
    return SequentialLR(optimizer, [LambdaLR(optimizer, halves), LambdaLR(optimizer, halves)], [2])


def start(stage: int, kind: str, order: int, division: int = 0) -> Any:
    model = Net()
    given = groups(model)[::order]
    if division:
        given[0]["params"].append(given[1]["params"].pop())
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    if kind == "AdamW":
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
        return zt.initialize(model=model, config=settings, model_parameters=given)[0]
    return zt.initialize(model=model, config=settings, model_parameters=given, optimizer=torch.optim.RMSprop)[
        0
    ]


def train(engine: Any, steps: int) -> None:
    while engine.global_steps < steps:
        rows = torch.randn(2, 40, generator=torch.Generator().manual_seed(10 * engine.global_steps))
        engine.backward(engine(rows).square().mean())
        engine.step()


def weights(engine: Any) -> list[torch.Tensor]:
    with zt.full_parameters(engine.module):
        return [parameter.detach().clone() for parameter in engine.module.parameters()]


def reordered(folder: str, stage: int, kind: str) -> list[Any]:
    whole = start(stage, kind, 1)
    train(whole, 4)
    before = start(stage, kind, 1)
    train(before, 2)
    before.optimizer.param_groups[1]["weight_decay"] = 0.3  # by the script, in the run
    before.save_checkpoint(folder)
    again = start(stage, kind, -1)
    again.load_checkpoint(folder)
    found = [(g["name"], g["params"][0].ndim, g["weight_decay"]) for g in again.optimizer.param_groups]
    again.optimizer.param_groups[0]["weight_decay"] = whole.optimizer.param_groups[1]["weight_decay"]
    train(again, 4)
    equal = all(map(torch.equal, weights(whole), weights(again)))
    other, refused = start(stage, kind, 1, division=1), ""
    untouched = weights(other)
    try:
        other.load_checkpoint(folder)
    except CheckpointMismatch as error:
        refused = str(error)
    kept = all(map(torch.equal, untouched, weights(other)))
    other.load_checkpoint(folder, load_optimizer_states=False)
    return [found, equal, refused, kept]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", with_slow_rows(["AdamW", "RMSprop"], quick=["AdamW"]))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resume_with_groups_in_another_order(tmp_path: Path, stage: int, kind: str) -> None:
    for found, equal, refused, kept in run_ranks(2, reordered, str(tmp_path), stage, kind):
        assert found == [("plain", 1, 0.3), ("decay", 2, 0.1)]
        assert equal, "as without the interruption"
        assert "when the checkpoint was written" in refused
        assert "'b.bias'" in refused
        assert kept, "refused before anything is overwritten"


@pytest.mark.ranks
def test_a_schedules_values_per_group_follow(tmp_path: Path) -> None:
    def engine(order: int) -> Any:
        model = Net()
        made = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        given = groups(model)[::order]
        return zt.initialize(model=model, config=made, model_parameters=given, lr_scheduler=schedule)[0]

    first = engine(1)
    train(first, 1)
    first.save_checkpoint(tmp_path)
    second = engine(-1)
    second.load_checkpoint(tmp_path)
    state = second.scheduler.scheduler.state_dict()
    assert state["_schedulers"][0]["base_lrs"] == [0.02, 0.1]
    assert [group["initial_lr"] for group in second.optimizer.param_groups] == [0.02, 0.1]
