"""The origin of a job's state in its status: another job's checkpoint, and whether the job trained any step,
whether its workers answered while they ran or only left a termination message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, UID, ended, job, last_words, progress, ready, seen, status
from zerotrain.contract.progress import MAX_TERMINATION_BYTES, RankEnd, Termination
from zerotrain.operator.reconcile import Plan, reconcile

pytestmark = pytest.mark.unit

OTHER = "99999999-8888-7777-6666-555555555555"


def while_running(uid: str | None, *, step: int = 60, attempt: int = 1, **stored: Any) -> Plan:
    record = progress(step, attempt, resumed_from=60, resumed_job=uid, saved=60)
    body = job(status=status("Running", attempt, **stored))
    return reconcile(body, seen(ready(0, attempt), ready(1, attempt), progress=record), NOW)


def at_the_end(uid: str | None, *, began: int = 100, attempt: int = 1) -> Plan:
    words = last_words(0, attempt, step=100, resumed_from=began, resumed_job=uid)
    words = replace(words, step=100)
    pods = [ended(index, 0, attempt, termination=words) for index in (0, 1)]
    return reconcile(job(status=status("Starting", attempt)), seen(*pods), NOW)


def texts(plan: Plan, reason: str) -> list[str]:
    return [event.message for event in plan.events if event.reason == reason]


def condition(plan: Plan, kind: str) -> str:
    assert plan.status is not None
    return next(item.message for item in plan.status.conditions if item.type == kind)


def test_another_jobs_checkpoint_is_reported() -> None:
    plan = while_running(OTHER)
    assert plan.status is not None
    assert plan.status.checkpoint.resumed_from_step == 60
    assert plan.status.checkpoint.resumed_from_job == OTHER
    [text] = texts(plan, "CheckpointOfAnotherJob")
    assert text == f"attempt 1 began at step 60: that checkpoint was written by another job (uid {OTHER})"
    assert f"written by another job (uid {OTHER})" in condition(plan, "CheckpointDurable")


def test_one_that_no_job_wrote_is_reported() -> None:
    [text] = texts(while_running(""), "CheckpointOfAnotherJob")
    assert text == "attempt 1 began at step 60: no job wrote that checkpoint"


@pytest.mark.parametrize("uid", [UID, None])
def test_the_jobs_own_is_not(uid: str | None) -> None:
    plan = while_running(uid, attempt=2)
    assert plan.status is not None
    assert plan.status.checkpoint.resumed_from_step == 60
    assert plan.status.checkpoint.resumed_from_job is None
    assert texts(plan, "CheckpointOfAnotherJob") == []
    assert "job" not in condition(plan, "CheckpointDurable")


def test_it_is_reported_once() -> None:
    plan = while_running(OTHER, checkpoint={"resumedFromStep": 60, "resumedFromJob": OTHER})
    assert texts(plan, "CheckpointOfAnotherJob") == []


@pytest.mark.parametrize("uid", ["\x1b]0;pwned\x07", "x" * 65, "a b", "-", "\u202e"])
def test_what_is_no_uid_is_not_passed_on(uid: str) -> None:
    plan = while_running(uid)
    assert plan.status is not None
    assert plan.status.checkpoint.resumed_from_job == ""
    assert not any(uid in event.message for event in plan.events)


def test_a_worker_that_ended_before_it_was_asked_reports_it_in_its_message() -> None:
    plan = at_the_end(OTHER)
    assert plan.status is not None
    assert plan.status.phase == "Completed"
    assert plan.status.checkpoint.resumed_from_step == 100
    assert plan.status.checkpoint.resumed_from_job == OTHER
    assert len(texts(plan, "CheckpointOfAnotherJob")) == 1
    [text] = texts(plan, "Completed")
    assert text.startswith("attempt 1 completed the job without training a step: it began at step 100, ")
    assert OTHER in text
    assert condition(plan, "Complete").startswith("no step was trained: it began at step 100")


def test_a_job_that_resumed_from_its_last_checkpoint_reports_that_no_step_was_left() -> None:
    [text] = texts(at_the_end(UID, attempt=2), "Completed")
    assert text.endswith("without training a step: it began at step 100, where no step was left")


def test_a_job_that_trained_reports_its_steps() -> None:
    plan = at_the_end(OTHER, began=60)
    assert texts(plan, "Completed") == ["attempt 1 completed the job after 100 steps"]
    assert condition(plan, "Complete") == ""


def test_the_message_of_a_worker_keeps_where_it_began() -> None:
    """The origin stays, whatever else must be cut."""
    ends = tuple(RankEnd(rank=rank, code=1, reason="x" * 500) for rank in range(64))
    words = Termination(
        attempt=1,
        code=1,
        resumed_from=60,
        resumed_job=OTHER,
        exception="e" * 5000,
        last_line="l" * 5000,
        also_failed=ends,
    )
    text = words.to_json()
    assert len(text.encode()) <= MAX_TERMINATION_BYTES
    read = Termination.from_json(text)
    assert (read.resumed_from, read.resumed_job) == (60, OTHER)
    cut = Termination.from_json(text[:-200])
    assert (cut.resumed_from, cut.resumed_job) == (60, OTHER)
