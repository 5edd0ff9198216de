"""Table of `reconcile` for ranks whose files went away: a cause in the cluster comes before one that the user
could correct.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    ended,
    job,
    ready,
    seen,
    status,
)

pytestmark = pytest.mark.unit


DONE_TO_THE_POD: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Preempted", "preemption", {"disruption": "PreemptionByScheduler", "deletion_at": ago(0)}),
    ("Preempted", "preemption", {"disruption": "TerminationByKubelet"}),
    ("NodeLost", "infra", {"disruption": "DeletionByTaintManager"}),
    ("PodRejected", "infra", {"pod_reason": "Terminated"}),
    ("Evicted", "infra", {"pod_reason": "Evicted"}),
    ("Evicted", "infra", {"pod_reason": "Evicted", "disruption": "TerminationByKubelet"}),
    ("Preempted", "preemption", {"pod_reason": "Terminated", "disruption": "TerminationByKubelet"}),
)

ROWS = [
    *(
        Row(
            id=f"code {code} of a pod with {found}: {reason}",
            job=job(status=status("Running")),
            seen=seen(ended(0, code, **found), ended(1, 1)),
            want=Want(phase="Restarting", fields={"failures.0.reason": reason, f"restarts.{cause}": 1}),
        )
        for code in (65, 66)
        for reason, cause, found in DONE_TO_THE_POD
    ),
    *(
        Row(
            id=f"code {code} is the user's to answer, whatever was done to the pod",
            job=job(status=status("Running")),
            seen=seen(ended(0, code, disruption="PreemptionByScheduler"), ready(1)),
            want=Want(phase="Failed", conditions={"Failed": ("True", "PermanentFailure")}),
        )
        for code in (64, 67, 68, 69, 83)
    ),
    *(
        Row(
            id=f"so is code {code} where node and pod are well",
            job=job(status=status("Running")),
            seen=seen(ended(0, code), ready(1)),
            want=Want(phase="Failed"),
        )
        for code in (65, 66)
    ),
    Row(
        id="a volume that failed on all ranks: another attempt, at the infrastructure's cost",
        job=job(status=status("Running")),
        seen=seen(ended(0, 85), ended(1, 85)),
        want=Want(
            phase="Restarting",
            events=("StorageFailed",),
            fields={"failures.0.reason": "StorageFailed", "restarts.infra": 1, "restarts.app": 0},
        ),
    ),
    Row(
        id="peers that lost the rank are its echo",
        job=job(status=status("Running")),
        seen=seen(ended(0, 1, s_ago=9), ended(1, 85, s_ago=2)),
        want=Want(phase="Restarting", fields={"failures.0.exitCode": 85, "restarts.infra": 1}),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_files_that_went_away(row: Row) -> None:
    check(row)
