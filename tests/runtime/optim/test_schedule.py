"""Learning-rate schedules against their closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zerotrain.contract.config import ConfigError, SchedulerConfig
from zerotrain.runtime.optim.schedule import LrSchedule

pytestmark = pytest.mark.unit


BASE = 0.5


def rates(kind: str | None, num_updates: int, **params: Any) -> list[float]:
    group: dict[str, Any] = {"lr": BASE}
    schedule = LrSchedule([group], SchedulerConfig(type=kind, params=params) if kind else None)
    seen = []
    for _ in range(num_updates):
        seen.append(group["lr"])
        schedule.step()
    return seen


def test_constant() -> None:
    assert rates(None, 3) == [BASE] * 3


def test_linear_warmup() -> None:
    got = rates("WarmupLR", 6, warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear")
    assert got == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_log_warmup() -> None:
    got = rates("WarmupLR", 5, warmup_min_lr=0.0, warmup_max_lr=1.0, warmup_num_steps=4)
    assert got == pytest.approx([0.0] + [math.log(k + 1) / math.log(4) for k in range(4)])


def test_warmup_takes_the_optimizers_rate_when_none_is_given() -> None:
    assert rates("WarmupLR", 4, warmup_max_lr=None, warmup_num_steps=2)[-1] == BASE


def test_decay_reaches_zero_at_the_end() -> None:
    got = rates(
        "WarmupDecayLR", 10, total_num_steps=8, warmup_num_steps=4, warmup_max_lr=1.0, warmup_type="linear"
    )
    assert got == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0])


def test_cosine() -> None:
    got = rates(
        "WarmupCosineLR", 12, total_num_steps=10, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear"
    )
    curve = [0.1 + 0.9 * (1 + math.cos(math.pi * (k - 1) / 8)) / 2 for k in range(2, 10)]
    assert got[:11] == pytest.approx([BASE * ratio for ratio in (0, 0, 0.5, *curve)])
    assert got[11] == pytest.approx(BASE * 0.1), "the lowest ratio holds after the end"


def test_one_cycle_up_and_down_then_decays() -> None:
    got, betas = cycles(
        9,
        cycle_min_lr=0.1,
        cycle_max_lr=0.5,
        cycle_first_step_size=4,
        cycle_second_step_size=2,
        decay_step_size=2,
        decay_lr_rate=1.0,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
        decay_mom_rate=0.1,
    )
    assert got == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.1 / 1.5, 0.1 / 2])
    # Momentum moves against the rate; DeepSpeed starts it at its lowest, and near the top from the second on.
    assert betas == pytest.approx([0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9 * 1.05, 0.9 * 1.1])


def test_one_cycle_by_stairs_and_without_momentum() -> None:
    got, betas = cycles(
        9,
        cycle_min_lr=0.0,
        cycle_max_lr=1.0,
        cycle_first_step_size=4,
        cycle_first_stair_count=2,
        cycle_momentum=False,
    )
    assert got == pytest.approx([0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0])
    assert set(betas) == {0.7}


def cycles(num_updates: int, **params: Any) -> tuple[list[float], list[float]]:
    group: dict[str, Any] = {"lr": BASE, "betas": (0.7, 0.95)}
    schedule = LrSchedule([group], SchedulerConfig(type="OneCycle", params=params))
    seen = []
    for _ in range(num_updates):
        seen.append((group["lr"], group["betas"][0]))
        schedule.step()
    return [lr for lr, _ in seen], [beta for _, beta in seen]


def test_range_test_rises_by_the_step_rate() -> None:
    params = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0}
    assert rates("LRRangeTest", 4, **params) == pytest.approx([0.1 * (1 + 1.5 * k) for k in range(4)])
    stairs = rates("LRRangeTest", 5, **params, lr_range_test_staircase=True)
    assert stairs == pytest.approx([0.1 * (1 + 3.0 * (k // 2)) for k in range(5)])


def test_lists_have_a_value_per_group() -> None:
    groups: list[dict[str, Any]] = [{"lr": 1.0}, {"lr": 2.0}]
    params = {"warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [1.0, 4.0], "warmup_num_steps": 2}
    schedule = LrSchedule(groups, SchedulerConfig(type="WarmupLR", params=params))
    for _ in range(4):
        schedule.step()
    assert schedule.get_last_lr() == [1.0, 4.0]
    with pytest.raises(ConfigError, match=r"warmup_min_lr: must be one number, or one per parameter group"):
        LrSchedule(groups[:1], SchedulerConfig(type="WarmupLR", params=params))


def test_state_goes_through_json_types() -> None:
    group = {"lr": BASE}
    config = SchedulerConfig(type="WarmupLR", params={"warmup_max_lr": 1.0, "warmup_num_steps": 10})
    schedule = LrSchedule([group], config)
    for _ in range(5):
        schedule.step()
    other = {"lr": BASE}
    LrSchedule([other], config).load_state_dict(schedule.state_dict())
    assert other == group


def test_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"scheduler.type: .* got 'Triangle'"):
        rates("Triangle", 1)
