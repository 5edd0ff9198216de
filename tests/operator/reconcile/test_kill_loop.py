"""A limit that is too short must not end attempt after attempt, however long it is compared with the
window.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    NOW,
    Row,
    Want,
    ago,
    job,
    progress,
    ready,
    run,
    seen,
    stamp,
    status,
)
from zerotrain.contract.progress import Phase
from zerotrain.operator.api import RestartCause
from zerotrain.operator.api.failures import FailurePolicy
from zerotrain.operator.api.status import Restart, Restarts
from zerotrain.operator.constants import Reason
from zerotrain.operator.failure_policy.decision import hold_off_s
from zerotrain.operator.reconcile.attempt_end import KEPT_HANGS, charge
from zerotrain.operator.reconcile.hangs import MAX_DOUBLINGS
from zerotrain.operator.reconcile.inspection import Inspection, RankPace

pytestmark = pytest.mark.unit


HOUR_S = 3600
DAY_S = 24 * HOUR_S
TRAINED_S = 30_000.0
"""Seconds that an attempt trained before it stood still."""


def is_hung(idle_s: float, limit_s: int, window_s: int, restarts: Restarts, phase: Phase, step: int) -> bool:
    """Return whether the standstill of all ranks for `idle_s` is a hang; the attempt is older than any
    limit.
    """
    spec = {
        "failurePolicy": {"windowSeconds": window_s},
        "hangPolicy": {"startupTimeoutSeconds": limit_s, "minTimeoutSeconds": limit_s},
    }
    state = status(
        "Running",
        attemptStartTime=stamp(ago(idle_s + TRAINED_S)),
        restarts=restarts.model_dump(by_alias=True, mode="json"),
    )
    look = Inspection(attempt=1, at=ago(0), step=step, paces={phase: RankPace(idle_s=idle_s)})
    observed = seen(ready(0), ready(1), progress=progress(step), inspection=look)
    _, after = run(Row(id="", job=job(spec=spec, status=state), seen=observed, want=Want()))
    return after.get("hang") is not None


def later(restarts: Restarts, seconds: float) -> Restarts:
    """Return the restarts as they look after so many seconds, for a clock that stands at NOW."""
    moved = tuple(
        item.model_copy(update={"time": item.time - timedelta(seconds=seconds)}) for item in restarts.recent
    )
    return restarts.model_copy(update={"recent": moved})


def restarts_of(
    silence_s: float, limit_s: int, window_s: int, phase: Phase, *, trained_s: float, gains: bool = True
) -> int:
    """Return how often a healthy job is restarted that stands still for `silence_s` in every attempt, after
    `trained_s` of training; at most 8. Unless it `gains`, it stands still at the same step each time.
    """
    policy, restarts = FailurePolicy(max_restarts=100, window_seconds=window_s), Restarts()
    for number in range(8):
        step = 10 * (number + 1 if gains else 1) if trained_s else 0
        restarts = later(restarts, trained_s)
        hung_after_s = next(
            (
                idle_s
                for idle_s in (limit_s, 2 * limit_s, 4 * limit_s)
                if idle_s < silence_s
                and is_hung(idle_s, limit_s, window_s, later(restarts, idle_s), phase, step)
            ),
            None,
        )
        if hung_after_s is None:
            return number
        hung: dict[str, Any] = {"cause": RestartCause.APP, "reason": str(Reason.HANG), "step": step}
        item = Restart(time=NOW, attempt=number + 1, **hung)
        restarts = charge(later(restarts, hung_after_s), item, policy, now=NOW)
    return 8


@pytest.mark.parametrize("window_s", [600, HOUR_S, DAY_S])
@pytest.mark.parametrize("limit_s", [300, 1800, 2 * HOUR_S, DAY_S])
def test_a_start_of_less_than_four_limits_is_let_through(limit_s: int, window_s: int) -> None:
    found = restarts_of(3.9 * limit_s, limit_s, window_s, Phase.INIT, trained_s=0)
    assert found == MAX_DOUBLINGS


@pytest.mark.parametrize("window_s", [600, HOUR_S, DAY_S])
@pytest.mark.parametrize("limit_s", [600, 1800, 2 * HOUR_S, DAY_S])
def test_so_is_a_step_though_other_steps_were_gained_between(limit_s: int, window_s: int) -> None:
    found = restarts_of(3.9 * limit_s, limit_s, window_s, Phase.STEP, trained_s=limit_s / 2)
    assert found == MAX_DOUBLINGS


def test_however_long_it_trains_before_it_comes_to_that_step_again() -> None:
    """An evaluation of twenty minutes comes two days after the checkpoint."""
    found = restarts_of(1170, 300, HOUR_S, Phase.STEP, trained_s=2 * DAY_S, gains=False)
    assert found == MAX_DOUBLINGS


def test_a_hang_of_long_ago_that_the_job_has_left_behind_counts_no_more() -> None:
    """Rare hangs are found within the limit, also the tenth."""
    found = restarts_of(400, 300, HOUR_S, Phase.STEP, trained_s=2 * DAY_S)
    assert found == 8


def test_only_the_newest_hangs_outlive_the_window() -> None:
    """Hangs must not fill the list, which is bounded."""
    restarts, policy = Restarts(), FailurePolicy(max_restarts=100, window_seconds=HOUR_S)
    for number in range(2 * KEPT_HANGS + 3):
        reason = Reason.HANG if number % 2 else Reason.RANK_FAILED
        item = Restart(time=NOW, cause=RestartCause.APP, reason=str(reason), step=10 * number)
        restarts = charge(later(restarts, 2 * HOUR_S), item, policy, now=NOW)
    kept = [(10 * number, "Hang") for number in range(3, 2 * KEPT_HANGS + 2, 2)]
    assert [(item.step, item.reason) for item in restarts.recent] == [
        *kept,
        (20 * (KEPT_HANGS + 1), "RankFailed"),
    ]
    assert len(kept) == KEPT_HANGS


def test_the_pause_after_a_hang_grows_to_its_longest_however_seldom_they_are() -> None:
    restarts, policy, pauses = (
        Restarts(),
        FailurePolicy(max_restarts=100, window_seconds=HOUR_S),
        list[float](),
    )
    for number in range(9):
        pauses.append(hold_off_s(restarts.recent, policy, step=10 * number, now=NOW, reason=Reason.HANG))
        item = Restart(time=NOW, cause=RestartCause.APP, reason=str(Reason.HANG), step=10 * number)
        restarts = charge(later(restarts, 2 * HOUR_S), item, policy, now=NOW)
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
