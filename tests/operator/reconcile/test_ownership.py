"""Table of `reconcile` where the job is not ours to act on, or what is seen belongs to another job or
attempt.
"""

from __future__ import annotations

import pytest

from tests.operator.reconcile_builders import (
    ALL,
    Row,
    Want,
    ago,
    check,
    ended,
    going,
    job,
    pending,
    ready,
    seen,
    stamp,
    status,
)
from zerotrain.operator.reconcile import CreateWorkers, DeletePods, DeleteWorkers

pytestmark = pytest.mark.unit


LEFT_ALONE = Want(writes=False, actions=(), events=())

FOREIGN = [
    Row(
        id="a job that is being deleted is left to its ownerReferences",
        job=job(deletionTimestamp=stamp(ago(1)), status=status("Running")),
        seen=seen(ready(0)),
        want=LEFT_ALONE,
    ),
    Row(
        id="a new job that is already being deleted gets nothing",
        job=job(deletionTimestamp=stamp(ago(1))),
        seen=seen(),
        want=LEFT_ALONE,
    ),
    Row(
        id="a job of another manager",
        job=job(spec={"managedBy": "kueue.x-k8s.io/multikueue"}),
        seen=seen(),
        want=LEFT_ALONE,
    ),
    Row(
        id="managed by us, said explicitly",
        job=job(spec={"managedBy": "zerotrain.dev/operator"}),
        seen=seen(),
        want=Want(attempt=1),
    ),
]

OTHER_ATTEMPTS = [
    Row(
        id="pods of an earlier attempt are taken away and do not stand in for this one's",
        job=job(status=status("Pending", attempt=2, podsCreated=False)),
        seen=seen(ready(0, 1), ready(1, 1)),
        want=Want(
            phase="Pending",
            attempt=2,
            actions=(DeleteWorkers(attempt=1, grace_s=1), CreateWorkers(attempt=2, indices=ALL)),
            fields={"workers.ready": 0},
        ),
    ),
    Row(
        id="an earlier attempt's pod that hangs is removed by force",
        job=job(status=status("Running", attempt=2)),
        seen=seen(ready(0, 2), ready(1, 2), going(0, 1, grace_s=1, asked_s_ago=300)),
        want=Want(phase="Running", actions=(DeletePods(names_uids=(("gpt-1-0", "pod-1-0"),), grace_s=0),)),
    ),
    Row(
        id="a later attempt's pods mean that our view of the job is old: nothing is done to them",
        job=job(status=status("Restarting", attempt=1)),
        seen=seen(ended(0, 137), ready(0, 2), ready(1, 2)),
        want=Want(phase="Restarting", attempt=1, actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    *(
        Row(
            id=f"if the status was reset to {phase or 'nothing'}, the attempt that has pods goes on",
            job=job(status=status(phase, attempt=0) if phase else {}),
            seen=seen(ready(0, 3), ready(1, 3), lost_attempt=3),
            want=Want(
                phase="Running",
                attempt=3,
                actions=(),
                events=("StatusUnfit", "AllRanksJoined"),
                fields={"shape.workers": 2},
            ),
        )
        for phase in ("", "Pending", "Running")
    ),
    Row(
        id="a forged pod makes such an attempt no larger than the job",
        job=job(status=status("Pending", attempt=0)),
        seen=seen(ready(0, 3), ready(1, 3), ready(9**9, 3), lost_attempt=3),
        want=Want(phase="Running", attempt=3, fields={"shape.workers": 2}),
    ),
    Row(
        id="nor is any attempt believed that no job comes to",
        job=job(status=status("Pending", attempt=0)),
        seen=seen(ready(0, 10**6), lost_attempt=10**6),
        want=Want(phase="Pending", attempt=1),
    ),
    Row(
        id="in a phase without pods, those of the attempt that the status has lost are ended",
        job=job(spec={"suspend": True}, status=status("Suspended", attempt=0)),
        seen=seen(ready(0, 3), lost_attempt=3),
        want=Want(phase="Suspended", attempt=3, actions=(DeleteWorkers(attempt=3, grace_s=1),)),
    ),
    Row(
        id="an index that the job does not have is taken away",
        job=job(status=status("Running")),
        seen=seen(ready(0), ready(1), ready(2)),
        want=Want(
            phase="Running",
            actions=(DeletePods(names_uids=(("gpt-1-2", "pod-1-2"),), grace_s=1),),
            fields={"workers.ready": 2},
        ),
    ),
    Row(
        id="failures of pods of another attempt are not this attempt's",
        job=job(status=status("Running", attempt=2)),
        seen=seen(ready(0, 2), ready(1, 2), gone=(ended(0, 65, 1), ended(1, 1, 1))),
        want=Want(phase="Running", actions=(), fields={"failures.0": None}),
    ),
    Row(
        id="pods of the last attempt that are left when the job finished are not counted",
        job=job(status=status("Completed", attempt=2)),
        seen=seen(ended(0, 0, 2), ended(1, 0, 2), pending(0, 3)),
        want=Want(phase="Completed", actions=()),
    ),
]


@pytest.mark.parametrize("row", FOREIGN, ids=lambda row: row.id)
def test_jobs_of_another_manager_are_left_alone(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", OTHER_ATTEMPTS, ids=lambda row: row.id)
def test_other_attempts(row: Row) -> None:
    check(row)
