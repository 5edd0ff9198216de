"""A configuration is judged once, whatever the outcome, and a large one not on the event loop."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import job
from zerotrain.contract.config import ConfigError, load
from zerotrain.operator.api import ZeroTrainingJobSpec, configuration, validation
from zerotrain.operator.api.configuration import Outcomes
from zerotrain.operator.controller.job_pass import HEAVY_BYTES, is_heavy

pytestmark = pytest.mark.unit


def spec(**config: Any) -> ZeroTrainingJobSpec:
    return ZeroTrainingJobSpec.model_validate({**job()["spec"], "config": config})


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configurations that were judged."""
    seen: list[Any] = []

    def counting(config: Any) -> Any:
        seen.append(config)
        return load(config)

    monkeypatch.setattr(configuration, "load", counting)
    monkeypatch.setattr(configuration, "_outcomes", Outcomes(most=4))
    return seen


@pytest.mark.parametrize("wrong", [False, True])
def test_the_same_configuration_is_weighed_once(checked: list[Any], wrong: bool) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, **({"no_such_key": [[[]]]} if wrong else {})}
    first = validation.refusals(spec(**config))
    for _ in range(5):
        assert validation.refusals(spec(**config)) == first
    assert bool(first) == wrong
    assert len(checked) == 1
    validation.refusals(spec(**config, steps_per_print=3))
    assert len(checked) == 2


def test_a_cached_refusal_does_not_collect_the_frames_of_its_callers(checked: list[Any]) -> None:
    def depth() -> int:
        with pytest.raises(ConfigError) as caught:
            configuration.engine_config(spec(no_such_key=1))
        return len(caught.traceback)

    depth()
    assert depth() == depth()


def test_a_bounded_number_of_outcomes_is_kept(checked: list[Any]) -> None:
    for number in range(10):
        validation.refusals(spec(train_micro_batch_size_per_gpu=number + 1))
    assert len(configuration._outcomes) == 4


def test_large_configurations_are_distinguished_from_usual_ones() -> None:
    assert not is_heavy(job())
    assert not is_heavy({"metadata": {}, "spec": {"config": None}})
    assert not is_heavy({"metadata": {}})
    assert is_heavy({"spec": {"config": {"note": "x" * HEAVY_BYTES}}})
