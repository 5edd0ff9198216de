"""`initialize` returns a schedule only if configuration or caller named one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import zerotrain.runtime as zt
from zerotrain.runtime.checkpoint import CheckpointMismatch

pytestmark = pytest.mark.ranks

WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
}


def halving(optimizer: Any) -> Any:
    return ExponentialLR(optimizer, 0.5)


def start(scheduler: Any = None, lr_scheduler: Any = None) -> Any:
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    if scheduler is not None:
        settings["scheduler"] = scheduler
    return zt.initialize(model=nn.Linear(4, 4), config=settings, lr_scheduler=lr_scheduler)


def train(engine: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates += engine.get_lr()
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
    return rates


def test_none_is_returned_where_none_is_configured() -> None:
    engine, *_, scheduler = start()
    assert (scheduler, engine.scheduler, engine.lr_scheduler) == (None, None, None)
    engine.optimizer.param_groups[0]["lr"] = 0.3  # a schedule that the script steps itself
    assert train(engine, 2) == [0.3, 0.3]


@pytest.mark.parametrize(
    "given", [{"scheduler": WARMUP}, {"lr_scheduler": halving}], ids=["configured", "given"]
)
def test_one_that_was_asked_for_is_returned(given: dict[str, Any]) -> None:
    engine, *_, scheduler = start(**given)
    assert scheduler is engine.scheduler is engine.lr_scheduler
    train(engine, 3)
    assert scheduler.num_updates == 3
    assert scheduler.get_last_lr() == engine.get_lr()


def test_a_schedule_that_comes_later_begins_at_the_updates_made(tmp_path: Path) -> None:
    without, *_ = start()
    train(without, 3)
    without.save_checkpoint(tmp_path)
    later, *_ = start(WARMUP)
    later.load_checkpoint(tmp_path)
    whole, *_ = start(WARMUP)
    assert train(later, 3) == train(whole, 6)[3:]


def test_a_torch_schedule_does_not_take_the_state_of_none(tmp_path: Path) -> None:
    start()[0].save_checkpoint(tmp_path)
    engine, *_ = start(lr_scheduler=halving)
    with pytest.raises(CheckpointMismatch, match=r"written without a torch schedule.*lr_scheduler=Exp"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
