"""The `fp8` block: what it means, what it refuses, and what it costs in memory."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.contract.config import ConfigError, EngineConfig, load, resolve
from zerotrain.contract.planner.activations import Activations, activations
from zerotrain.contract.planner.shape import gpt_shape
from zerotrain.contract.presets import PRESETS

pytestmark = pytest.mark.unit

BF16 = {"bf16": {"enabled": True}}


def resolved(fp8: dict[str, Any], **more: Any) -> EngineConfig:
    return resolve(load({"train_micro_batch_size_per_gpu": 1, "fp8": fp8, **more}), world_size=1)


def test_defaults_are_rows_and_a_head_in_bf16() -> None:
    fp8 = resolved({"enabled": True}, **BF16).fp8
    assert (fp8.enabled, fp8.recipe, fp8.weight_gradient) == (True, "rowwise", "bf16")
    assert "lm_head" in fp8.exclude


def test_it_runs() -> None:
    block = {"enabled": True, "recipe": "tensorwise", "exclude": [], "weight_gradient": "fp8"}
    config = resolved(block, **BF16)
    assert config.unsupported == ()
    assert (config.fp8.recipe, config.fp8.exclude, config.fp8.weight_gradient) == ("tensorwise", (), "fp8")


@pytest.mark.parametrize("more", [{}, {"fp16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}])
def test_it_needs_bf16(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"fp8\.enabled: needs bf16\.enabled.*Set bf16\.enabled"):
        resolved({"enabled": True}, **more)


def test_a_wrong_recipe_is_named() -> None:
    with pytest.raises(ConfigError, match=r"fp8\.recipe.*rowwise.*tensorwise"):
        resolved({"enabled": True, "recipe": "blockwise"}, **BF16)


def test_the_planner_adds_the_copies_of_products() -> None:
    def work(fp8: dict[str, Any]) -> Activations:
        return activations(gpt_shape(PRESETS["gpt-5m"], source="a test"), resolved(fp8, **BF16))

    without, with_fp8 = work({}), work({"enabled": True})
    assert with_fp8.block_work_bytes > without.block_work_bytes
    assert with_fp8.kept_bytes == without.kept_bytes
