"""The `compile` block: what it means and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.contract.config import ConfigError, EngineConfig, load, resolve
from zerotrain.contract.config.schema import CompileConfig
from zerotrain.contract.planner.activations import ASSUMPTIONS, activations
from zerotrain.contract.planner.shape import gpt_shape
from zerotrain.contract.presets import PRESETS

pytestmark = pytest.mark.unit


def resolved(block: dict[str, Any]) -> EngineConfig:
    return resolve(load({"train_micro_batch_size_per_gpu": 1, "compile": block}), world_size=1)


def test_defaults_are_those_of_torch() -> None:
    config = resolved({"enabled": True})
    assert config.unsupported == ()
    assert config.compile == CompileConfig(enabled=True, backend="inductor", mode="default", dynamic=None)
    assert resolved({}).compile == CompileConfig()


def test_arguments_of_torch_compile() -> None:
    options = {"epilogue_fusion": True, "max_autotune": True}
    block: dict[str, Any] = {
        "enabled": True,
        "backend": "aot_eager",
        "options": options,
        "dynamic": True,
        "fullgraph": True,
    }
    assert resolved(block).compile == CompileConfig(**block)


@pytest.mark.parametrize(
    ("mode", "instead"), [("reduce-overhead", "default"), ("max-autotune", "max-autotune-no-cudagraphs")]
)
def test_modes_with_cuda_graphs_are_not_run(mode: str, instead: str) -> None:
    (item,) = resolved({"enabled": True, "mode": mode}).unsupported
    assert (item.path, item.way_out) == ("compile.mode", f'Set compile.mode to "{instead}".')
    assert "fixed addresses" in item.reason


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"options": {"triton.cudagraphs": True}}, r"compile\.options.*fixed addresses.*Remove"),
        (
            {"options": {"max_autotune": True}, "mode": "max-autotune-no-cudagraphs"},
            r"compile\.options: cannot be combined with compile\.mode",
        ),
        ({"mode": "fastest"}, r"compile\.mode.*max-autotune-no-cudagraphs"),
        ({"dynamic": "sometimes"}, r"compile\.dynamic"),
    ],
)
def test_what_cannot_run_is_named(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved({"enabled": True, **block})


def test_plans_count_units_as_eager_and_say_so() -> None:
    shape = gpt_shape(PRESETS["gpt-5m"], source="a test")
    assert activations(shape, resolved({"enabled": True})) == activations(shape, resolved({}))
    assert any("compile.enabled" in each for each in ASSUMPTIONS)
