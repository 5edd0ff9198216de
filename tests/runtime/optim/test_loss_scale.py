"""The dynamic loss scale follows the values of a table, for no, all and some overflows."""

from __future__ import annotations

import json

import pytest

from zerotrain.contract.config import PrecisionConfig
from zerotrain.runtime.optim.loss_scale import LossScaleError, LossScaler

pytestmark = pytest.mark.unit


OVER, GOOD = True, False


def scaler(
    power: int, *, window: int = 2, hysteresis: int = 1, refills: bool = False, minimum: float = 0.25
) -> LossScaler:
    return LossScaler(
        PrecisionConfig(
            compute_dtype="fp16",
            initial_scale_power=power,
            loss_scale_window=window,
            hysteresis=hysteresis,
            consecutive_hysteresis=refills,
            min_loss_scale=minimum,
        )
    )


def scales(subject: LossScaler, outcomes: list[bool]) -> list[float]:
    """Return the scale after each step."""
    seen = []
    for overflow in outcomes:
        subject.update(overflow=overflow)
        seen.append(subject.scale)
    return seen


# Derived by hand from the rules: an overflow halves (once the hysteresis is used up); the scale doubles when
# the good steps since the last overflow, not counting the one now, are a multiple of the window.
TABLE = {
    "no overflow": (scaler(8), [GOOD] * 7, [256, 256, 512, 512, 1024, 1024, 2048]),
    "all overflow": (scaler(8), [OVER] * 4, [128, 64, 32, 16]),
    "some overflow": (
        scaler(8),
        [OVER, GOOD, GOOD, GOOD, OVER, GOOD, GOOD, GOOD, GOOD, GOOD],
        [128, 128, 128, 256, 128, 128, 128, 256, 256, 512],
    ),
    "the second overflow halves": (
        scaler(4, hysteresis=2),
        [OVER, OVER, OVER, GOOD, GOOD, GOOD, OVER, OVER],
        [16, 8, 4, 4, 4, 8, 8, 4],
    ),
    "single good steps do not refill": (
        scaler(4, hysteresis=3, window=100),
        [OVER, GOOD, OVER, GOOD, OVER, GOOD, OVER],
        [16, 16, 16, 16, 8, 8, 4],
    ),
    "single good steps refill": (
        scaler(4, hysteresis=2, window=100, refills=True),
        [OVER, GOOD, OVER, GOOD, OVER, OVER, OVER],
        [16, 16, 16, 16, 16, 8, 4],
    ),
    "the least scale": (scaler(1, minimum=0.75), [OVER, OVER], [1, 0.75]),
}


@pytest.mark.parametrize("case", TABLE)
def test_table(case: str) -> None:
    subject, outcomes, expected = TABLE[case]
    assert scales(subject, outcomes) == expected


def test_the_defaults_of_the_file_format() -> None:
    subject = LossScaler(PrecisionConfig(compute_dtype="fp16"))
    assert subject.scale == 2.0**16
    assert scales(subject, [GOOD] * 1001)[-2:] == [2.0**16, 2.0**17]


def test_a_fixed_scale_and_other_precisions_stay() -> None:
    for precision, scale in (
        (PrecisionConfig(compute_dtype="fp16", loss_scale=128.0), 128.0),
        (PrecisionConfig(compute_dtype="bf16"), 1.0),
        (PrecisionConfig(), 1.0),
    ):
        assert scales(LossScaler(precision), [OVER, GOOD, OVER]) == [scale] * 3


def test_the_least_scale_ends_the_run_with_a_way_out() -> None:
    subject = scaler(0, minimum=1.0)
    with pytest.raises(
        LossScaleError, match=r"in units \['blocks.1'\] .*min_loss_scale, 1, is reached.* use bf16"
    ):
        subject.update(overflow=True, where=["blocks.1"])
    with pytest.raises(LossScaleError, match="on another rank"):
        subject.update(overflow=True)


def test_the_least_scale_may_go_on_skipping() -> None:
    precision = PrecisionConfig(
        compute_dtype="fp16", initial_scale_power=1, hysteresis=1, raise_error_at_min_scale=False
    )
    assert scales(LossScaler(precision), [OVER] * 4) == [1.0] * 4


def test_a_resumed_scale_goes_on_where_it_was() -> None:
    outcomes = [OVER, GOOD, GOOD, OVER, GOOD, GOOD, GOOD, GOOD, OVER, OVER]
    for cut in range(len(outcomes)):
        whole, first, second = (scaler(8, hysteresis=2) for _ in range(3))
        expected = scales(whole, outcomes)
        seen = scales(first, outcomes[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert seen + scales(second, outcomes[cut:]) == expected


def test_a_fixed_scale_is_this_runs() -> None:
    dynamic, fixed = scaler(8), LossScaler(PrecisionConfig(compute_dtype="fp16", loss_scale=2.0))
    fixed.load_state_dict(dynamic.state_dict())
    assert fixed.scale == 2.0
    dynamic.load_state_dict({})  # from a run without fp16
    assert dynamic.scale == 256.0
