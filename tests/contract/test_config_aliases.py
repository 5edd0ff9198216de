"""Aliases, older forms and misplaced keys come to the same configuration; contradictions are errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zerotrain.contract.config import ConfigError, EngineConfig, load, resolve
from zerotrain.contract.config.table import KEYS

pytestmark = pytest.mark.unit


def bare(config: EngineConfig) -> EngineConfig:
    return replace(config, notices=(), report=(), unsupported=())


def resolved(values: dict[str, Any]) -> EngineConfig:
    return resolve(load(values), world_size=2)


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (older or other form, canonical form)
    "bfloat16": ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
    "cpu_offload": (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
    "cpu_offload false": (
        {"zero_optimization": {"stage": 2, "cpu_offload": False}},
        {"zero_optimization": {"stage": 2}},
    ),
    "cpu_offload_param": (
        {"zero_optimization": {"stage": 3, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}},
    ),
    "stage as a truth value": ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
    "misplaced": (
        {"stage": 3, "stage3_max_live_parameters": 7, "offload_param": {"device": "cpu"}},
        {"zero_optimization": {"stage": 3, "max_live_parameters": 7, "offload_param": {"device": "cpu"}}},
    ),
    "any case": (
        {"optimizer": {"type": "adamw"}, "communication_data_type": "BF16"},
        {"optimizer": {"type": "AdamW"}, "communication_data_type": "bf16"},
    ),
    "long dtype": ({"communication_data_type": "bfloat16"}, {"communication_data_type": "bf16"}),
    "fp16 gather": (
        {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}},
        {"zero_optimization": {"gather_16bit_weights_on_model_save": True}},
    ),
}


@pytest.mark.parametrize(("other", "canonical"), PAIRS.values(), ids=PAIRS.keys())
def test_same_configuration(other: dict[str, Any], canonical: dict[str, Any]) -> None:
    assert bare(resolved(other)) == bare(resolved(canonical))


def test_every_alias_of_the_table() -> None:
    aliases = [(key, alias) for key in KEYS for alias in key.aliases]
    assert len(aliases) >= 10
    for key, alias in aliases:
        block, _, name = key.path.rpartition(".")
        values: dict[str, Any] = {"int": 7, "text": "bf16"}
        value = values.get(key.kind.value, True)
        one, other = {alias: value}, {name: value}
        if block:
            one, other = {block: one}, {block: other}
        assert bare(resolved(one)) == bare(resolved(other)), alias


def test_the_same_value_twice_is_fine_and_two_values_are_not() -> None:
    both = {"stage3_prefetch_bucket_size": 5, "prefetch_bucket_size": 5}
    assert resolved({"zero_optimization": both}).zero.prefetch_bucket_size == 5
    for values in (
        {"zero_optimization": {**both, "prefetch_bucket_size": 6}},
        {"zero_optimization": {"stage": 2}, "stage": 3},
        {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}},
        {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}},
    ):
        with pytest.raises(ConfigError, match="is the same key as"):
            resolved(values)


def test_messages_use_the_name_that_was_written() -> None:
    block = {"enabled": True, "bf16_master_weights_and_grads": True}
    config = resolved({"bfloat16": block, "optimizer": {"type": "Muon"}})
    assert [item.path for item in config.unsupported] == ["bfloat16.bf16_master_weights_and_grads"]
    with pytest.raises(ConfigError, match=r"^zero_optimization.stage3_max_live_parameters: "):
        resolved({"zero_optimization": {"stage3_max_live_parameters": -1}})


def test_defaults() -> None:
    """The defaults follow DeepSpeed's newest code where its documents differ; clipping stays off."""
    config = resolved({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    assert config.gradient_clipping == 0.0
    assert config.zero.overlap_comm
    assert config.zero.contiguous_gradients
    assert config.zero.offload_optimizer is not None
    assert config.zero.offload_optimizer.pin_memory
    assert config.zero.offload_optimizer.nvme_path is None
    assert config.precision.check_grad_overflow
    assert not resolved({"zero_optimization": {"stage": 2}}).zero.overlap_comm
    assert resolved({}).zero.stage == 0
