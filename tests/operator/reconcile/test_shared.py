"""Table of `reconcile` for the objects that the pods of an attempt share: when their existence is checked."""

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
    pending,
    ready,
    running,
    seen,
    stamp,
    status,
)
from zerotrain.operator.reconcile import (
    CreateWorkers,
    DeleteWorkers,
    KeepShared,
    PodView,
    Protection,
    ProtectWorkers,
    UnprotectWorkers,
)

pytestmark = pytest.mark.unit


KEEP = KeepShared(attempt=1)


def looked(*pods: PodView, id: str, want: Want, due_s_ago: float | None = 0, **more: Any) -> Row:
    """Row of a first attempt whose objects are due to be checked."""
    due = ago(due_s_ago) if due_s_ago is not None else None
    protection = more.pop("protection", None)
    stored = status(more.pop("phase", "Running"), **more)
    return Row(
        id=id, job=job(status=stored), seen=seen(*pods, shared_due=due, protection=protection), want=want
    )


ROWS = [
    looked(ready(0), ready(1), id="while it runs", want=Want(phase="Running", actions=(KEEP,))),
    looked(
        running(0),
        pending(1, waiting="CreateContainerConfigError: secret not found"),
        id="while its pods cannot start, perhaps because of it",
        phase="Pending",
        want=Want(phase="Pending", actions=(KEEP,)),
    ),
    looked(
        ready(0),
        ready(1),
        id="with the disruption budget, where the attempt has one",
        protectedAttempt=1,
        protection=Protection(attempt=1, exists=True),
        want=Want(phase="Running", actions=(KeepShared(attempt=1, protected=2),)),
    ),
    looked(
        ready(0),
        ready(1),
        id="before a budget that may be refused, which would leave an opened policy open",
        protectedAttempt=1,
        attemptStartTime=stamp(ago(900)),
        want=Want(actions=(KEEP, ProtectWorkers(attempt=1, workers=2))),
    ),
    looked(
        ended(0, 1),
        ready(1),
        id="not once the attempt is over",
        protectedAttempt=1,
        protection=Protection(attempt=1, exists=True),
        want=Want(
            phase="Restarting",
            actions=(DeleteWorkers(attempt=1, grace_s=1), UnprotectWorkers(attempt=1)),
        ),
    ),
    looked(ready(0), ready(1), id="not before its time", due_s_ago=-1, want=Want(actions=(), writes=None)),
    looked(ready(0), ready(1), id="not while nobody counts", due_s_ago=None, want=Want(actions=())),
    looked(
        running(0),
        id="pods that are made take care of it",
        phase="Pending",
        podsCreated=False,
        want=Want(actions=(CreateWorkers(attempt=1, indices=(1,)),)),
    ),
    looked(id="not before the first attempt", phase="Suspended", attempt=0, want=Want()),
    looked(
        ended(0, 0),
        ended(1, 0),
        id="not for a job that is done",
        phase="Completed",
        want=Want(phase="Completed", actions=()),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_pods_share_is_looked_after(row: Row) -> None:
    check(row)
