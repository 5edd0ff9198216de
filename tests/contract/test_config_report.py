"""The report shows value, origin and effect of every key, and the table decides what is run."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from zerotrain.contract.config import (
    ActivationCheckpointingConfig,
    AioConfig,
    ConfigError,
    KeyReport,
    OffloadConfig,
    ZeroConfig,
    load,
    resolve,
)
from zerotrain.contract.config.keys import Choice, Key, KeyKind, Status, parent
from zerotrain.contract.config.table import KEYS

pytestmark = pytest.mark.unit


def lines(values: dict[str, Any], **more: Any) -> dict[str, KeyReport]:
    return {line.path: line for line in resolve(load(values), world_size=4, **more).report}


def changed(path: str, **changes: Any) -> tuple[Key, ...]:
    return tuple(replace(key, **changes) if key.path == path else key for key in KEYS)


def test_one_line_per_key_that_applies() -> None:
    report = resolve(load({"optimizer": {"type": "AdamW"}}), world_size=4).report
    paths = [line.path for line in report]
    assert len(paths) == len(set(paths))
    missing = {key.path for key in KEYS} - set(paths)
    assert all(parent(path) in ("optimizer.params", "scheduler.params") for path in missing)
    assert "optimizer.params.lr" in paths
    assert "optimizer.params.freeze_step" not in paths
    assert all(line.effect for line in report)


def test_origins() -> None:
    report = lines(
        {"train_batch_size": 64, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9}}
    )
    assert {
        path: (report[path].value, report[path].origin)
        for path in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "zero_optimization.max_live_parameters",
            "zero_optimization.overlap_comm",
            "zero_optimization.prefetch_bucket_size",
        )
    } == {
        "train_batch_size": (64, "file"),
        "train_micro_batch_size_per_gpu": (16, "derived"),
        "zero_optimization.max_live_parameters": (1_000_000_000, "file"),
        "zero_optimization.overlap_comm": (True, "derived"),
        "zero_optimization.prefetch_bucket_size": (50_000_000, "default"),
    }


def test_effects() -> None:
    report = lines({"zero_optimization": {"stage": 2, "sub_group_size": 1e6}, "fp16": {"loss_scale": 8}})
    assert "gradients are sharded" in report["zero_optimization.stage"].effect
    assert report["zero_optimization.sub_group_size"].status == "accepted"
    assert "one unit" in report["zero_optimization.sub_group_size"].effect
    assert report["fp16.loss_scale"].effect == "No effect: fp16.enabled is false."
    assert report["gradient_clipping"].effect.startswith("Largest global 2-norm")


def test_what_is_not_run_is_marked_and_listed() -> None:
    config = resolve(load({"amp": {"enabled": True}, "fp16": {"loss_scale": 128}}), world_size=1)
    line = next(line for line in config.report if line.path == "amp")
    assert (line.status, line.value) == ("not run", {"enabled": True})
    assert line.effect.startswith("Not run: ")
    assert str(config.unsupported[0]).startswith("amp: ")
    assert config.precision.loss_scale == 128.0


def test_asking_for_nothing_needs_no_word() -> None:
    quiet = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": False, "loss_scale": 0},
        "zero_optimization": {
            "stage": 1,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "zero_quantized_weights": False,
            "zero_hpz_partition_size": 1,
        },
        "tensor_parallel": {"tp_size": 1},
        "elasticity": {"enabled": False, "max_train_batch_size": 10},
        "autotuning": {"enabled": False},
        "wall_clock_breakdown": False,
    }
    config = resolve(load(quiet), world_size=1)
    assert config.notices == ()
    assert config.unsupported == ()


def test_a_block_that_is_off_asks_for_nothing_whatever_else_it_holds() -> None:
    blocks = [key.path for key in KEYS if key.kind is KeyKind.OBJECT and key.status is Status.NOT_RUN]
    assert {"hybrid_engine", "amp", "autotuning"} < set(blocks)
    for path in blocks:
        block: dict[str, Any] = {"enabled": False, "max_out_tokens": 512, "opt_level": "O1"}
        for name in reversed(path.split(".")):
            block = {name: block}
        config = resolve(load(block), world_size=1)
        assert config.unsupported == (), path


def test_a_key_begins_to_run_by_its_row_alone() -> None:
    values = {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}
    path = "zero_optimization.zero_quantized_nontrainable_weights"
    assert [item.path for item in resolve(load(values), world_size=4).unsupported] == [path]
    running = resolve(load(values), world_size=4, keys=changed(path, status=Status.IMPLEMENTED))
    assert running.unsupported == ()
    assert running.zero.zero_quantized_nontrainable_weights


def test_a_row_can_be_refused_while_loading() -> None:
    keys = changed("dump_state", status=Status.REFUSED, note="it is gone", way_out="Remove it.")
    with pytest.raises(ConfigError, match=r"dump_state: is refused: it is gone; got True\. Remove it\."):
        resolve(load({"dump_state": True}), world_size=1, keys=keys)
    assert resolve(load({"dump_state": False}), world_size=1, keys=keys).unsupported == ()


def test_keys_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"fp16\.enabled: must not be on together with bf16"):
        resolve(load({"fp16": {"enabled": True}, "bf16": {"enabled": True}}), world_size=1)


def test_schedules() -> None:
    file: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
        "scheduler": {"type": "WarmupLR"},
    }
    config = resolve(load(file), world_size=1)
    assert config.scheduler is not None
    assert config.scheduler.params["warmup_max_lr"] == 0.25
    file["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_num_steps": 9}}
    assert any("within the warm-up" in notice.message for notice in resolve(load(file), world_size=1).notices)
    file["scheduler"] = {"type": "WarmupLR", "params": {"warmup_min_lr": [0.1, 0.2]}}
    config = resolve(load(file), world_size=1)
    assert config.scheduler is not None
    assert config.scheduler.params["warmup_min_lr"] == [0.1, 0.2]
    assert not config.unsupported


def test_l2_and_decoupled_decay() -> None:
    def decoupled(kind: str, **params: Any) -> bool:
        config = resolve(load({"optimizer": {"type": kind, "params": params}}), world_size=1)
        assert config.optimizer is not None
        return config.optimizer.decoupled_weight_decay

    assert decoupled("AdamW")
    assert decoupled("AdamW", adam_w_mode=False)
    assert decoupled("Adam")
    assert not decoupled("Adam", adam_w_mode=False)
    assert not decoupled("SGD")


def test_defaults_of_the_table_and_of_the_schema_agree() -> None:
    table = {key.path: key.default for key in KEYS}
    for block, schema, left_out in (
        (
            "zero_optimization",
            ZeroConfig,
            {"overlap_comm", "offload_optimizer", "offload_param", "leaf_module", "spill"},
        ),
        ("zero_optimization.offload_optimizer", OffloadConfig, {"device", "buffer_size", "max_in_cpu"}),
        ("aio", AioConfig, set()),
        ("activation_checkpointing", ActivationCheckpointingConfig, {"configured"}),
    ):
        for item in fields(schema):
            if item.name not in left_out:
                assert table[f"{block}.{item.name}"] == item.default, item.name


def test_rows_are_complete() -> None:
    paths = {key.path for key in KEYS}
    assert len(paths) == len(KEYS)
    for key in KEYS:
        rows: tuple[Key | Choice, ...] = (key, *key.choices)
        assert all(row.note for row in rows if row.status not in (Status.IMPLEMENTED, None)), key.path
        assert all(row.way_out for row in rows if row.status in (Status.NOT_RUN, Status.REFUSED)), key.path
        assert not key.needs or key.needs in paths
        assert re.fullmatch(r"[a-z0-9_.]+", key.path)
        assert key.asks_for_nothing(key.default)
        assert key.kind is not KeyKind.OBJECT or key.default is None
