"""An unknown key is an error with its path and the nearest key."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.contract.config import ConfigError, load, resolve

pytestmark = pytest.mark.unit


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: (file, path of the error, suggestion)
    "top level": ({"zero_optimisation": {}}, "zero_optimisation", "Did you mean zero_optimization?"),
    "in a block": (
        {"zero_optimization": {"stge": 2}},
        "zero_optimization.stge",
        "Did you mean zero_optimization.stage?",
    ),
    "old prefix": (
        {"zero_optimization": {"stage3_prefetch_buckets": 1}},
        "zero_optimization.stage3_prefetch_buckets",
        "Did you mean zero_optimization.prefetch_bucket_size?",
    ),
    "the same name in many blocks": (
        {"elasticity": {"enable": True}},
        "elasticity.enable",
        "Did you mean elasticity.enabled?",
    ),
    "two levels": (
        {"zero_optimization": {"offload_optimizer": {"pinned_memory": True}}},
        "zero_optimization.offload_optimizer.pinned_memory",
        "Did you mean zero_optimization.offload_optimizer.pin_memory?",
    ),
    "belongs elsewhere": (
        {"zero_optimization": {"gradient_clipping": 1.0}},
        "zero_optimization.gradient_clipping",
        "Did you mean gradient_clipping?",
    ),
    "optimizer parameter": (
        {"optimizer": {"type": "AdamW", "params": {"weight_dcay": 0.1}}},
        "optimizer.params.weight_dcay",
        "Did you mean optimizer.params.weight_decay?",
    ),
    "nothing near": ({"qqq": 1}, "qqq", "docs/configuration.md"),
    "a key of the program's own": ({"data_folder": "x"}, "data_folder", "Remove it, or put _ before"),
    "nothing near, small block": ({"bf16": {"qqq": 1}}, "bf16.qqq", "Known here are"),
}


@pytest.mark.parametrize(("values", "path", "way_out"), CASES.values(), ids=CASES.keys())
def test_refused(values: dict[str, Any], path: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load(values), world_size=1)
    assert caught.value.path == path
    assert way_out in str(caught.value)


def test_parameters_of_another_optimizer_or_scheduler() -> None:
    for block, kind, name in (
        ("optimizer", "AdamW", "freeze_step"),
        ("scheduler", "WarmupLR", "cycle_min_lr"),
    ):
        values = {block: {"type": kind, "params": {name: 1}}}
        with pytest.raises(ConfigError, match=f"{block}.params.{name}: is not a parameter of {kind}"):
            resolve(load(values), world_size=1)


def test_parameters_without_a_type() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.params.lr: needs optimizer.type"):
        resolve(load({"optimizer": {"params": {"lr": 1e-3}}}), world_size=1)


def test_unknown_values_name_the_nearest() -> None:
    for values, way_out in (
        ({"optimizer": {"type": "AdmW"}}, "Did you mean AdamW?"),
        ({"scheduler": {"type": "WarmupCosinLR"}}, "Did you mean WarmupCosineLR?"),
        ({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}}, "as lr_scheduler of initialize"),
        ({"zero_optimization": {"offload_param": {"device": "nvm"}}}, "Did you mean nvme?"),
        ({"zero_optimization": {"stage": 4}}, "must be one of 0, 1, 2, 3"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(load(values), world_size=1)
        assert way_out in str(caught.value)


def test_a_block_must_be_an_object() -> None:
    for values in ({"bf16": True}, {"zero_optimization": 3}, {"optimizer": "AdamW"}, {"aio": [1]}):
        with pytest.raises(ConfigError, match="must be an object"):
            resolve(load(values), world_size=1)


def test_comment_names_and_null_are_no_keys() -> None:
    config = resolve(
        load({"_comment": "x", "//": 1, "bf16": {"_why": 2}, "gradient_clipping": None}), world_size=1
    )
    assert config.gradient_clipping == 0.0
    assert {notice.path for notice in config.notices} >= {"_comment", "//", "bf16._why"}


def test_an_optimizer_from_outside_the_table() -> None:
    file = {"optimizer": {"type": "Sophia", "params": {"lr": 1e-4, "rho": 0.04}}}
    with pytest.raises(ConfigError, match="must be one of"):
        resolve(load(file), world_size=1)
    config = resolve(load({**file, "zero_allow_untested_optimizer": True}), world_size=1)
    assert config.optimizer is not None
    assert (config.optimizer.type, config.optimizer.lr, config.optimizer.params["rho"]) == (
        "Sophia",
        1e-4,
        0.04,
    )
    assert [item.path for item in config.unsupported] == ["optimizer.type"]
