"""Requests of a waiting job to its queue when its Workload has to change or to end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    job,
    ready,
    seen,
    stamp,
    status,
)
from zerotrain.operator.reconcile import AskQueue
from zerotrain.operator.reconcile.observe import ClusterApis, QueueView
from zerotrain.operator.reconcile.plan import QueueStep

pytestmark = pytest.mark.unit

KUEUE = ClusterApis(at=ago(5), kueue="kueue.x-k8s.io/v1beta1")
FOLLOW = QueueStep.FOLLOW


def queued(phase: str = "Queued", **scheduling: Any) -> dict[str, Any]:
    done = {"completionTime": stamp(ago(9))} if phase == "Completed" else {}
    spec = {"scheduling": {"queueName": "q", **scheduling}, "suspend": phase == "Suspended"}
    return job(spec=spec, status=status(phase, 0 if phase == "Queued" else 1, **done))


def in_queue(**more: Any) -> QueueView:
    return QueueView(**{"exists": True, "workers": 2, "queue": "q", **more})


def gone(**metadata: Any) -> dict[str, Any]:
    return {**job(status=status("Queued", 0), **metadata)}


DELETED = [
    Row(
        id="a-job-that-is-being-deleted",
        job=gone(deletionTimestamp=stamp(ago(1))),
        seen=seen(),
        want=Want(actions=(), writes=False),
    ),
]

QUEUE = [
    Row(
        id="a-new-priority-queues-anew",
        job=queued(priorityClassName="high"),
        seen=seen(apis=KUEUE, queue=in_queue(priority_class="low")),
        want=Want(phase="Queued", actions=(AskQueue(step=QueueStep.DELETE),)),
    ),
    Row(
        id="the-same-priority-waits",
        job=queued(priorityClassName="high"),
        seen=seen(apis=KUEUE, queue=in_queue(priority_class="high")),
        want=Want(phase="Queued", actions=()),
    ),
    Row(
        id="with-quota-the-old-priority-stays",
        job=queued(priorityClassName="high"),
        seen=seen(apis=KUEUE, queue=in_queue(priority_class="low", holds_quota=True)),
        want=Want(phase="Queued", actions=()),
    ),
    Row(
        id="followed-but-not-listed-yet",
        job=queued(),
        seen=seen(apis=KUEUE, follows_queues=True),
        want=Want(phase="Queued", actions=(), wake_in_s=2),
    ),
    *(
        Row(
            id=f"nothing-to-repeat-without-kueue-{phase}",
            job=queued(phase),
            seen=seen(
                *((ready(0), ready(1)) if phase == "Running" else ()),
                apis=ClusterApis(at=ago(5)),
                follows_queues=True,
            ),
            want=Want(phase=phase, actions=()),
        )
        for phase in ("Suspended", "Completed", "Running")
    ),
    Row(
        id="followed-once",
        job=queued("Suspended"),
        seen=seen(apis=KUEUE),
        want=Want(actions=(AskQueue(step=FOLLOW, workers=2, message="the job is Suspended"),)),
    ),
]


@pytest.mark.parametrize("row", DELETED + QUEUE, ids=lambda row: row.id)
def test_reconcile(row: Row) -> None:
    check(row)
