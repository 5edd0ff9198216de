"""The checkpoint in the status is that of the newest attempt, whatever the clocks of its nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, ago, ended, job, progress, ready, seen, stamp, status
from zerotrain.contract.progress import CheckpointProgress, Termination
from zerotrain.operator.api.status import CheckpointRecord
from zerotrain.operator.reconcile import Observed, reconcile

pytestmark = pytest.mark.unit


YEAR_9999 = 253_370_764_800.0


def saved(step: int, *, s_ago: float = 3, path: str = "/ckpt/x") -> CheckpointProgress:
    return CheckpointProgress(step=step, path=path, time=ago(s_ago).timestamp())


def last(observed: Observed, attempt: int = 2, **known: Any) -> CheckpointRecord:
    """Return status.checkpoint.last after a pass over a job that knew one of step 50 by attempt 1."""
    record = {"step": 50, "path": "/ckpt/50", "time": stamp(ago(30)), "attempt": 1, "durable": True, **known}
    state = status("Running", attempt, checkpoint={"last": record})
    plan = reconcile(job(status=state), observed, NOW)
    checkpoint = plan.status.checkpoint.last if plan.status is not None else None
    return checkpoint or CheckpointRecord.model_validate(record)


def report_of(checkpoint: CheckpointProgress, attempt: int = 2, *, step: int = 60) -> Observed:
    record = progress(step, attempt, checkpoint=checkpoint)
    return seen(ready(0, attempt), ready(1, attempt), progress=record)


def test_a_node_whose_clock_is_behind_reports_the_newest_checkpoint() -> None:
    found = last(report_of(saved(95, s_ago=3000)))
    assert (found.step, found.attempt, found.time) == (95, 2, ago(3000))


def test_and_so_do_its_last_words() -> None:
    words = Termination(attempt=2, code=75, checkpoint=saved(95, s_ago=3000))
    assert last(seen(ended(0, 75, 2, termination=words), ready(1, 2))).step == 95


def test_an_attempt_that_began_with_an_earlier_checkpoint_goes_on_from_there() -> None:
    assert last(report_of(saved(40, s_ago=300), step=40)).step == 40


def test_within_an_attempt_the_later_step_is_the_newer_one() -> None:
    assert last(report_of(saved(40, s_ago=1), attempt=1), attempt=1).step == 50
    assert last(report_of(saved(60, s_ago=600), attempt=1), attempt=1).step == 60


def test_another_attempts_record_does_not_count() -> None:
    assert last(report_of(saved(90), attempt=1)).step == 50


@pytest.mark.parametrize(("step", "shown"), [(2**62, 100), (100, 100), (-5, 0)])
def test_a_step_that_the_job_does_not_have_is_not_believed(step: int, shown: int) -> None:
    record = progress(step, checkpoint=CheckpointProgress(step=step, path="/ckpt", time=YEAR_9999))
    plan = reconcile(job(status=status("Running")), seen(ready(0), ready(1), progress=record), NOW)
    assert plan.status is not None
    assert plan.status.checkpoint.last is not None
    assert (plan.status.checkpoint.last.step, plan.status.progress.step) == (shown, shown)
    assert plan.status.checkpoint.last.time == NOW


def test_what_was_invented_ends_with_its_attempt() -> None:
    found = last(report_of(saved(20, s_ago=1), step=20), step=100, time="9999-01-01T00:00:00Z")
    assert found.step == 20
