""" "auto" is resolved by Hugging Face's rules where the caller knows the value, otherwise to the default with
a notice.
"""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.contract.config import AutoValues, EngineConfig, load, resolve
from zerotrain.contract.config.auto import RULES
from zerotrain.contract.config.table import KEYS

pytestmark = pytest.mark.unit


EVERYTHING_AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
}

KNOWN = AutoValues(
    hidden_size=4096,
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    learning_rate=3e-4,
    betas=(0.9, 0.95),
    eps=1e-7,
    weight_decay=0.1,
    max_grad_norm=0.5,
    warmup_steps=50,
    total_steps=1000,
    bf16=True,
    fp16=False,
)


def origins(config: EngineConfig) -> dict[str, str]:
    return {line.path: line.origin for line in config.report}


def test_everything_known() -> None:
    config = resolve(load(EVERYTHING_AUTO), world_size=8, auto=KNOWN)
    zero, optimizer, scheduler = config.zero, config.optimizer, config.scheduler
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size) == (4096 * 4096, int(0.9 * 4096 * 4096))
    assert zero.param_persistence_threshold == 40_960
    assert config.batch.train_batch_size == 2 * 4 * 8
    assert config.gradient_clipping == 0.5
    assert config.precision.compute_dtype == "bf16"
    assert optimizer is not None
    assert scheduler is not None
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (
        3e-4,
        (0.9, 0.95),
        1e-7,
        0.1,
    )
    assert {name: scheduler.params[name] for name in ("total_num_steps", "warmup_num_steps")} == {
        "total_num_steps": 1000,
        "warmup_num_steps": 50,
    }
    assert (scheduler.params["warmup_min_lr"], scheduler.params["warmup_max_lr"]) == (0.0, 3e-4)
    assert not config.unsupported
    assert origins(config)["zero_optimization.prefetch_bucket_size"] == "auto"
    assert origins(config)["zero_optimization.sub_group_size"] == "file"


def test_nothing_known() -> None:
    config = resolve(load(EVERYTHING_AUTO), world_size=8)
    assert config.zero.reduce_bucket_size == 500_000_000
    assert config.batch.train_batch_size == 8
    assert config.optimizer is not None
    assert config.optimizer.lr == 1e-3
    assert config.precision.compute_dtype == "fp32"
    notices = {notice.path: notice.message for notice in config.notices}
    assert "hidden size" in notices["zero_optimization.stage3_prefetch_bucket_size"]
    assert [item.path for item in config.unsupported] == ["scheduler.params.total_num_steps"]
    assert origins(config)["zero_optimization.reduce_bucket_size"] == "default"


def test_the_end_of_the_schedule_comes_from_the_job() -> None:
    file = {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}}}
    config = resolve(load(file), world_size=1, auto=AutoValues(total_steps=70))
    assert config.scheduler is not None
    assert config.scheduler.params["total_num_steps"] == 70
    assert not config.unsupported
    written = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 60}}}
    config = resolve(load(written), world_size=1, auto=AutoValues(total_steps=70))
    assert config.scheduler is not None
    assert config.scheduler.params["total_num_steps"] == 60


def test_auto_without_a_rule_is_the_default() -> None:
    config = resolve(load({"zero_optimization": {"overlap_comm": "auto", "stage": 3}}), world_size=1)
    assert config.zero.overlap_comm
    assert any("no rule" in notice.message for notice in config.notices)


def test_every_rule_exists() -> None:
    assert {key.auto for key in KEYS if key.auto} == set(RULES)
