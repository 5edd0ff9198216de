"""Choice of the reports of the ranks that are worth a status write: every write costs all watchers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, ago, job, progress, ready, seen, settled, stamp, status
from zerotrain.contract.progress import Phase
from zerotrain.operator.reconcile import reconcile

pytestmark = pytest.mark.unit


def writes(step: int, *, s_later: float, **more: Any) -> bool:
    """Return whether a record of that step, so many seconds after the stored one of step 40, is written."""
    before = settled(
        job(status=status("Running", attemptStartTime=stamp(ago(3600)))),
        seen(ready(0), ready(1), progress=progress(40, heartbeat_at=ago(100).timestamp())),
    )
    record = progress(step, heartbeat_at=ago(100 - s_later).timestamp(), **more)
    return reconcile(before, seen(ready(0), ready(1), progress=record), NOW).status is not None


@pytest.mark.parametrize(
    ("is_written", "step", "s_later", "more"),
    [
        (False, 41, 9, {}),
        (True, 41, 10, {}),
        (False, 40, 29, {}),
        (True, 40, 30, {}),
        (True, 40, 1, {"phase": Phase.CHECKPOINT}),
        (True, 40, 1, {"saved": 40}),
    ],
    ids=[
        "a step after nine seconds",
        "a step after ten",
        "a heartbeat after 29 seconds",
        "a heartbeat after 30",
        "another phase at once",
        "a durable checkpoint at once",
    ],
)
def test_written(is_written: bool, step: int, s_later: float, more: dict[str, Any]) -> None:
    assert writes(step, s_later=s_later, **more) is is_written


def test_a_write_for_another_reason_takes_the_step_along() -> None:
    before = settled(
        job(status=status("Running")),
        seen(ready(0), ready(1), progress=progress(40, heartbeat_at=ago(100).timestamp())),
    )
    record = progress(47, heartbeat_at=ago(99).timestamp())
    plan = reconcile(before, seen(ready(0, ready=False), ready(1), progress=record), NOW)
    assert plan.status is not None
    assert plan.status.progress.step == 47


def test_a_report_takes_the_place_of_the_last_one_as_a_whole() -> None:
    """Values that the new report leaves out become unknown; the checkpoint stays, because it is on its
    volume.
    """
    rich: dict[str, Any] = {
        "loss": 2.5,
        "tokens_per_second": 900.0,
        "step_seconds": 0.5,
        "total_steps": 100,
        "saved": 30,
    }
    before = settled(
        job(status=status("Running", attemptStartTime=stamp(ago(3600)))),
        seen(ready(0), ready(1), progress=progress(40, heartbeat_at=ago(100).timestamp(), **rich)),
    )
    assert before["status"]["progress"]["loss"] == 2.5
    plan = reconcile(before, seen(ready(0), ready(1), progress=progress(41)), NOW)
    assert plan.status is not None
    stored_progress = plan.status.progress.model_dump(exclude_none=True)
    assert stored_progress["step"] == 41
    assert not {"loss", "tokens_per_second", "step_seconds"} & set(stored_progress), stored_progress
    assert plan.status.checkpoint.last is not None
    assert plan.status.checkpoint.last.step == 30


@pytest.mark.parametrize("s_ahead", [20, 8 * 3600])
def test_a_node_s_clock_that_is_set_back_stops_no_writes(s_ahead: float) -> None:
    assert writes(90, s_later=-s_ahead)
