"""Table of runPolicy.activeDeadlineSeconds: no clock before pods exist, and a deadline keeps the earlier
cause.
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
    check,
    ended,
    job,
    pending,
    ready,
    running,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.operator.reconcile import Problem, reconcile

pytestmark = pytest.mark.unit

QUOTA = Problem(reason="QuotaExceeded", message="exceeded quota: q, limited: pods=0")
TAKEN = Problem(reason="NameTaken", message="Pod gpt-1-0 belongs to another owner")
NO_NODE = "Unschedulable: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu."


def within(phase: str, limit_s: int = 500, **stored: Any) -> dict[str, Any]:
    return job(spec={"runPolicy": {"activeDeadlineSeconds": limit_s}}, status=status(phase, **stored))


def waiting(*pods: Any, **stored: Any) -> dict[str, Any]:
    """Return the job as earlier passes stored it, which saw these pods."""
    young = within("Pending", 9_000_000, **stored)
    again = settled(young, seen(*pods))
    return {**again, "spec": within("Pending")["spec"]}


UNSEEN: dict[str, Any] = {"podsCreated": False, "startTime": None, "attemptStartTime": stamp(ago(9000))}
UNPLACED = (pending(0, unscheduled_reason=NO_NODE), pending(1, unscheduled_reason=NO_NODE))
FAILURE = {
    "reason": "RankFailed",
    "message": "CUDA error",
    "attempt": 1,
    "time": stamp(ago(3)),
    "cause": "app",
}

ROWS = [
    *(
        Row(
            id=f"no pod was ever made, {problem.reason}: no clock",
            job=within("Pending", **UNSEEN),
            seen=seen(problem=problem),
            want=Want(phase="Pending", fields={"startTime": None, "completionTime": None}),
        )
        for problem in (QUOTA, TAKEN)
    ),
    Row(
        id="the first pod starts it",
        job=within("Pending", **UNSEEN),
        seen=seen(pending(0), problem=QUOTA),
        want=Want(phase="Pending", fields={"startTime": "2026-01-01T12:00:00Z"}),
    ),
    Row(
        id="a later attempt goes on with the clock of the first",
        job=within("Restarting", 700),
        seen=seen(),
        want=Want(phase="Pending", attempt=2, fields={"startTime": stamp(ago(600))}),
    ),
    Row(
        id="what is refused is named",
        job=within("Pending", podsCreated=False),
        seen=seen(running(0), problem=QUOTA),
        want=Want(
            phase="Failed",
            events=("DeadlineExceeded",),
            messages={
                "event": f"active for more than 500 s; QuotaExceeded: {QUOTA.message}",
                "Failed": QUOTA.message,
                "Ready": QUOTA.message,
            },
        ),
    ),
    Row(
        id="pods without a node: the scheduler's words",
        job=waiting(*UNPLACED),
        seen=seen(*UNPLACED),
        want=Want(phase="Failed", messages={"event": NO_NODE, "Failed": NO_NODE}),
    ),
    Row(
        id="what was given back",
        job=within("Restarting", givenBack={"times": 2, "message": "for 60 s 3 of 8 pods are refused"}),
        seen=seen(),
        want=Want(phase="Failed", messages={"event": "GaveBack: for 60 s 3 of 8 pods are refused"}),
    ),
    Row(
        id="during a hold-off the failure that led to it",
        job=within("Restarting", failures=[FAILURE]),
        seen=seen(),
        want=Want(
            phase="Failed",
            messages={"event": "attempt 1 ended with RankFailed: CUDA error"},
            fields={"failures.0.message": "CUDA error"},
        ),
    ),
    Row(
        id="a failure in the same moment is recorded",
        job=within("Running"),
        seen=seen(ended(0, 1), ready(1)),
        want=Want(
            phase="Failed",
            events=("DeadlineExceeded",),
            fields={"failures.0.reason": "RankFailed", "failures.0.exitCode": 1},
            messages={"event": "worker 0", "Failed": "exit code 1"},
        ),
    ),
    Row(
        id="a job that worked until then has no cause but the deadline",
        job=within("Running"),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Failed", messages={"Failed": "active for more than 500 s"}),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_deadline(row: Row) -> None:
    check(row)


def test_a_job_that_never_had_a_pod_is_never_failed_by_it() -> None:
    body = job(spec={"runPolicy": {"activeDeadlineSeconds": 15}})
    for after_s in (0, 1, 17, 9_000_000):
        now = NOW + timedelta(seconds=after_s)
        body = settled(body, seen(problem=QUOTA if after_s else None), now)
        assert body["status"]["phase"] == "Pending"
    plan = reconcile(body, seen(pending(0), problem=QUOTA), now)
    assert plan.status is not None
    assert plan.status.start_time == now
