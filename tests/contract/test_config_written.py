"""A resolved configuration reads as the JSON object that the user wrote, as DeepSpeed's `engine.config`
does."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from zerotrain.contract.config import AutoValues, ConfigError, EngineConfig, load, resolve
from zerotrain.contract.config.keys import ENDLESS, KeyKind
from zerotrain.contract.config.schema import BatchConfig
from zerotrain.contract.config.table import KEYS

pytestmark = pytest.mark.unit

FILE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "bfloat16": {"enabled": True},
}


def resolved(values: Any, **more: Any) -> EngineConfig:
    return resolve(load(values), world_size=2, **more)


@pytest.mark.parametrize("source", [FILE, json.dumps(FILE)], ids=["mapping", "text"])
def test_it_reads_as_the_object_that_was_written(source: Any) -> None:
    config = resolved(source)
    assert dict(config) == dict(config.items()) == FILE
    assert config.get("zero_optimization", {}).get("stage", None) == config.zero.stage == 3
    assert config["bfloat16"] == {"enabled": True}
    assert "fp16" not in config
    assert config.get("fp16") is None
    assert config.get("fp16", 7) == 7
    assert (list(config), len(config), list(config.keys())) == (list(FILE), 3, list(FILE))
    assert list(config.values()) == list(FILE.values())
    with pytest.raises(KeyError):
        config["fp16"]
    assert {**config} == FILE


def test_the_copy_is_its_own() -> None:
    values = {"zero_optimization": {"stage": 1}}
    config = resolved(values)
    values["zero_optimization"]["stage"] = 2
    assert config["zero_optimization"]["stage"] == 1


def test_auto_is_what_was_computed() -> None:
    values = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
        "fp16": {"enabled": "auto"},
    }
    config = resolved(values, auto=AutoValues(hidden_size=100, micro_batch_size=4))
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["zero_optimization"] == {"stage": 3, "stage3_prefetch_bucket_size": 9000}
    assert config.zero.prefetch_bucket_size == 9000
    assert config["fp16"] == {"enabled": False}


def test_one_without_a_file_is_empty_and_true() -> None:
    config = EngineConfig(
        world_size=1, batch=BatchConfig(train_batch_size=1, micro_batch_size=1, gradient_accumulation_steps=1)
    )
    assert (dict(config), bool(config)) == ({}, True)


@pytest.mark.parametrize(
    "source",
    [{"steps_per_print": math.inf}, '{"steps_per_print": Infinity}', '{"steps_per_print": 1e999}'],
    ids=["mapping", "word", "number"],
)
def test_infinitely_many_steps_per_print_are_none(source: Any) -> None:
    config = resolved(source)
    assert config.steps_per_print == 0
    assert config["steps_per_print"] == math.inf


def test_no_other_key_may_be_infinite() -> None:
    assert {key.path for key in KEYS if key.path in ENDLESS} == ENDLESS
    assert all(key.kind is KeyKind.INT for key in KEYS if key.path in ENDLESS)
    cases: tuple[tuple[Any, str], ...] = (
        ({"gradient_clipping": math.inf}, "gradient_clipping: must be a finite number; got inf"),
        ({"optimizer": {"params": {"lr": math.nan}}}, "optimizer.params.lr: must be a finite number"),
        ({"optimizer": {"params": {"betas": [0.9, math.inf]}}}, "optimizer.params.betas: must be a finite"),
        ({"steps_per_print": -math.inf}, "steps_per_print: must be a finite number"),
        ({"steps_per_print": math.nan}, "steps_per_print: must be a finite number"),
        ({"bf16": {"steps_per_print": math.inf}}, "bf16.steps_per_print: must be a finite number"),
        ('{"gradient_clipping": Infinity}', "JSON has no Infinity"),
        ('{"steps_per_print": -Infinity}', "JSON has no Infinity"),
        ('{"a": ["steps_per_print", Infinity]}', "JSON has no Infinity"),
        ({"optimizer": {"type": object()}}, "optimizer.type: must be a JSON value; got 'object'"),
    )
    for source, words in cases:
        with pytest.raises(ConfigError) as caught:
            resolved(source)
        assert words in str(caught.value)


def test_dotted_names_at_the_top_are_ignored_with_one_notice_each() -> None:
    config = resolved(
        {
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 4096},
            "zero_optimization.reduce_bucket_size": 1024,
            "zero_optimization.stage3_param_persistence_threshold": 10,
            "my.own": {"any": "thing"},
        }
    )
    assert config.zero.reduce_bucket_size == 4096
    assert config.zero.param_persistence_threshold == 100_000
    messages = {notice.path: notice.message for notice in config.notices if "." in notice.path}
    assert set(messages) == {
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "my.own",
    }
    assert all(message.startswith("Ignored, as in DeepSpeed") for message in messages.values())
    assert (
        "write reduce_bucket_size within the object zero_optimization"
        in (messages["zero_optimization.reduce_bucket_size"])
    )


def test_dotted_names_within_a_block_are_mistakes() -> None:
    with pytest.raises(
        ConfigError, match=r"zero_optimization\.offload_optimizer\.device: is not a known key"
    ):
        resolved({"zero_optimization": {"offload_optimizer.device": "cpu"}})
