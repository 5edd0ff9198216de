"""Ranks with different configurations get an error before they train."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.contract.config import ConfigError, EngineConfig, load, resolve
from zerotrain.runtime.config_check import settings_of

pytestmark = pytest.mark.ranks


BASE: dict[str, Any] = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


def start(change: dict[str, Any]) -> str:
    """Return the error of `initialize` when rank 1 has a change."""
    try:
        zt.initialize(model=nn.Linear(4, 4), config={**BASE, **(change if dist.get_rank() == 1 else {})})
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}}, "optimizer.lr"),
        ({"gradient_clipping": 0.5}, "gradient_clipping"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}}, "zero.reduce_bucket_size"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler (block)"),
        ({"gradient_accumulation_steps": 1, "train_batch_size": 4}, "batch.train_batch_size"),
    ],
)
def test_the_setting_is_named_on_every_rank(change: dict[str, Any], path: str) -> None:
    for text in run_ranks(2, start, change):
        assert text.startswith(f"{path}: must be the same on every rank, and rank 1 has another")


def test_equal_ranks_start() -> None:
    assert run_ranks(2, start, {}) == ["nothing", "nothing"]


def test_every_setting_is_compared() -> None:
    config = resolve(load({**BASE, "scheduler": {"type": "WarmupLR", "params": {}}}), world_size=1)
    paths = [path for path, _ in settings_of(config)]
    assert paths == [path for path, _ in settings_of(resolve(load({"train_batch_size": 2}), world_size=1))]
    free = {"notices", "unsupported", "report", "source"}
    assert {path.partition(".")[0].removesuffix(" (block)") for path in paths} == {
        item.name for item in fields(EngineConfig)
    } - free
    whole = [path for path, value in settings_of(config) if is_dataclass(value)]
    assert whole == [], "blocks that are compared as a whole"
