"""Table of `reconcile` when the API server rejects what a job needs: one event, and Stalled if only users can
help.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    ended,
    job,
    pending,
    ready,
    run,
    running,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.operator.api import Phase
from zerotrain.operator.reconcile import Problem

pytestmark = pytest.mark.unit

BEGUN = {"phase": "Pending", "attempt": 1, "podsCreated": False}
QUOTA = Problem(reason="QuotaExceeded", message="exceeded quota: q, used: pods=12, limited: pods=12")
DOWN = Problem(reason="ApiRefused", message="500 failed calling webhook x: connection refused")
LIMIT = Problem(reason="ApiRefused", message="maximum cpu usage per Pod is 2, but limit is 4", lasting=True)
CLASS = Problem(reason="ApiRefused", message="no PriorityClass with name high was found", lasting=True)
FORBIDDEN = Problem(reason="ApiRefused", message="403 pods is forbidden: cannot delete", lasting=True)
READY = {"Completed": "True", "Failed": "False"}
TAKEN = Problem(reason="NameTaken", message="Service gpt belongs to another owner", lasting=True)


def refused(problem: Problem, **stored: Any) -> Row:
    return Row(id="", job=job(status={**BEGUN, **stored}), seen=seen(problem=problem), want=Want())


@pytest.mark.parametrize("problem", [LIMIT, CLASS, TAKEN])
def test_what_only_people_can_change_stalls_the_job(problem: Problem) -> None:
    want = Want(
        events=(problem.reason,),
        conditions={
            "Stalled": ("True", problem.reason),
            "Reconciling": ("False", problem.reason),
            "Ready": ("False", problem.reason),
        },
        messages={"Stalled": problem.message, "event": problem.message},
    )
    check(replace(refused(problem), want=want))


@pytest.mark.parametrize("problem", [QUOTA, DOWN])
def test_what_may_pass_by_itself_does_not(problem: Problem) -> None:
    want = Want(
        events=(problem.reason,),
        conditions={"Stalled": ("False", "SpecAccepted"), "Reconciling": ("True", problem.reason)},
    )
    check(replace(refused(problem), want=want))


@pytest.mark.parametrize("problem", [LIMIT, QUOTA, TAKEN, DOWN])
def test_it_is_reported_once(problem: Problem) -> None:
    row = refused(problem)
    again, _ = run(replace(row, job=settled(row.job, row.seen)))
    assert again.events == ()
    assert again.status is None


def test_other_numbers_are_the_same_refusal() -> None:
    row = refused(QUOTA)
    later = replace(QUOTA, message=QUOTA.message.replace("12", "11"))
    plan, _ = run(replace(row, job=settled(row.job, row.seen), seen=seen(problem=later)))
    assert plan.events == ()


def test_another_refusal_of_the_same_reason_is_reported_as_well() -> None:
    row = refused(LIMIT)
    plan, _ = run(replace(row, job=settled(row.job, row.seen), seen=seen(problem=CLASS)))
    assert [event.message for event in plan.events] == [CLASS.message]


def test_it_is_over_when_the_pods_exist() -> None:
    row = refused(LIMIT)
    want = Want(conditions={"Stalled": ("False", "SpecAccepted")}, events=())
    there = seen(pending(0), pending(1))
    check(replace(row, job=settled(row.job, row.seen), seen=there, want=want))


@pytest.mark.parametrize("phase", [Phase.COMPLETED, Phase.FAILED, Phase.SUSPENDED])
def test_nothing_is_reported_for_a_job_that_requests_nothing(phase: Phase) -> None:
    spec = {"suspend": phase is Phase.SUSPENDED}
    body = job(spec=spec, status={"phase": phase, "attempt": 1, "podsCreated": True})
    plan, _ = run(Row(id="", job=body, seen=seen(problem=TAKEN), want=Want()))
    assert plan.events == ()


@pytest.mark.parametrize(
    ("stored", "policy"),
    [
        ({"phase": "Failed"}, {}),
        ({"phase": "Completed", "completionTime": stamp(ago(60))}, {"ttlSecondsAfterFinished": 1}),
    ],
    ids=["ranks that cannot be ended", "a job that cannot be deleted"],
)
def test_a_refused_cleanup_is_reported_although_the_job_has_ended(stored: Any, policy: Any) -> None:
    """Ranks of a failed job go on holding their GPUs until somebody allows the deletion."""
    body = job(spec={"runPolicy": policy}, status={"attempt": 1, "podsCreated": True, **stored})
    want = Want(
        phase=stored["phase"],
        events=("ApiRefused",),
        conditions={
            "Reconciling": ("False", "ApiRefused"),
            "Ready": (READY[stored["phase"]], stored["phase"]),
        },
    )
    row = Row(id="", job=body, seen=seen(running(0), ended(1, 1), problem=FORBIDDEN), want=want)
    check(row)
    again, _ = run(replace(row, job=settled(row.job, row.seen)))
    assert again.events == ()
    over, _ = run(replace(row, job=settled(row.job, row.seen), seen=seen()))
    assert over.events == ()


def test_refused_deletions_between_two_attempts_are_reported() -> None:
    row = Row(
        id="",
        job=job(status=status("Restarting")),
        seen=seen(running(0), ended(1, 1), problem=FORBIDDEN),
        want=Want(phase="Restarting", events=("ApiRefused",), conditions={"Ready": ("False", "ApiRefused")}),
    )
    check(row)
    again, _ = run(replace(row, job=settled(row.job, row.seen)))
    assert again.events == ()


def test_a_job_that_trains_is_not_stalled_by_another_refusal() -> None:
    body = job(status=status("Running"))
    want = Want(phase="Running", events=("NameTaken",), conditions={"Stalled": ("False", "SpecAccepted")})
    check(Row(id="", job=body, seen=seen(ready(0), ready(1), problem=TAKEN), want=want))
