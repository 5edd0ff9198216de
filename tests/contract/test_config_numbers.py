"""Numbers and truth values in the forms that users write."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.contract.config import ConfigError, EngineConfig, load, resolve

pytestmark = pytest.mark.unit


def with_zero(**values: Any) -> EngineConfig:
    return resolve(load({"zero_optimization": values}), world_size=1)


@pytest.mark.parametrize(
    ("written", "expected"),
    [(5e8, 500_000_000), (0, 0), (1.0, 1), ("5e8", 500_000_000), ("12", 12), (1e15, 10**15)],
)
def test_whole_numbers(written: object, expected: int) -> None:
    value = with_zero(stage3_prefetch_bucket_size=written).zero.prefetch_bucket_size
    assert (type(value), value) == (int, expected)


def test_fractions_are_rounded_down_with_a_notice() -> None:
    config = with_zero(stage3_prefetch_bucket_size=15099494.4)
    assert config.zero.prefetch_bucket_size == 15_099_494
    assert [notice.message for notice in config.notices if "prefetch" in notice.path] == [
        "15099494.4 is rounded down to 15099494."
    ]


@pytest.mark.parametrize(
    "key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
)
def test_part_of_a_sample_is_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: must be a whole number.*2.5.*Write 2 or 3"):
        resolve(load({key: 2.5}), world_size=1)


@pytest.mark.parametrize("wrong", [True, "many", [5], {}, -1, 1e400, 2**63, "nan", "1e999"])
def test_not_whole_numbers(wrong: object) -> None:
    text = {"zero_optimization": {"sub_group_size": wrong}}
    if wrong == 1e400:
        raw = load('{"zero_optimization": {"sub_group_size": 1e400}}')
    else:
        raw = load(text)
    with pytest.raises(ConfigError) as caught:
        resolve(raw, world_size=1)
    assert caught.value.path == "zero_optimization.sub_group_size"


@pytest.mark.parametrize(
    ("written", "expected"), [(True, True), ("true", True), ("False", False), (0, False)]
)
def test_truth_values(written: object, expected: bool) -> None:
    assert with_zero(stage=3, overlap_comm=written).zero.overlap_comm is expected


@pytest.mark.parametrize("wrong", ["yes", 2, 1.5, [True], {}])
def test_not_truth_values(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"overlap_comm: must be true or false"):
        with_zero(overlap_comm=wrong)


@pytest.mark.parametrize("wrong", [[0.9], [0.9, 1.0], [0.9, -0.1], [0.9, 0.95, 0.9], "0.9", 0.9, [True, 0.9]])
def test_betas(wrong: object) -> None:
    file = {"optimizer": {"type": "AdamW", "params": {"betas": wrong}}}
    with pytest.raises(ConfigError) as caught:
        resolve(load(file), world_size=1)
    assert caught.value.path == "optimizer.params.betas"


@pytest.mark.parametrize("wrong", [[3.4, -4.7], [3.4, -4.7, 2.0, 1.0], 3.4])
def test_coefficients_of_newton_schulz(wrong: object) -> None:
    file = {"optimizer": {"type": "Muon", "params": {"ns_coefficients": wrong}}}
    with pytest.raises(ConfigError) as caught:
        resolve(load(file), world_size=1)
    assert caught.value.path == "optimizer.params.ns_coefficients"


def test_ranges() -> None:
    for file, rule in (
        ({"gradient_clipping": -1}, "gradient_clipping: must be at least 0; got -1"),
        ({"fp16": {"loss_scale": -2}}, "fp16.loss_scale: must be at least 0"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}}, "must be at most 1"),
        ({"aio": {"queue_depth": 0}}, "aio.queue_depth: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=rule):
            resolve(load(file), world_size=1)


def test_the_error_has_all_four_parts() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load({"gradient_clipping": "x" * 500}), world_size=1)
    error = caught.value
    assert (error.path, error.rule, error.value) == ("gradient_clipping", "must be a number", "x" * 500)
    assert error.way_out
    assert len(str(error)) < 300
